"""Strategies: the scores that their formulas say, at the sparsity that was asked for."""

from copy import copy, deepcopy
from pathlib import Path

import pytest
import torch
from probe_checks import assert_same, snapshot
from probe_models import CASES, entropy, llama, mlp
from probe_reference import split
from torch import nn

from prunus import Global, NofM, PerLayer, PerRow, Repair, prune
from prunus.eligible import eligible
from prunus.oneshot import Probe
from prunus.oneshot.scoring import path


@pytest.mark.parametrize("score", ["magnitude", "wanda", "random"])
@pytest.mark.parametrize("select", [Global(), PerLayer(), PerRow(), PerLayer("erk"), NofM(2, 4)], ids=str)
def test_a_strategy_alone_reaches_the_sparsity_exactly(score, select):
    case = llama(torch.float32)
    result = prune(case.model, case.batches, 0.5, score=score, select=select, repair=None)
    total = sum(layer.num_weights for layer in result.layers)
    assert result.num_pruned == round(0.5 * total) and result.sparsity == 0.5
    zeros = sum(int((case.model.get_parameter(name) == 0).sum()) for name in result.masks)
    assert zeros == result.num_pruned


def test_magnitude_without_a_probe_reads_no_sample_and_needs_no_loss():
    case = mlp(torch.float32)
    dense = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    result = prune(case.model, sparsity=0.3)
    names = [weight.name for weight in eligible(case.model).weights]
    assert set(result.masks) == set(names) and result.cost.passes == 0
    expected = Global()({name: dense[name].abs() for name in names}, 0.3)
    assert all(torch.equal(result.masks[name], expected[name]) for name in names)


def test_wanda_is_by_rows_unless_said_and_leaves_out_what_is_masked():
    case = llama(torch.float32)
    inputs = []
    layer = case.model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    case.model.eval()
    with torch.no_grad():
        for batch in case.batches:
            case.model(**batch)
    handle.remove()
    admitted = torch.cat([x[batch["attention_mask"].bool()] for x, batch in zip(inputs, case.batches, strict=True)])
    scores = layer.weight.detach().abs() * admitted.norm(dim=0)
    expected = PerRow()({"w": scores}, 0.5)["w"]
    result = prune(case.model, case.batches, 0.5, score="wanda", repair=None)
    assert torch.equal(result.masks["model.layers.1.mlp.down_proj.weight"], expected)


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
