"""A model in few bits recovers: its codes and zeros stay, its scales and all that is on no grid learn."""

from copy import deepcopy

import pytest
import torch
from students import (
    Segmenter,
    are_equal,
    bits_of,
    codes_of,
    in_codes,
    llama,
    pruned,
    scales_of,
    sequences,
    zeros_of,
)
from torch import nn

from prunus import quantize, recover
from prunus.grids import OnGrid, on_grids, put_on_grid_
from prunus.ops.grid import Grid
from prunus.recovery.learned_scale import LearnedScale, check_codes


@pytest.fixture(scope="module")
def teacher():
    return llama()


def state_of(model):
    return bits_of(model) | {f"{name} scales": scales for name, scales in scales_of(model).items()}


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 2), (torch.bfloat16, 4), (torch.float16, 8)])
def test_scales_learn_codes_and_zeros_stay_and_undo_brings_all_back(teacher, dtype, bits):
    student = in_codes(pruned(teacher).to(dtype), bits)
    codes, zeros, before = codes_of(student), zeros_of(student), state_of(student)
    recovery = recover(student, teacher, sequences(20), steps=12, held_out=3, progress=False)
    assert recovery.after.kl < 0.95 * recovery.before.kl and recovery.after.loss < recovery.before.loss
    assert "Codes of 14 layers stay fixed; their scales learn." in recovery.notes
    assert are_equal(codes_of(student), codes) and are_equal(zeros_of(student), zeros)
    assert not any(torch.equal(before[name], values) for name, values in state_of(student).items())
    assert {scales.dtype for scales in scales_of(student).values()} == {torch.bfloat16}
    assert {p.dtype for p in student.parameters()} == {dtype} and all(p.grad is None for p in student.parameters())
    recovery.undo_()
    assert are_equal(state_of(student), before)


@pytest.mark.slow
def test_what_quantize_gives_recovers_and_is_undone_after_the_recovery(teacher):
    student, batches = pruned(teacher), sequences(12)
    sparse = bits_of(student)
    result = quantize(student, batches[:2], bits=3, progress=False)
    codes = codes_of(student)
    recovery = recover(student, teacher, batches, steps=6, progress=False)
    assert recovery.after.kl < recovery.before.kl and codes and are_equal(codes_of(student), codes)
    with pytest.raises(ValueError, match="trained or changed"):
        result.undo_()
    recovery.undo_()
    result.undo_()
    assert are_equal(bits_of(student), sparse) and not on_grids(student)


def test_what_is_measured_at_the_end_is_the_rounded_model(teacher):
    student, batches = in_codes(pruned(teacher)), sequences(10)
    recovery = recover(student, teacher, batches, steps=5, held_out=batches[:2], progress=False)
    again = recover(student, teacher, batches, steps=1, held_out=batches[:2], progress=False)
    assert again.before == recovery.after


def test_layers_on_no_grid_learn_their_weights(teacher):
    student = in_codes(pruned(teacher), only="self_attn")
    codes, zeros, before = codes_of(student), zeros_of(student), state_of(student)
    recovery = recover(student, teacher, sequences(12), steps=8, progress=False)
    assert len(codes) == 8 and recovery.notes[-1].startswith("Codes of 8 layers")
    assert are_equal(codes_of(student), codes) and are_equal(zeros_of(student), zeros)
    assert not any(torch.equal(before[name], values) for name, values in state_of(student).items())


def test_train_says_which_scales_learn(teacher):
    student = in_codes(pruned(teacher))
    before = state_of(student)
    recover(student, teacher, sequences(8), steps=3, train=["*norm*", "*.up_proj.*"], progress=False)
    changed = {name for name, values in state_of(student).items() if not torch.equal(values, before[name])}
    assert changed == {name for name in before if "norm" in name or ".up_proj." in name}
    recovery = recover(student, teacher, sequences(8), steps=1, train="*norm*", progress=False)
    assert not any("Codes" in note for note in recovery.notes)


def test_a_student_that_gets_worse_ends_as_it_began(teacher):
    for lr in (3.0, 1e30):
        student = in_codes(pruned(teacher, 0.1).bfloat16())
        before = state_of(student)
        recovery = recover(student, teacher, sequences(8), steps=4, lr=lr, progress=False)
        assert recovery.best_step == 0 and recovery.after == recovery.before
        assert are_equal(state_of(student), before)


@pytest.mark.slow
def test_an_interruption_leaves_weights_and_scales_as_they_were(teacher):
    def batches():
        yield from sequences(20)
        raise KeyboardInterrupt

    student = in_codes(pruned(teacher).bfloat16())
    before = state_of(student)
    with pytest.raises(KeyboardInterrupt):
        recover(student, teacher, batches(), steps=30, held_out=3, progress=False)
    assert are_equal(state_of(student), before)


def test_a_dense_model_in_few_bits_recovers_without_a_warning(teacher, recwarn):
    student = in_codes(deepcopy(teacher), 2)
    recovery = recover(student, teacher, sequences(12), steps=8, progress=False)
    assert recovery.after.kl < recovery.before.kl and not any("nothing was pruned" in str(w.message) for w in recwarn)


def test_plain_models_with_convolutions_and_ragged_groups_learn():
    torch.manual_seed(1)
    model = Segmenter().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    student = in_codes(pruned(model, 0.5), bits=3, group=7)
    codes, zeros = codes_of(student), zeros_of(student)
    batches = [(torch.randn(3, 1, 6, 7), torch.randint(3, (3, 6, 7))) for _ in range(8)]
    recovery = recover(student, model, batches, steps=40, lr=3e-3, progress=False)
    assert recovery.after.kl < 0.97 * recovery.before.kl
    assert are_equal(codes_of(student), codes) and are_equal(zeros_of(student), zeros)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bf16": True}, {"accumulate": 2}, {"hard": 0.5}])
def test_codes_stay_in_every_kind_of_run(teacher, options):
    student = in_codes(pruned(teacher))
    student.gradient_checkpointing_enable()
    codes = codes_of(student)
    recovery = recover(student, teacher, sequences(20), steps=8, progress=False, **options)
    assert recovery.after.kl < recovery.before.kl and are_equal(codes_of(student), codes)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compile": True, "steps": 4}, {"steps": 300}])
def test_codes_stay_where_blocks_are_compiled_and_through_trials_of_the_rate(teacher, options):
    student = in_codes(pruned(teacher))
    codes = codes_of(student)
    recovery = recover(student, teacher, sequences(20), progress=False, **options)
    assert recovery.after.kl < recovery.before.kl and are_equal(codes_of(student), codes)


def test_weights_that_left_their_grid_and_sharded_ones_are_refused_in_one_line(teacher):
    student = in_codes(pruned(teacher))
    before = state_of(student)
    with pytest.raises(ValueError, match="cannot learn under FSDP") as refused:
        check_codes(student, is_sharded=True)
    assert "\n" not in str(refused.value)
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match=r"up_proj.weight has .* off its .*grid"):
        recover(student, teacher, sequences(4), steps=1, progress=False)
    assert are_equal(scales_of(student), {name: before[f"{name} scales"] for name in scales_of(student)})


SHAPES = [(3, 20, 8), (1, 1, 128), (4, 128, 128), (2, 129, 128), (5, 3, 1)]


@pytest.mark.parametrize(("num_rows", "num_columns", "group"), SHAPES)
def test_the_gradient_of_a_scale_is_that_of_autograd(num_rows, num_columns, group):
    torch.manual_seed(0)
    grid = Grid(4, group)
    layer = nn.Linear(num_columns, num_rows, bias=False)
    codes = torch.randint(16, layer.weight.shape).byte()
    scales = (torch.rand(grid.scales_shape(layer.weight.shape)) + 0.1).bfloat16().float()
    mask, upstream = torch.rand(layer.weight.shape) > 0.4, torch.randn(layer.weight.shape)
    with torch.no_grad():
        layer.weight.copy_(grid.values(codes, scales, torch.float32) * mask)
    put_on_grid_(layer, "weight", OnGrid(grid, scales))
    learned = LearnedScale(layer, "weight", on_grids(layer)["weight"], torch.float32)
    layer.weight.grad = upstream
    learned.take_gradient_()
    log = torch.zeros_like(scales, requires_grad=True)
    by_column = (scales * log.exp()).repeat_interleave(group, 1)[:, :num_columns]
    ((codes - grid.middle) * by_column * mask * upstream).sum().backward()
    torch.testing.assert_close(learned.log.grad, log.grad, rtol=1e-4, atol=1e-5)
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [-10.0, 10.0])
@pytest.mark.parametrize("largest", [0.0, torch.inf])
def test_scales_at_the_limits_of_a_dtype_neither_lose_a_weight_nor_make_one_infinite(dtype, log, largest):
    grid = Grid(4, 8)
    layer, codes = nn.Linear(16, 1, bias=False), torch.arange(16).byte().view(1, 16)
    scales = grid.allowed(torch.full((1, 2), largest), dtype)
    layer.weight.data = grid.values(codes, scales, dtype).float()
    put_on_grid_(layer, "weight", OnGrid(grid, scales))
    learned = LearnedScale(layer, "weight", on_grids(layer)["weight"], dtype)
    learned.log.data.fill_(log)
    learned.follow_()
    learned.finish_()
    values = layer.weight.detach().to(dtype)
    assert (values != 0).all() and values.isfinite().all()
    assert torch.equal(grid.codes(values, on_grids(layer)["weight"].scales), codes)
