"""``prune`` with repair: it is what a plain loop over whole models and the solver give, and keeps its promises."""

import linecache
import math
from copy import deepcopy
from functools import cache

import pytest
import torch
from covering import each_once
from families import build, inputs
from probe_checks import assert_same, snapshot, zeros
from probe_models import CASES, cnn, convolutions, entropy, llama, mlp
from torch import nn

from prunus import BlockTuning, Global, NofM, PerLayer, PerRow, Repair, prune
from prunus.oneshot import Probe
from prunus.oneshot.gram import Gram
from prunus.oneshot.layers import Reader
from prunus.oneshot.solver import solve
from prunus.oneshot.step import keep_all_but
from prunus.score import bitter7


def inputs_of(model, module, batches):
    """What a layer is called with in whole passes, batch by batch."""
    found = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: found.append(next(iter(args or kwargs.values()))),
                                              with_kwargs=True)  # fmt: skip
    for batch in batches:
        batch = batch[0] if isinstance(batch, tuple) else batch
        model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    return found


@torch.no_grad()
def repaired_plainly(dense, batches, groups, sparsity, repair):
    """Group after group over whole models: inputs in the dense and in the pruned one, then the solver."""
    dense, pruned = deepcopy(dense).eval(), deepcopy(dense).eval()
    for names in groups:
        path = names[0].removesuffix(".weight")
        gram, module = Gram(), pruned.get_submodule(path)
        both = (inputs_of(model, model.get_submodule(path), batches) for model in (pruned, dense))
        for batch, x, x_dense in zip(batches, *both, strict=True):
            valid = batch["attention_mask"].bool() if isinstance(batch, dict) else None
            gram.add(Reader(module).rows(x)[0], Reader(module).rows(x_dense)[0], valid)
        weights = {name: pruned.get_parameter(name).flatten(1) for name in names}
        counts = {name: round(sparsity * weight.numel()) for name, weight in weights.items()}
        for name, solution in solve(weights, gram.moments(), keep_all_but(counts), repair).items():
            parameter = pruned.get_parameter(name)
            parameter.copy_(solution.weight.view(parameter.shape))
    return pruned


def llama_groups(num_layers):
    parts = [["q_proj", "k_proj", "v_proj"], ["o_proj"]], [["gate_proj", "up_proj"], ["down_proj"]]
    return [
        [f"model.layers.{i}.{where}.{part}.weight" for part in group]
        for i in range(num_layers)
        for where, groups in zip(("self_attn", "mlp"), parts, strict=True)
        for group in groups
    ]


@cache
def llama_repaired_plainly(repair):
    case = llama(num_layers=2)
    return repaired_plainly(case.model, case.batches, llama_groups(2), 0.5, repair)


@pytest.mark.parametrize(
    ("repair", "batch_size", "offload"),
    each_once([Repair(), Repair("own", damping=0.1)], [1, None, 3], [None, "cpu"]),
    ids=str,
)
def test_a_llama_is_repaired_as_by_a_plain_loop_over_whole_models(repair, batch_size, offload):
    case, expected = llama(num_layers=2), llama_repaired_plainly(repair)
    result = prune(case.model, case.batches, repair=repair, batch_size=batch_size, offload=offload)
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-8)
    assert all(layer.error <= layer.mask_error and layer.not_repaired is None for layer in result.layers)


def test_convolutions_and_layers_outside_blocks_are_repaired_as_by_a_plain_loop():
    model, batches = convolutions()
    groups = [["stem.weight"], ["blocks.0.weight"], ["blocks.1.weight"], ["head.weight"]]
    expected = repaired_plainly(model, batches, groups, 0.4, Repair())
    prune(model, batches, 0.4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("repair", "score"), each_once([None, Repair()], [None, "wanda"]), ids=str)
def test_sparsity_is_allocated_by_fisher(repair, score):
    case, other = llama(torch.float32), llama(torch.float32)
    result = prune(case.model, case.batches, 0.5, score=score, select=PerLayer("fisher"), repair=repair)
    assert result.num_pruned == round(0.5 * result.num_weights)
    alone = {layer.name: layer.sparsity for layer in prune(other.model, other.batches, 0.5, score="fisher").layers}
    shifts = [layer.sparsity - alone[layer.name] for layer in result.layers if 0.36 < layer.sparsity < 0.64]
    assert all(0.34 < layer.sparsity < 0.66 for layer in result.layers)
    assert len(shifts) > 3 and max(shifts) - min(shifts) < 0.01


def test_sparsity_is_allocated_by_the_second_moments_of_training():
    case, before = llama(torch.float32), snapshot(llama(torch.float32).model)
    draw = torch.Generator().manual_seed(0)
    weights = {name: p for name, p in case.model.named_parameters() if "proj" in name}
    moments = {name: torch.rand(p.shape, generator=draw) ** 8 * (1 + i) for i, (name, p) in enumerate(weights.items())}
    scores = {name: bitter7(p.detach(), moments[name]) for name, p in weights.items()}
    alone = {name: 1 - mask.float().mean().item() for name, mask in Global()(scores, 0.6).items()}
    result = prune(case.model, case.batches, 0.6, select=PerLayer("moments"), moments=moments)
    assert result.num_pruned == round(0.6 * result.num_weights) == sum(zeros(case.model, result.masks).values())
    assert all(0.44 < layer.sparsity < 0.76 for layer in result.layers)
    shifts = [layer.sparsity - alone[layer.name] for layer in result.layers if 0.46 < layer.sparsity < 0.74]
    assert len(shifts) > 3 and max(shifts) - min(shifts) < 0.01
    result.undo_()
    del moments["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"there are none of model\.layers\.1\.mlp\.up_proj\.weight"):
        prune(case.model, case.batches, 0.6, select=PerLayer("moments"), moments=moments)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize(
    ("make", "select", "score"),
    each_once(CASES, [PerLayer(), PerLayer("erk"), PerRow(), Global()], [None, "wanda"], times=2),
    ids=str,
)
def test_counts_are_exact_for_every_selector(make, select, score):
    case = CASES[make](torch.float32)
    dense = deepcopy(case.model)
    result = prune(case.model, case.batches, 0.4, score=score, select=select)
    masks = prune(dense, sparsity=0.4, select=select)
    assert result.num_pruned == masks.num_pruned == sum(zeros(case.model, result.masks).values())
    for layer, alone in zip(result.layers, masks.layers, strict=True):
        weight = case.model.get_parameter(layer.name).detach()
        assert layer.num_pruned == int((weight == 0).sum())
        assert not weight[weight == 0].signbit().any()  # -0.0 would take the room of a value in a small file
        if not isinstance(select, Global):
            assert layer.num_pruned == alone.num_pruned
        if isinstance(select, PerRow):
            rows = [mask.flatten(1).sum(1) for mask in (result.masks[layer.name], masks.masks[layer.name])]
            assert torch.equal(*rows)


def test_two_of_four_is_two_of_four():
    case = llama(torch.float32, num_layers=1)
    result = prune(case.model, case.batches, select=NofM(2, 4))
    assert all((mask.unflatten(1, (-1, 4)).sum(2) == 2).all() for mask in result.masks.values())
    few = prune(llama(torch.float32, num_layers=1).model, case.batches, select=NofM(1, 4))
    assert few.sparsity == 0.75


@pytest.mark.parametrize("make", CASES)
def test_the_model_keeps_its_mode_and_comes_back_as_it_was(make):
    case = CASES[make](torch.float32)
    case.model.train()
    list(case.model.modules())[-1].eval()
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.5, repair=Repair(batch_norm=False))
    assert_same(before, snapshot(case.model), weights_too=False)
    pruned = snapshot(case.model)
    result.undo_()
    assert_same(before, snapshot(case.model))
    result.apply_()
    assert_same(pruned, snapshot(case.model))
    result.undo_()
    assert_same(before, snapshot(case.model))


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def test_statistics_of_batch_norms_follow_those_of_the_samples_and_are_restored():
    case = cnn(torch.float32)
    images, first = torch.cat([x for x, _ in case.batches]), case.model.blocks[0].norm
    (seen,) = inputs_of(case.model.eval(), first, [images])
    shift, factor = torch.randn_like(first.running_mean), torch.rand_like(first.running_var) + 0.5
    with torch.no_grad():  # statistics of other data than the samples
        first.running_mean.copy_(seen.mean((0, 2, 3)) + shift)
        first.running_var.copy_(seen.var((0, 2, 3)) * factor)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.5)
    (now,) = inputs_of(case.model.eval(), first, [images])
    torch.testing.assert_close(first.running_mean, now.mean((0, 2, 3)) + shift, rtol=0.05, atol=0.02)
    torch.testing.assert_close(first.running_var, now.var((0, 2, 3)) * factor, rtol=0.1, atol=0.02)
    assert not torch.allclose(now.mean((0, 2, 3)), seen.mean((0, 2, 3)), rtol=0.05, atol=0.02)
    result.undo_()
    assert_same(before, snapshot(case.model))


def test_statistics_of_batch_norms_stay_where_nothing_is_pruned():
    case = cnn(torch.float32)
    for norm in norms_of(case.model):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    before = snapshot(case.model)
    prune(case.model, case.batches, 0.0)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("at", [1, 5, 9])
def test_after_an_exception_the_model_is_as_before(at, monkeypatch):
    case = llama(torch.float32)
    case.model.train()
    before, calls = snapshot(case.model), []

    def progress(*_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(case.model, case.batches, 0.5, progress=progress)
    assert_same(before, snapshot(case.model))


def test_padded_tokens_change_nothing():
    weights = []
    for padding in (0, 7):
        case = llama(torch.float64, num_layers=2)
        mask = case.batches[0]["attention_mask"]
        case.batches[0]["input_ids"][mask == 0] = padding
        prune(case.model, case.batches)
        weights.append([*case.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models_are_repaired(dtype):
    case = llama(dtype)
    result = prune(case.model, case.batches)
    assert all(parameter.dtype == dtype for parameter in case.model.parameters())
    assert all(layer.error <= layer.mask_error for layer in result.layers)
    assert result.num_pruned == result.num_weights // 2


def test_at_sparsity_0_every_weight_stays_as_it_is():
    case = llama(torch.float32)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.0)
    assert result.num_pruned == 0
    assert_same(before, snapshot(case.model))


class Shared(nn.Module):
    """One layer is called three times, two others hold one weight, and one is never called."""

    def __init__(self):
        super().__init__()
        self.again, self.first, self.second, self.never = (nn.Linear(6, 6) for _ in range(4))
        self.second.weight = self.first.weight

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.second(torch.tanh(self.first(x)))


def test_shared_weights_are_repaired_over_all_their_calls_and_what_is_never_called_is_named():
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(200, 6)
    result = prune(model, [x], 0.5)
    reasons = {layer.name: layer.not_repaired for layer in result.layers}
    assert reasons == {"again.weight": None, "first.weight": None, "never.weight": "no sample reached it"}
    assert all(layer.num_pruned == 18 for layer in result.layers)
    assert model.second.weight is model.first.weight


def test_a_named_score_gives_its_mask_and_repair_changes_values_only():
    case, other = llama(torch.float32), llama(torch.float32)
    repaired = prune(case.model, case.batches, 0.5, score="wanda")
    alone = prune(other.model, other.batches, 0.5, score="wanda", repair=None)
    for name, mask in alone.masks.items():
        assert torch.equal(repaired.masks[name], mask)
        kept = [model.get_parameter(name)[mask] for model in (case.model, other.model)]
        assert not torch.equal(*kept)
    assert all(layer.error is None and layer.not_repaired is None for layer in alone.layers)


def test_with_a_probe_nothing_is_repaired_unless_asked_for():
    results = []
    for repair in ({}, {"repair": Repair()}):
        case = mlp(torch.float32)
        results.append(prune(case.model, case.batches, 0.5, probe=Probe(0.3), loss=case.loss, **repair))
    plain, repaired = results
    assert all(torch.equal(repaired.masks[name], mask) for name, mask in plain.masks.items())
    assert all(layer.error is None for layer in plain.layers)
    assert all(layer.error <= layer.mask_error for layer in repaired.layers)


def test_another_tau_is_repaired_anew():
    case, other = mlp(torch.float32), mlp(torch.float32)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.5, probe=Probe(0.3, schedule="joint"), loss=case.loss, repair=Repair())
    result.retake_(0.05)
    there = prune(other.model, other.batches, 0.5, probe=Probe(0.05, schedule="joint"), loss=case.loss, repair=Repair())
    assert result.num_pruned == there.num_pruned
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), other.model.parameters(), strict=True))
    result.undo_()
    assert_same(before, snapshot(case.model))


def test_without_batches_it_is_magnitude_and_repair_is_an_error():
    case, again = mlp(), mlp()
    prune(case.model, sparsity=0.5)
    prune(again.model, again.batches, sparsity=0.5, score="magnitude", repair=None)
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), again.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="a repair needs calibration samples"):
        prune(case.model, sparsity=0.5, repair=Repair())
    with pytest.raises(ValueError, match="repair is Repair"):
        prune(case.model, case.batches, repair=True)


def test_an_input_that_is_not_finite_names_the_layer_and_the_sample():
    case = mlp(torch.float32)
    x = case.batches[2][0]
    x[1, 3] = math.nan
    before = snapshot(case.model)
    with pytest.raises(ValueError, match=r"0\.weight are not finite: look at sample 5"):
        prune(case.model, case.batches, loss=entropy)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("limit", [1, 2])
def test_memory_that_runs_out_makes_batches_smaller_and_nothing_else(limit):
    case, other = llama(num_layers=2), llama(num_layers=2)
    forward = case.model.model.forward

    def crowded(input_ids, **options):
        if len(input_ids) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids=input_ids, **options)

    case.model.model.forward = crowded
    prune(case.model, case.batches, batch_size=3)
    prune(other.model, other.batches, batch_size=3)
    for a, b in zip(case.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("at", "score"), each_once([4, 1, 8], [None, "wanda"]))
def test_a_repair_that_was_interrupted_goes_on_and_ends_with_the_same_bits(at, score, tmp_path):
    whole, case, again = (llama(torch.float32, num_layers=2) for _ in range(3))
    expected, calls = prune(whole.model, whole.batches, score=score), []

    def progress(_, __, phase):
        calls.append(phase.startswith("repaired "))
        if sum(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(case.model, case.batches, score=score, state=tmp_path / "state", progress=progress)
    assert len([*(tmp_path / "state").glob("group_*.pt")]) == at
    result = prune(again.model, again.batches, score=score, state=tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))
    assert result.layers == expected.layers
    with pytest.raises(ValueError, match=r"has sparsity = 0\.5, not 0\.6"):
        prune(case.model, case.batches, 0.6, score=score, state=tmp_path / "state")


def test_what_a_repair_saved_and_is_damaged_is_done_again_and_said(tmp_path):
    whole, again = llama(torch.float32), llama(torch.float32)
    expected = prune(whole.model, whole.batches, state=tmp_path / "state")
    path = tmp_path / "state" / "group_00002.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"group_00002\.pt is damaged .*done again"):
        result = prune(again.model, again.batches, state=tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))
    assert result.layers == expected.layers
    (tmp_path / "state" / "repair.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"repair\.json"):
        prune(again.model, again.batches, state=tmp_path / "state")


@pytest.mark.filterwarnings("ignore:.*is done again")
@pytest.mark.parametrize("kind", ["group", "block"])
def test_files_of_a_repair_that_were_swapped_or_are_another_run_s_are_done_again_and_said(kind, tmp_path):
    repair = Repair(tune=BlockTuning(epochs=1, lr=1e-3, whole_epochs=0))
    whole, other = llama(torch.float32, num_layers=2), llama(torch.float32, num_layers=2)
    prune(whole.model, whole.batches, repair=repair, state=tmp_path / "state")
    prune(other.model, other.batches, 0.3, repair=repair, state=tmp_path / "other")
    first, second = (tmp_path / "state" / f"{kind}_0000{i}.pt" for i in (0, 1))
    for stranger in (None, tmp_path / "other" / first.name):
        again = llama(torch.float32, num_layers=2)
        if stranger is not None:
            first.write_bytes(stranger.read_bytes())
        else:
            held = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(held)
        with pytest.warns(UserWarning, match=rf"{first.name} is not the file that was saved here; .* done again"):
            prune(again.model, again.batches, repair=repair, state=tmp_path / "state")
        assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_other_moments_are_not_resumed_from(tmp_path):
    case, options = mlp(torch.float32), {"select": PerLayer("moments"), "state": tmp_path / "state"}
    moments = {name: torch.rand(p.shape) for name, p in case.model.named_parameters() if p.ndim > 1}
    prune(case.model, case.batches, 0.5, moments=moments, **options)
    again = mlp(torch.float32)
    prune(again.model, again.batches, 0.5, moments={name: v.clone() for name, v in moments.items()}, **options)
    moments["0.weight"][0, 0] += 1
    before = snapshot((other := mlp(torch.float32)).model)
    with pytest.raises(ValueError, match=r"has moments = \w+, not \w+; give another folder"):
        prune(other.model, other.batches, 0.5, moments=moments, **options)
    assert_same(before, snapshot(other.model))


SCORE = """
def made(power, scale=1.0):
    def score(weight):
        return weight.abs() ** power {more}
    return score
"""


def score_of(folder, power=2, more=""):
    """A function that was never there before, as in a new process."""
    (folder / "scores.py").write_text(SCORE.format(more=more))
    found = {}
    linecache.checkcache(str(folder / "scores.py"))
    exec(compile(SCORE.format(more=more), str(folder / "scores.py"), "exec"), found)
    return found["made"](power)


def test_a_score_that_is_a_function_is_known_again_by_its_source(tmp_path):
    whole = mlp(torch.float32)
    expected = prune(whole.model, whole.batches, 0.5, score=score_of(tmp_path), state=str(tmp_path / "state"))
    again = mlp(torch.float32)
    found = prune(again.model, again.batches, 0.5, score=score_of(tmp_path), state=str(tmp_path / "state"))
    assert found.layers == expected.layers
    for other in ({"power": 3}, {"more": "+ 1"}):
        with pytest.raises(ValueError, match=r"has score = \S*score, \w+, not \S*score, \w+"):
            prune(
                mlp(torch.float32).model,
                again.batches,
                0.5,
                score=score_of(tmp_path, **other),
                state=tmp_path / "state",
            )
    unknown = eval("lambda weight: weight.abs()")
    with pytest.raises(ValueError, match=r"^[^\n]*has no source by which a resumed run could know it[^\n]*$"):
        prune(mlp(torch.float32).model, again.batches, 0.5, score=unknown, state=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_masks_that_a_model_has_leave_its_weights_as_they_are():
    case = llama(torch.float32)
    prune(case.model, case.batches, 0.5, score="magnitude", repair=None)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.5, score="magnitude", repair=Repair())
    assert result.num_pruned == result.num_weights // 2 and all(layer.error < 1e-5 for layer in result.layers)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), {}, "put it into a list"),
        ("text", {}, "iterable of batches"),
        (0.5, {}, "the sparsity is a keyword"),
        ([object()], {}, "without a tensor"),
        ([torch.zeros(0, 3)], {}, "without rows"),
        ([(1, 2, 3)], {}, "got 3 parts"),
        (iter([]), {}, "no calibration samples"),
        (
            None,
            {"sparsity": 0.3, "select": NofM(2, 4)},
            "2:4 is a sparsity of 0.5, but 0.3 .*give prune.. sparsity=0.5,",
        ),
        (None, {"sparsity": 0.99, "select": PerLayer("fisher")}, "cannot be reached where no layer"),
        (None, {"select": PerLayer("moments")}, "reads Adam's second moments"),
        (None, {"sparsity": 1.5}, r"number in \[0, 1\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bad_input_is_one_line_and_the_model_is_untouched(batches, options, message):
    case = llama(torch.float32)
    before = snapshot(case.model)
    with pytest.raises(ValueError, match=message) as error:
        prune(case.model, case.batches if batches is None else batches, **options)
    assert "\n" not in str(error.value)
    assert_same(before, snapshot(case.model))


def test_a_factorisation_that_fails_even_damped_is_one_line_and_the_model_is_untouched(monkeypatch):
    case = llama(torch.float32)
    before, calls, own = snapshot(case.model), [], torch.linalg.cholesky_ex

    def failing(matrix):
        calls.append(1)
        factor, info = own(matrix)
        return factor, torch.ones_like(info) if len(calls) > 5 else info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    with pytest.raises(ValueError, match=r"proj\.weight has no Cholesky factor, even damped by"):
        prune(case.model, case.batches)
    assert_same(before, snapshot(case.model))


class Standardized(nn.Conv2d):
    """A convolution that does not multiply by its weight as it is."""

    def forward(self, x):
        return self._conv_forward(x, self.weight / self.weight.std(), self.bias)


def test_layers_that_cannot_be_repaired_are_pruned_by_their_size_and_named():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), Standardized(4, 6, 2), nn.Tanh(), nn.Conv2d(6, 4, 3)]
    model, x = nn.Sequential(*layers), torch.randn(20, 2, 6, 6)
    size = model[2].weight.detach().clone().abs()
    result = prune(model, [x], 0.5)
    reasons = {layer.name: layer.not_repaired for layer in result.layers}
    assert reasons == {"0.weight": None, "2.weight": "it is no plain linear layer or convolution", "4.weight": None}
    assert torch.equal(result.masks["2.weight"], size > size.flatten().sort().values[size.numel() // 2 - 1])
    by_row = prune(nn.Sequential(*layers[2:3]), [torch.randn(20, 4, 6, 6)], 0.5, select=PerRow())
    assert (by_row.masks["0.weight"].sum((1, 2, 3)) <= 8).all()


@pytest.mark.parametrize("token", [31, -1])
def test_tokens_outside_the_vocabulary_are_named(token):
    case = llama(torch.float32)
    case.batches[1]["input_ids"][0, 3] = token
    before = snapshot(case.model)
    with pytest.raises(ValueError, match=f"token {token}, but the model knows 31"):
        prune(case.model, case.batches)
    assert_same(before, snapshot(case.model))


def test_beside_the_model_a_result_keeps_one_value_of_each_weight():
    model, batch = build("llama"), inputs("llama")
    result = prune(model, [batch], 0.5)
    repaired = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with result.masks_alone():
            assert len(result.level._undone) == len(result.level.weights) and not result.level.originals.whole
        assert not result.level._undone and len(result.level.originals.whole) == len(result.level.weights)
        assert all(torch.equal(value, repaired[name]) for name, value in model.state_dict().items())
        result.undo_()
        assert not any(torch.equal(weight.parameter, repaired[name]) for name, weight in result.level.weights.items())
        result.apply_()
