"""``prune`` with repair: it is what a plain loop over whole models and the solver give, and keeps its promises."""

import linecache
import math
from functools import cache

import pytest
import torch
from covering import each_once
from families import build, inputs
from probe_checks import assert_same, assert_same_masks, snapshot
from probe_models import CASES, convolutions, llama, mlp
from repair_reference import llama_groups, repaired_plainly
from test_readers import encoder, unfused  # noqa: F401
from torch import nn

from prunus import BlockTuning, Global, PerLayer, PerRow, Repair, prune
from prunus.oneshot import Probe
from prunus.score import bitter7


def encoder_case(batch_first):
    parts = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    groups = [[f"encoder.layers.{i}.{part}"] for i in range(2) for part in parts]
    return *encoder(torch.float64, batch_first), encoder(torch.float64)[0], groups


def case_of(make):
    """A model and its batches, what a plain loop repairs in its place, and its groups."""
    if make == "llama":
        case = llama(num_layers=2)
        return case.model, case.batches, case.model, llama_groups(2)
    if make == "convolutions":
        model, batches = convolutions()
        return model, batches, model, [["stem.weight"], ["blocks.0.weight"], ["blocks.1.weight"], ["head.weight"]]
    return encoder_case(make == "encoder")


@cache
def expected_of(make, repair):
    _, batches, model, groups = case_of(make)
    return repaired_plainly(model, batches, groups, 0.5, repair)


PLAINLY = ["llama", "convolutions", "encoder", "tokens first"]


@pytest.mark.parametrize(
    ("make", "repair", "batch_size", "offload"),
    each_once(PLAINLY, [Repair(), Repair("own", damping=0.1)], [1, None, 3], [None, "cpu"], one_of=4),
    ids=str,
)
@pytest.mark.usefixtures("unfused")
def test_a_model_is_repaired_as_by_a_plain_loop_over_whole_models(make, repair, batch_size, offload):
    (model, batches, *_), expected = case_of(make), expected_of(make, repair)
    options = {"include": ["*in_proj_weight"] if make in PLAINLY[2:] else [], "offload": offload}
    result = prune(model, batches, repair=repair, batch_size=batch_size, **options)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-8)
    assert all(layer.error <= layer.mask_error and layer.not_repaired is None for layer in result.layers)
    assert result.errors == {layer.name: layer.error for layer in result.layers}
    assert all(repaired.iterations > 0 for repaired in result.level.repairs.values())


def assert_allocated(result, sparsity, alone):
    """Counts are exact, and follow those of a global order but for one shift and limits about the mean."""
    assert result.num_pruned == round(sparsity * result.num_weights)
    assert all(abs(layer.sparsity - sparsity) < 0.16 for layer in result.layers)
    inside = [layer for layer in result.layers if abs(layer.sparsity - sparsity) < 0.14]
    shifts = [layer.sparsity - alone[layer.name] for layer in inside]
    assert len(shifts) > 3 and max(shifts) - min(shifts) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("repair", "score"), [(None, None), (Repair(), "wanda")], ids=str)
def test_sparsity_is_allocated_by_fisher(repair, score):
    case, other = llama(torch.float32), llama(torch.float32)
    result = prune(case.model, case.batches, 0.5, score=score, select=PerLayer("fisher"), repair=repair)
    alone = prune(other.model, other.batches, 0.5, score="fisher", repair=None)
    assert_allocated(result, 0.5, {layer.name: layer.sparsity for layer in alone.layers})
    with pytest.raises(ValueError, match="cannot be reached if no layer"):
        prune(other.model, case.batches, 0.99, select=PerLayer("fisher"))


def test_sparsity_is_allocated_by_the_second_moments_of_training():
    case, before = llama(torch.float32), snapshot(llama(torch.float32).model)
    weights = {name: p for name, p in case.model.named_parameters() if "proj" in name}
    moments = {name: torch.rand(p.shape) ** 8 * (1 + i) for i, (name, p) in enumerate(weights.items())}
    scores = {name: bitter7(p.detach(), moments[name]) for name, p in weights.items()}
    alone = {name: 1 - mask.float().mean().item() for name, mask in Global()(scores, 0.6).items()}
    result = prune(case.model, case.batches, 0.6, select=PerLayer("moments"), moments=moments)
    assert_allocated(result, 0.6, alone)
    result.undo_()
    del moments["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"has none of model\.layers\.1\.mlp\.up_proj\.weight"):
        prune(case.model, case.batches, 0.6, select=PerLayer("moments"), moments=moments)
    assert_same(before, snapshot(case.model))


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


def test_with_a_probe_nothing_is_repaired_unless_asked_for_and_another_tau_is_repaired_anew():
    def probed(tau, **repair):
        case = mlp(torch.float32)
        options = {"probe": Probe(tau, schedule="joint"), "loss": case.loss}
        return case.model, prune(case.model, case.batches, 0.5, **options, **repair)

    (_, plain), (model, result), (other, there) = (
        probed(0.3),
        probed(0.3, repair=Repair()),
        probed(0.05, repair=Repair()),
    )
    assert_same_masks(plain, result)
    assert all(layer.error is None for layer in plain.layers) and not plain.errors
    assert all(layer.error <= layer.mask_error for layer in result.layers)
    result.retake_(0.05)
    assert result.num_pruned == there.num_pruned
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    result.undo_()
    assert_same(snapshot(mlp(torch.float32).model), snapshot(model))


def test_an_input_that_is_not_finite_names_the_layer_and_the_sample():
    case = mlp(torch.float32)
    case.batches[2][0][1, 3] = math.nan
    before = snapshot(case.model)
    with pytest.raises(ValueError, match=r"0\.weight are not finite; check sample 5"):
        prune(case.model, case.batches)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("limit", [1, 2])
def test_memory_that_runs_out_makes_batches_smaller_and_nothing_else(limit):
    case, other = llama(num_layers=2), llama(num_layers=2)

    def crowded(_, __, options):
        if len(options["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    case.model.model.register_forward_pre_hook(crowded, with_kwargs=True)
    for each in (case, other):
        prune(each.model, each.batches, batch_size=3)
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


@pytest.mark.filterwarnings("ignore:.*is computed again")
@pytest.mark.parametrize("kind", ["group", "block"])
def test_files_of_a_repair_that_are_damaged_swapped_or_another_run_s_are_done_again_and_said(kind, tmp_path):
    repair = Repair(iterations=9, tune=BlockTuning(epochs=1, lr=1e-3, whole_epochs=0))

    def repaired(folder, sparsity=0.5):
        case = llama(torch.float32, num_layers=2)
        return case.model, prune(case.model, case.batches, sparsity, repair=repair, state=tmp_path / folder)

    (whole, expected), _ = repaired("state"), repaired("other", 0.3)
    first, second = (tmp_path / "state" / f"{kind}_0000{i}.pt" for i in (0, 1))
    flipped = bytearray(first.read_bytes())
    flipped[len(flipped) // 2] ^= 16
    for content, said in (
        (flipped, r"is damaged \("),
        (second.read_bytes(), "is not the file that was saved here; "),
        ((tmp_path / "other" / first.name).read_bytes(), "is not the file that was saved here; "),
    ):
        first.write_bytes(content)
        with pytest.warns(UserWarning, match=rf"{first.name} {said}.*computed again"):
            again, result = repaired("state")
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
        assert result.layers == expected.layers
    (tmp_path / "state" / "repair.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"repair\.json"):
        repaired("state")


def test_other_moments_are_not_resumed_from(tmp_path):
    case, options = mlp(torch.float32), {"select": PerLayer("moments"), "state": tmp_path / "state"}
    moments = {name: torch.rand(p.shape) for name, p in case.model.named_parameters() if p.ndim > 1}
    prune(case.model, case.batches, 0.5, moments=moments, **options)
    again = mlp(torch.float32)
    same = {name: v.clone() for name, v in moments.items()} | {"0.bias": torch.rand(3)}  # which nothing reads
    prune(again.model, again.batches, 0.5, moments=same, **options)
    moments["0.weight"][0, 0] += 1
    before = snapshot((other := mlp(torch.float32)).model)
    with pytest.raises(ValueError, match=r"has moments = \w+, not \w+; give another folder"):
        prune(other.model, other.batches, 0.5, moments=moments, **options)
    assert_same(before, snapshot(other.model))


def test_masks_of_another_probe_are_not_resumed_from_and_another_tau_is_repaired_anew(tmp_path):
    def probed(tau, **options):
        case = mlp(torch.float32)
        how = {"probe": Probe(tau, schedule="joint"), "repair": Repair(), "loss": case.loss} | options
        return case.model, prune(case.model, case.batches, 0.5, **how)

    model, result = probed(1.0, state=tmp_path / "state")
    with pytest.raises(ValueError, match="has masks of the probe = "):
        probed(0.1, state=tmp_path / "state")
    result.retake_(0.1)
    assert_same(snapshot(probed(0.1)[0]), snapshot(model))


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
    def pruned(score, state="state"):
        case = mlp(torch.float32)
        return prune(case.model, case.batches, 0.5, score=score, state=str(tmp_path / state))

    assert pruned(score_of(tmp_path)).layers == pruned(score_of(tmp_path)).layers
    for other in ({"power": 3}, {"more": "+ 1"}):
        with pytest.raises(ValueError, match=r"has score = \S*score, \w+, not \S*score, \w+"):
            pruned(score_of(tmp_path, **other))
    unknown = eval("lambda weight: weight.abs()")
    with pytest.raises(ValueError, match=r"^[^\n]*has no source by which a resumed run could recognise it[^\n]*$"):
        pruned(unknown, "new")
    assert not (tmp_path / "new").exists()


def test_masks_that_a_model_has_leave_its_weights_as_they_are():
    case = llama(torch.float32)
    prune(case.model, case.batches, 0.5, score="magnitude", repair=None)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.5, score="magnitude", repair=Repair())
    assert result.num_pruned == result.num_weights // 2 and all(layer.error < 1e-5 for layer in result.layers)
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
