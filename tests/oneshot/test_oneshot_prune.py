"""``prune``: what it promises of the model, the strategies, the rules for tau, and its errors."""

from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, bits_of, snapshot
from probe_models import CASES, cnn, entropy, llama, mlp
from torch import nn

from prunus import NofM, PerRow, prune
from prunus.oneshot import Probe
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.method import Method
from prunus.oneshot.originals import Originals
from prunus.oneshot.probe.engine import Engine
from prunus.oneshot.prune import prune_to
from prunus.oneshot.scoring import Scores

SCHEDULES = ["joint", "sequential", "block"]


@pytest.mark.parametrize(("case", "schedule"), each_once(CASES, SCHEDULES))
def test_the_model_keeps_mode_statistics_flags_and_every_weight_that_is_not_pruned(case, schedule):
    case = CASES[case](torch.float32)
    case.model.train()
    list(case.model.modules())[-1].eval()
    frozen = next(p for p in case.model.parameters() if p.ndim == 1)
    frozen.requires_grad_(False)
    first = next(iter(case.model.parameters()))
    first.grad = torch.ones_like(first)
    before, dense = snapshot(case.model), deepcopy(dict(case.model.named_parameters()))
    result = prune(case.model, case.batches, 0.4, score="wanda", probe=Probe(0.05, schedule=schedule), loss=case.loss)
    assert_same(before, snapshot(case.model), weights_too=False)
    for name, parameter in case.model.named_parameters():
        keep = result.masks[name] if name in result.masks else torch.ones_like(parameter, dtype=torch.bool)
        assert torch.equal(bits_of(parameter[keep]), bits_of(dense[name][keep])), name
        assert not parameter[~keep].any() and not parameter[~keep].signbit().any()
    result.undo_()
    assert_same(before, snapshot(case.model))


def test_changes_are_taken_back_the_last_one_first():
    weight, originals = nn.Parameter(torch.tensor([1.0, -0.0, float("nan")])), Originals()
    before, where = bits_of(weight).clone(), torch.ones(3, dtype=torch.bool)
    for value in (2.0, 3.0):
        originals.save(weight, where)
        weight.detach().fill_(value)
    originals.restore_()
    assert torch.equal(bits_of(weight), before)


def interrupted(num_calls):
    """A loss that is interrupted at that call, and the list of its calls."""
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == num_calls:
            raise KeyboardInterrupt
        return entropy(output, target)

    return loss, calls


@pytest.mark.parametrize(("schedule", "at"), each_once(SCHEDULES, [0.02, 0.3, 0.6, 0.95]))
def test_after_an_exception_the_model_is_as_before(schedule, at):
    case = cnn(torch.float32)
    case.model.train()
    before = snapshot(case.model)
    loss, calls = interrupted(None)
    prune(
        deepcopy(case.model),
        case.batches,
        0.5,
        score="wanda",
        probe=Probe(10.0, schedule=schedule),
        loss=loss,
    )
    with pytest.raises(KeyboardInterrupt):
        loss = interrupted(max(1, round(at * len(calls))))[0]
        prune(case.model, case.batches, 0.5, score="wanda", probe=Probe(10.0, schedule=schedule), loss=loss)
    assert_same(before, snapshot(case.model))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "dtype"), each_once(SCHEDULES, [torch.bfloat16, torch.float16]), ids=str)
def test_half_precision_models_are_probed_without_rounding_a_kept_weight(schedule, dtype):
    case = llama(dtype, num_layers=2)
    weight = case.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, :4] = torch.tensor([-0.0, 6e-8, -6e-8, 1e-30])
    dense = deepcopy(dict(case.model.named_parameters()))
    result = prune(
        case.model, case.batches, 0.5, score="magnitude", select=PerRow(), probe=Probe(0.05, schedule=schedule)
    )
    vetoed = 0
    for name, mask in result.masks.items():
        parameter = case.model.get_parameter(name)
        assert parameter.dtype == dtype
        assert torch.equal(bits_of(parameter[mask]), bits_of(dense[name][mask]))
        vetoed += int(mask.sum()) - parameter.numel() // 2
    assert vetoed > 0 and 0 < result.sparsity < 0.5


@pytest.mark.parametrize(("limit", "score"), each_once([1, 4, 2], ["magnitude", "fisher"]))
def test_out_of_memory_halves_the_batch_and_changes_nothing(limit, score, monkeypatch):
    """The memory runs out at the end of a pass, when some of it has been recorded already."""
    case = llama(num_layers=2)
    expected = prune(deepcopy(case.model), case.batches, 0.5, score=score, probe=Probe(0.05, schedule="block"))
    add_chunk, refused = Engine._add_chunk, []

    def crowded(self, found, start, chunk, variants, statistic):
        add_chunk(self, found, start, chunk, variants, statistic)
        if chunk.size * len(variants) > limit:
            refused.append(chunk.size)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "_add_chunk", crowded)
    result = prune(case.model, case.batches, 0.5, score=score, probe=Probe(0.05, schedule="block"), batch_size=64)
    assert refused
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_a_level_that_was_taken_back_leaves_nothing_that_the_next_one_reads():
    """Outputs of blocks were stored with the first level's weights; the next level starts behind them."""
    case = llama(num_layers=2)
    expected = prune(deepcopy(case.model), case.batches, 0.6, score="wanda", probe=Probe(0.05))
    calibration = Calibration(case.model, case.batches)
    scores = Scores(calibration, Method("wanda", PerRow()))
    with calibration.open():
        prune_to(scores, 0.5, Probe(0.05, order="forward")).undo_()
        scores.changed()
        second = prune_to(scores, 0.6, Probe(0.05))
    assert all(torch.equal(second.packed[name], mask) for name, mask in expected.level.packed.items())


def test_tensors_pairs_and_dicts_of_the_same_samples_are_the_same(monkeypatch):
    tokens = torch.randint(0, 31, (5, 8))
    ones = torch.ones_like(tokens)
    kinds = [
        [tokens],
        [tokens[:2], tokens[2:]],
        [(tokens, tokens)],
        [{"input_ids": tokens}],
        [{"input_ids": tokens, "attention_mask": ones, "labels": tokens}],
        ({"input_ids": row[None]} for row in tokens),
    ]
    found = [
        prune(llama(num_layers=1).model, batches, 0.5, score="wanda", probe=Probe(0.05)).masks for batches in kinds
    ]
    for masks in found[1:]:
        assert all(torch.equal(masks[name], mask) for name, mask in found[0].items())


def test_a_sample_counts_by_its_own_mean_however_long_its_neighbours_are():
    """Padding a sample changes nothing, and neither does company."""
    tokens = torch.randint(0, 31, (2, 8))
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    together = [{"input_ids": tokens, "attention_mask": mask}]
    apart = [{"input_ids": tokens[:1]}, {"input_ids": tokens[1:, :5]}]
    first = prune(llama(num_layers=2).model, together, 0.5, probe=Probe(0.05))
    second = prune(llama(num_layers=2).model, apart, 0.5, probe=Probe(0.05))
    assert all(torch.equal(first.masks[name], mask) for name, mask in second.masks.items())


@pytest.mark.slow
def test_a_wrapped_model_is_pruned_inside():
    case = mlp()
    wrapped = nn.DataParallel(case.model)  # moves the model to a GPU where there is one
    inner = deepcopy(case.model)
    prune(torch.compile(wrapped), case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    prune(inner, case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), case.model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("probe", [None, pytest.param(Probe(0.05), marks=pytest.mark.slow)])
def test_a_model_that_has_run_compiled_is_pruned_by_its_inputs(probe):
    torch._dynamo.reset()
    case = cnn()
    expected = prune(deepcopy(case.model), case.batches, 0.5, score="wanda", probe=probe, loss=case.loss)
    case.model.compile(backend="eager")
    case.model.requires_grad_(False)
    with torch.no_grad():
        for size in (1, 2, 4):
            case.model.eval()(case.batches[0][0][:size])
    case.model.requires_grad_(True)
    result = prune(case.model, case.batches, 0.5, score="wanda", probe=probe, loss=case.loss)
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_progress_is_told_of_every_weight():
    case, said = mlp(), []
    prune(case.model, case.batches, 0.5, probe=Probe(), loss=case.loss, progress=lambda *what: said.append(what))
    done = [what for what in said if what[2].startswith("probed ")]
    assert done == [(1, 3, "probed 4.weight"), (2, 3, "probed 2.weight"), (3, 3, "probed 0.weight")]


def test_the_result_counts_passes_time_and_memory():
    case = mlp()
    result = prune(case.model, case.batches, 0.5, probe=Probe(), loss=case.loss)
    assert result.cost.passes == 2 * 3 * 8 + 4 and result.seconds > 0 and result.cost.peak_bytes > 0
    assert f"{result.sparsity:.4%}" in repr(result) and len(repr(result)) < 120 and "tensor" not in repr(result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.0}, r"\[0, 1\)"),
        ({"sparsity": -0.1}, r"\[0, 1\)"),
        ({"sparsity": "50%"}, r"a number in \[0, 1\), as 0.5 for a half, got '50%'"),
        ({"batches": 0.8, "score": "magnitude", "probe": None}, "iterable of batches, got 0.8; .*sparsity=0.5"),
        ({"batches": "calib.u16"}, "iterable of batches, got 'calib.u16'"),
        ({"select": "row"}, r"PerRow\(\), got 'row'"),
        ({"score": "bitter7"}, "optimizer"),
        ({"score": "wandas"}, "wandas"),
        ({"batches": []}, "no calibration samples"),
        ({"batches": [torch.zeros(0, 9)]}, "without rows"),
        ({"batches": [5]}, "without a tensor"),
        ({"batches": torch.zeros(3, 9)}, "put it into a list"),
        ({"batches": [(1, 2, 3)]}, "3 parts"),
        ({"loss": None}, "no loss of its own"),
        ({"loss": lambda output, target: output}, "one number"),
        ({"exclude": "nowhere"}, "nowhere"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 2.5}, "at least 1"),
        ({"select": NofM(2, 4), "sparsity": 0.3}, "2:4"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_model_alone(options, said):
    case = mlp()
    before = snapshot(case.model)
    settings = {"batches": case.batches, "sparsity": 0.5, "score": "wanda", "probe": Probe(), "loss": entropy} | options
    with pytest.raises(ValueError, match=said) as error:
        prune(case.model, **settings)
    assert "\n" not in str(error.value)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("empty", [[], {}.values()], ids=["list", "view"])
def test_an_empty_list_of_batches_is_refused_and_not_taken_for_none(empty):
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="batches is empty; leave it out to prune by magnitude"):
        prune(model, empty, sparsity=0.5)
    assert torch.equal(model.weight, before)


def test_arguments_that_are_swapped_or_classes_are_refused():
    model, batches = nn.Linear(4, 4), [torch.randn(8, 4)]
    with pytest.raises(ValueError, match="first argument is a model, then come batches, got list"):
        prune(batches, model, sparsity=0.5)
    with pytest.raises(ValueError, match=r"select is a selector, PerRow\(\), got the class itself"):
        prune(model, batches, sparsity=0.5, select=PerRow)
