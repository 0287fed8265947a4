"""Strategies: the scores that their formulas say, at the sparsity that was asked for; zeros that are there go first."""

from copy import copy, deepcopy
from pathlib import Path

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, num_zeros, snapshot
from probe_models import CASES, entropy, llama, mlp
from probe_reference import split
from repair_reference import rows_of
from torch import nn

from prunus import Global, NofM, PerLayer, PerRow, Repair, prune, search
from prunus.eligible import eligible
from prunus.oneshot import Levels, Limit, Probe
from prunus.oneshot.scoring import path


@pytest.mark.parametrize(
    ("score", "select"),
    each_once(
        ["magnitude", "wanda", "random"], [Global(), PerLayer(), PerRow(), PerLayer("erk"), NofM(2, 4)], one_of=2
    ),
    ids=str,
)
def test_a_strategy_alone_reaches_the_sparsity_exactly(score, select):
    case = llama(torch.float32, num_layers=2)
    result = prune(case.model, case.batches, 0.5, score=score, select=select, repair=None)
    assert result.num_pruned == round(0.5 * result.num_weights) and result.sparsity == 0.5
    assert result.num_pruned == num_zeros(result)


def test_magnitude_without_a_probe_reads_no_sample_and_needs_no_loss():
    case = mlp(torch.float32)
    dense = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    result = prune(case.model, sparsity=0.3)
    names = [weight.name for weight in eligible(case.model).weights]
    assert set(result.masks) == set(names) and result.cost.passes == 0
    expected = Global()({name: dense[name].abs() for name in names}, 0.3)
    assert all(torch.equal(result.masks[name], expected[name]) for name in names)


def test_wanda_is_by_rows_unless_said_and_leaves_out_what_is_masked():
    case, name = llama(torch.float32), "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        inputs = rows_of(case.model.eval(), name, case.batches)
    admitted = torch.cat([x[batch["attention_mask"].bool()] for x, batch in zip(inputs, case.batches, strict=True)])
    scores = case.model.get_parameter(name).detach().abs() * admitted.norm(dim=0)
    result = prune(case.model, case.batches, 0.5, score="wanda", repair=None)
    assert torch.equal(result.masks[name], PerRow()({"w": scores}, 0.5)["w"])


def gradients(case, statistic):
    """For each weight a statistic over the gradients of samples one by one."""
    found = {}
    case.model.eval()
    for sample in split(case.batches):
        weights = {w.name: w.parameter for w in eligible(case.model).weights}
        each = torch.autograd.grad(case.loss_of(case.model, sample), list(weights.values()))
        for name, gradient in zip(weights, each, strict=True):
            found.setdefault(name, []).append(gradient)
    return {name: statistic(torch.stack(values)) for name, values in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_fisher_and_path_are_those_of_their_formulas(case):
    """Path adds the gradients before and after the shrink of what magnitude would prune."""
    case = CASES[case]()
    squares, before = gradients(case, lambda g: g.square().mean(0)), gradients(case, lambda g: g.abs().amax(0))
    shrunk = copy(case)
    shrunk.model = deepcopy(case.model)
    for name, mask in prune(deepcopy(case.model), sparsity=0.5).masks.items():
        shrunk.model.get_parameter(name).data[~mask] *= 0.1
    after = gradients(shrunk, lambda g: g.abs().amax(0))
    weights = {name: case.model.get_parameter(name).detach() for name in before}
    scores = {
        "fisher": {name: weight**2 * squares[name] for name, weight in weights.items()},
        "path": {name: path(weight, before[name], after[name]) for name, weight in weights.items()},
    }
    for score, each in scores.items():
        expected = Global()(each, 0.5)
        result = prune(deepcopy(case.model), case.batches, 0.5, score=score, loss=case.loss, repair=None)
        assert all(torch.equal(result.masks[name], mask) for name, mask in expected.items())


def test_a_layer_no_sample_reached_is_an_error_for_wanda():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"spare\.weight.*not called"):
        prune(model, [(torch.randn(2, 4), torch.tensor([0, 1]))], 0.5, score="wanda", loss=entropy)
    assert_same(before, snapshot(model))


def test_wanda_alone_needs_no_loss_and_no_backward():
    case = mlp()
    result = prune(case.model, [inputs for inputs, _ in case.batches], 0.5, score="wanda", repair=None)
    assert result.cost.passes == 0 and result.cost.forwards == 8 + 2
    assert all(not mask.all() for mask in result.masks.values())


@pytest.mark.parametrize("repair", [None, Repair()])
def test_norms_of_a_model_that_mixes_its_samples_are_those_of_samples_alone(repair):
    def masks(batches):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6, track_running_stats=False)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(8, 24), nn.Unflatten(1, (6, 4)), norm, nn.Flatten(), nn.Linear(24, 6)
        )
        return prune(model, batches, 0.5, score="wanda", repair=repair).masks

    x = torch.randn(7, 2, 4) * torch.arange(1, 8)[:, None, None]
    together, alone = masks([x]), masks([row[None] for row in x])
    assert all(torch.equal(together[name], mask) for name, mask in alone.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_too_small_for_half_precision_are_recorded(dtype):
    """A tiny loss leaves gradients that float16 alone would round to nothing."""
    case = mlp(dtype)

    def loss(output, target):
        return entropy(output.float(), target) * 3e-8

    layers = prune(case.model, case.batches, 0.5, probe=Probe(0.5), loss=loss).layers
    assert sum(layer.num_zero_gradient for layer in layers) < 0.3 * sum(layer.num_candidates for layer in layers)


def test_every_score_that_prune_takes_is_documented():
    page = (Path(__file__).parents[2] / "docs/after-training.md").read_text()
    with pytest.raises(ValueError, match="take magnitude, wanda, fisher, path or random, or a function"):
        prune(nn.Linear(4, 4), score="bitter7")
    for name in ("magnitude", "wanda", "fisher", "path", "random"):
        assert f"``{name}``" in prune.__doc__ and f'`"{name}"`' in page


def sparse_mlp(sparsity, dtype):
    """Weights of which some are zero, spread unevenly over the rows, and inputs of which two are never on."""
    case = mlp(dtype)
    with torch.no_grad():
        for weight in (p for p in case.model.parameters() if p.ndim > 1):
            score = weight.abs() * torch.linspace(0.2, 2, len(weight)).to(dtype).unsqueeze(1)
            weight[score <= score.flatten().kthvalue(round(sparsity * weight.numel())).values] = 0.0
    for batch in case.batches:
        batch[0][:, :2] = 0.0
    return case


@pytest.mark.parametrize(
    ("score", "select", "probe"),
    each_once(
        ["magnitude", "wanda", "random"],
        [Global(), PerLayer(), PerRow()],
        [None, Probe(0.05), Probe("target", schedule="joint")],
        one_of=2,
    ),
    ids=str,
)
def test_the_sparsity_is_that_of_zeros_in_a_model_that_had_some(score, select, probe):
    case = sparse_mlp(0.5, torch.float32)
    before = snapshot(case.model)
    result = prune(case.model, case.batches, 0.3, score=score, select=select, probe=probe, loss=case.loss, repair=None)
    assert result.num_pruned == num_zeros(result)
    assert result.num_pruned == sum(int((~mask).sum()) for mask in result.masks.values())
    assert 0.49 < result.sparsity_before < 0.51
    result.undo_()
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("score", ["magnitude", "wanda", "fisher", "random"])
def test_what_is_zero_already_is_removed_first(score):
    """Unused inputs give wanda's zeros their equals, which must not go in their place."""
    case = sparse_mlp(0.5, torch.float32)
    result = prune(case.model, case.batches, 0.7, score=score, select=Global(), loss=case.loss, repair=None)
    assert num_zeros(result) == round(0.7 * result.num_weights)


def test_rows_lose_what_they_are_asked_unless_they_had_lost_more():
    case = sparse_mlp(0.5, torch.float32)
    weights = [p for p in case.model.parameters() if p.ndim > 1]
    had = [(weight == 0).sum(1) for weight in weights]
    prune(case.model, case.batches, 0.7, score="wanda", select=PerRow(), repair=None)
    for weight, num in zip(weights, had, strict=True):
        assert torch.equal((weight == 0).sum(1), num.clamp(min=round(0.7 * weight.shape[1])))


@pytest.mark.parametrize("relative, reached", [(0.0, 0.5), (1e9, 0.7)], ids=["no level", "one level"])
def test_a_search_counts_zeros_too(relative, reached):
    case, values = sparse_mlp(0.5, torch.float32), iter([1.0, 2.0])
    limit = Limit(relative=relative, better="lower")
    found = search(case.model, case.batches, lambda _: next(values), limit, steps=Levels(0.7, 0.3), repair=None)
    weights = [p for p in case.model.parameters() if p.ndim > 1]
    num_zeros = sum(int((p == 0).sum()) for p in weights)
    assert found.sparsity == pytest.approx(num_zeros / sum(p.numel() for p in weights))
    assert found.sparsity == pytest.approx(reached, abs=0.01)
    assert num_zeros == sum(int((~mask).sum()) for mask in found.masks.values())
