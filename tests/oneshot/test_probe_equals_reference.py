"""The engine decides what one sample and one layer at a time decide, element for element, in float64."""

from functools import cache

import pytest
import torch
from covering import each_once
from probe_models import CASES, needs_data, stories260k
from probe_reference import probe_reference

from prunus import Global, PerLayer, PerRow, prune
from prunus.oneshot import Probe
from prunus.ops import bits

ORDERS = [("joint", "reverse"), ("sequential", "reverse"), ("block", "forward")]
ORDERS += [("sequential", "forward"), ("block", "reverse")]


MODELS = CASES | {"stories260K": stories260k}


@cache
def reference(name, dtype, score, select, probe):
    """Masks of the reference and the model that it has pruned."""
    case, settings = MODELS[name](dtype), {"score": score, "select": select, "sparsity": 0.5}
    settings |= {"schedule": probe.schedule, "order": probe.order, "tau": probe.tau, "reduction": probe.reduction}
    return probe_reference(case.model, case.loss_of, case.batches, settings, case.blocks), case.model


def both(name, score, select, probe, dtype=torch.float64, **options):
    """Result of ``prune``, masks of the reference, and the two pruned models."""
    case = MODELS[name](dtype)
    options |= {"score": score, "select": select, "probe": probe, "loss": case.loss}
    result = prune(case.model, case.batches, 0.5, **options)
    expected, slow = reference(name, dtype, score, select, probe)
    return result, expected, case.model, slow


def assert_equal(result, expected, fast, slow, some_are_kept=True):
    for name, mask in expected.items():
        assert torch.equal(result.masks[name], mask), name
    for (name, a), b in zip(fast.state_dict().items(), slow.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    vetoed = sum(layer.num_candidates - layer.num_pruned for layer in result.layers)
    assert (vetoed > 0 or not some_are_kept) and vetoed < sum(layer.num_candidates for layer in result.layers)


@pytest.mark.parametrize(("case", "order"), each_once(CASES, ORDERS, one_of=2), ids=str)
def test_masks_are_those_of_the_reference(case, order):
    probe = Probe(tau=0.02, order=order[1], schedule=order[0])
    assert_equal(*both(case, "magnitude", Global(), probe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy", "size"),
    each_once(CASES, [("wanda", PerRow()), ("wanda", Global()), ("magnitude", PerLayer())], [1, 2, 3, 64], one_of=4),
)
def test_neither_strategy_and_scope_nor_the_size_of_a_batch_change_a_decision(case, strategy, size):
    assert_equal(*both(case, *strategy, Probe(tau=0.005), batch_size=size), some_are_kept=case != "cnn")


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "order"), ORDERS[:3:2], ids=str)
def test_masks_of_a_trained_gpt_are_those_of_the_reference(schedule, order):
    assert_equal(*both("stories260K", "wanda", PerRow(), Probe(tau=0.02, order=order, schedule=schedule)))


@pytest.mark.parametrize(("case", "schedule"), each_once(CASES, ["joint", "block"]))
def test_in_float32_only_what_lies_on_the_edge_may_differ(case, schedule):
    probe = Probe(tau=0.02, schedule=schedule)
    result, expected, *_ = both(case, "magnitude", Global(), probe, dtype=torch.float32)
    for name, mask in expected.items():
        candidates = bits.unpack(result.level.candidates[name], mask.shape)
        edge = (result.level.ratios[name].q - 1.02).abs() < 1e-4
        assert edge[(result.masks[name] != mask)[candidates]].all(), name
