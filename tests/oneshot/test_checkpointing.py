"""Gradient checkpointing: the same masks from less memory, asked for or where nothing else fits."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, assert_same_masks, snapshot
from probe_models import CASES, entropy, llama
from probe_odd import Attention, Encoder
from test_odd_models import case_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from prunus import prune
from prunus.oneshot import Probe
from prunus.oneshot.forward import replaced
from prunus.oneshot.offload import checkpointed, counted_saves
from prunus.oneshot.probe.engine import Engine


def probed(case, **options):
    """Results without checkpointing, and with these options on the same model."""
    how = {"score": "wanda", "probe": Probe(0.02), "loss": case.loss}
    expected = prune(deepcopy(case.model), case.batches, 0.5, **how | {k: options[k] for k in how if k in options})
    return expected, prune(case.model, case.batches, 0.5, **how | options)


@pytest.mark.parametrize(
    "case, schedule, offload", each_once(CASES, ["joint", "sequential", "block"], [None, "cpu"], one_of=3)
)
def test_masks_are_those_without_it_and_the_model_comes_back(case, schedule, offload):
    case = CASES[case](torch.float64)
    before = snapshot(case.model)
    options = {"probe": Probe(0.02, schedule=schedule), "offload": offload, "checkpointing": True}
    expected, result = probed(case, **options)
    assert result.cost.checkpointing and not expected.cost.checkpointing
    assert 0 < result.num_pruned < sum(layer.num_candidates for layer in result.layers)
    assert_same_masks(expected, result)
    result.undo_()
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("kind", [Attention, Encoder])
def test_weights_whose_gradients_come_one_by_one_get_the_same_ones(kind):
    assert_same_masks(*probed(case_of(kind), score="magnitude", checkpointing=True))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["wanda", "fisher"])
def test_a_model_that_checkpoints_its_blocks_itself_gets_the_same_masks(score):
    case = CASES["llama"](torch.float64)
    options = {"score": score, "probe": Probe(0.02), "loss": case.loss}
    expected = prune(deepcopy(case.model), case.batches, 0.5, **options)
    for block in case.model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert_same_masks(expected, prune(case.model, case.batches, 0.5, **options))


def test_the_graph_holds_the_blocks_inputs_alone():
    case = llama(torch.float32)
    saved = []
    for blocks in ([], case.model.model.layers):
        with counted_saves(case.model) as sizes, replaced({block: checkpointed(block, None) for block in blocks}):
            case.model(**case.batches[0]).logits.sum()
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 3


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_it_is_taken_where_one_sample_alone_does_not_fit(batched, monkeypatch):
    case = llama(num_layers=2)
    expected = prune(deepcopy(case.model), case.batches, 0.5, probe=Probe(0.05, schedule="block"))
    name = "_add_chunk" if batched else "_alone"
    real, modes = getattr(Engine, name), []

    def crowded(self, *args):
        modes.append(self.checkpointing)
        if not self.checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args)

    monkeypatch.setattr(Engine, name, crowded)
    if not batched:
        monkeypatch.setattr(Engine, "_recorded", lambda self, *args: self._one_by_one(*args))
    result = prune(case.model, case.batches, 0.5, probe=Probe(0.05, schedule="block"))
    assert result.cost.checkpointing and result.cost.halved
    assert modes.count(False) < 8 and all(modes[modes.index(True) :])
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_memory_that_is_never_enough_is_an_error_and_the_model_is_as_before(monkeypatch):
    case, before = llama(num_layers=2), snapshot(llama(num_layers=2).model)

    def crowded(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "_add_chunk", crowded)
    with pytest.raises(torch.OutOfMemoryError):
        prune(case.model, case.batches, 0.5, probe=Probe(0.05))
    assert_same(before, snapshot(case.model))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x.mul_(0.5) + self.linear(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([InPlace(), InPlace(), InPlace()])

    def forward(self, x):
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_changes_its_input_is_refused_and_never_wrong():
    model, batch = Stack(), (torch.randn(4, 4), torch.randint(0, 4, (4,)))
    before = snapshot(model)
    with pytest.raises((ValueError, RuntimeError), match=r"in ?place"):  # torch itself says it where it saves inputs
        prune(model, [batch], 0.5, probe=Probe(0.05), loss=entropy, checkpointing=True)
    assert_same(before, snapshot(model))
