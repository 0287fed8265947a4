"""One block on the accelerator at a time: the same masks, and never more than one block there.

The CPU plays the accelerator: what is moved is copied even so, and the model's own tensors must not be read in between.
"""

from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, snapshot
from probe_models import CASES, cnn, entropy, llama, mlp
from probe_odd import Attention, Encoder, Functional, SharedBlock, Tied
from test_odd_models import case_of
from torch import nn

from prunus import prune, search
from prunus.eligible import eligible
from prunus.input_statistics import output_projections_seen_by
from prunus.oneshot import Levels, Limit, Probe, streams
from prunus.oneshot.offload import Offload

SCHEDULES = ["joint", "sequential", "block"]


@pytest.fixture
def watched(monkeypatch):
    """Units on the device at each load, and how often homes were poisoned while their copies were in use."""
    seen, load = [], Offload._load

    def watching(self, unit, *args):
        load(self, unit, *args)
        owners = {self._owners[tensor] for tensor in self._homes}
        assert len(owners) <= 1
        seen.append(len(owners))

    monkeypatch.setattr(Offload, "_load", watching)
    return seen


@pytest.fixture
def poisoned(monkeypatch):
    """While a unit is on the device, its home holds NaN: whoever reads the home shows it."""
    load, unload = Offload._load, Offload.unload

    def loading(self, unit, *args):
        load(self, unit, *args)
        self.saved = {t: home.clone() for t, home in self._homes.items()}
        for home in self._homes.values():
            if home.is_floating_point():
                home.fill_(torch.nan)

    def unloading(self):
        for tensor, home in self._homes.items():
            home.copy_(self.saved[tensor])
        unload(self)

    def poison():
        monkeypatch.setattr(Offload, "_load", loading)
        monkeypatch.setattr(Offload, "unload", unloading)

    return poison


@pytest.fixture
def opened(monkeypatch):
    """All offloads that are opened."""
    seen, own = [], Offload.open

    def opening(self):
        seen.append(self)
        return own(self)

    monkeypatch.setattr(Offload, "open", opening)
    return seen


@pytest.mark.parametrize(("case", "schedule"), each_once(CASES, SCHEDULES, one_of=2))
def test_masks_are_those_of_a_model_that_is_there_whole(case, schedule, watched, poisoned):
    case = CASES[case](torch.float32)
    dense, before = deepcopy(case.model), snapshot(case.model)
    options = {"score": "wanda", "probe": Probe(0.02, schedule=schedule), "loss": case.loss}
    expected = prune(dense, case.batches, 0.5, **options)
    poisoned()
    result = prune(case.model, case.batches, 0.5, **options, offload="cpu")
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), dense.parameters(), strict=True))
    assert max(watched) == 1
    result.undo_()
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize(
    ("kind", "score"),
    each_once([Encoder, Attention, SharedBlock, Functional, Tied], ["fisher", "path", "magnitude"], one_of=2),
)
def test_models_that_use_their_weights_in_odd_ways_too(kind, score):
    case = case_of(kind)
    dense = deepcopy(case.model)
    options = {"score": score, "probe": Probe(0.02), "loss": case.loss}
    expected = prune(dense, case.batches, 0.5, **options)
    if kind in (Attention, Functional):
        with pytest.raises(ValueError, match="list of blocks"):
            prune(case.model, case.batches, 0.5, **options, offload="cpu")
        return
    result = prune(case.model, case.batches, 0.5, **options, offload="cpu")
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_an_output_projection_outside_the_blocks_is_on_the_device_when_attention_multiplies_by_it():
    blocks, attention = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.MultiheadAttention(4, 2)
    model, weight, seen = nn.ModuleDict({"blocks": blocks, "attention": attention}), attention.out_proj.weight, []
    offload = Offload(model, eligible(model).weights, torch.device("cpu"))

    def see(*_):
        seen.append(weight not in offload._owners or weight in offload._homes)

    with offload.open(), output_projections_seen_by(see):
        x = blocks(torch.randn(5, 4))
        attention(x, x, x)
    assert seen == [True]


def test_a_graph_holds_none_of_the_blocks_weights_and_the_backward_fetches_them_one_block_at_a_time():
    case = llama(torch.float32)
    weights = [m for block in case.model.model.layers for m in block.modules() if isinstance(m, nn.Linear)]
    offload, held = Offload(case.model, eligible(case.model).weights, torch.device("cpu")), []
    shapes = {shape for m in weights for shape in (m.weight.shape, m.weight.t().shape)}
    with offload.open(), offload.saving(held.append):
        loss = case.model(**case.batches[0], labels=case.batches[0]["input_ids"]).loss
        assert held and not any(t.shape in shapes for t in held)
        assert offload.num_moves == 3
        loss.backward()
        assert offload.num_moves == 6
    plain = llama(torch.float32)
    plain.model(**plain.batches[0], labels=plain.batches[0]["input_ids"]).loss.backward()
    embedding = case.model.model.embed_tokens.weight, plain.model.model.embed_tokens.weight
    assert torch.equal(embedding[0].grad, embedding[1].grad)


def test_blocks_whose_output_is_known_are_not_moved(opened):
    case = llama(torch.float32)
    prune(case.model, case.batches, 0.5, probe=Probe(1.0), offload="cpu")
    (offload,) = opened
    # 21 weights, 2 stacks of samples: whole passes would load each of the 3 blocks twice, forward and backward
    assert 0 < offload.num_moves < 21 * 2 * 3 * 2


@pytest.mark.parametrize("share", [0.0, 0.25], ids=["activations in main memory", "on the device"])
@pytest.mark.slow
def test_a_repair_moves_a_block_as_often_however_many_batches_there_are(share, opened, monkeypatch):
    monkeypatch.setattr(streams, "SHARE", share)
    weights = []
    for options in ({}, {"offload": "cpu"}, {"offload": "cpu", "batch_size": 1}):
        case = llama(torch.float32, num_layers=2)
        prune(case.model, case.batches, 0.5, **{"batch_size": 4} | options)
        weights.append([*case.model.parameters()])
    assert len(opened) == 2 and 0 < opened[0].num_moves == opened[1].num_moves
    assert all(torch.equal(a, b) for a, b in zip(*weights[:2], strict=True))


@pytest.mark.parametrize(("place", "at"), [("loss", 3), ("block", 1), ("loss", 8), ("block", 6), ("block", 15)])
def test_an_interruption_gives_back_the_model_as_it_was(place, at):
    case, calls = cnn(torch.float32), []
    before = snapshot(case.model)

    def interrupt(*_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    def loss(output, target):
        interrupt() if place == "loss" else None
        return entropy(output, target)

    handle = case.model.blocks[1].norm.register_forward_hook(interrupt if place == "block" else lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        prune(case.model, case.batches, 0.5, score="wanda", probe=Probe(10.0), loss=loss, offload="cpu")
    handle.remove()
    assert_same(before, snapshot(case.model))


def test_a_search_runs_offloaded_as_it_does_whole():
    case, other = mlp(), mlp()
    limit, steps = Limit(absolute=0.02, better="lower"), Levels(0.2, 0.2, 0.6)

    def evaluate(model):
        return float(sum(case.loss(model(x), y) for x, y in case.batches))

    options = {"steps": steps, "probe": Probe(0.5), "loss": entropy}
    plain = search(case.model, case.batches, evaluate, limit, **options)
    moved = search(other.model, other.batches, evaluate, limit, offload="cpu", **options)
    assert moved.sparsity == plain.sparsity and moved.metric == plain.metric and moved.alone == plain.alone
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), other.model.parameters(), strict=True))
