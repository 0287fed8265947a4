"""A model that is sparse already: zeros are counted in the weights, and those that are there go first."""

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, snapshot
from probe_models import mlp

from prunus import Global, PerLayer, PerRow, prune, search
from prunus.oneshot import Levels, Limit, Probe


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


def zeros_of(weights):
    return sum(int((weight.parameter == 0).sum()) for weight in weights.values())


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
    assert result.num_pruned == zeros_of(result.level.weights)
    assert result.num_pruned == sum(int((~mask).sum()) for mask in result.masks.values())
    assert 0.49 < result.sparsity_before < 0.51
    result.undo_()
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("score", ["magnitude", "wanda", "fisher", "random"])
def test_what_is_zero_already_is_removed_first(score):
    """Unused inputs give wanda's zeros their equals, which must not go in their place."""
    case = sparse_mlp(0.5, torch.float32)
    result = prune(case.model, case.batches, 0.7, score=score, select=Global(), loss=case.loss, repair=None)
    assert zeros_of(result.level.weights) == round(0.7 * result.num_weights)


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
