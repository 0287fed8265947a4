"""Passes block by block over stored activations computes what whole passes compute, and memory sets only its pace."""

import weakref
from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_models import cnn, llama, mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prunus import prune
from prunus.input_statistics import InputNorms
from prunus.oneshot import gram, norms
from prunus.oneshot.blocks import Stream, block_of
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.forward import outputs
from prunus.oneshot.samples import Chunk, samples_of
from prunus.oneshot.streams import Streams


def logits(calibration, chunk):
    found = outputs(calibration.model, calibration.batch(chunk))
    return found if torch.is_tensor(found) else found.logits


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("make", [cnn, llama])
@torch.no_grad()
def test_one_block_at_a_time_sees_and_gives_what_a_whole_pass_does(make, offload):
    case = make()
    calibration = Calibration(case.model, case.batches, offload=offload)
    blocks, weights = calibration.blocks, list(calibration.weights.values())

    def forward(chunk):
        return logits(calibration, chunk)

    with calibration.open():
        with InputNorms(weights, mode="eval") as collected:
            expected = [forward(chunk) for chunk in calibration.samples.chunks(2)]
        stream, seen = Stream(blocks, calibration.samples), {}
        for k in range(len(blocks)):
            with InputNorms(weights, mode="eval") as here:
                stream.want({k, k + 1})
                stream.ensure(k + 1, forward, 2)
            seen |= {w.name: here.squares[w.name] for w in weights if block_of(w.module, blocks) == k}
            assert not here.squares.keys() & {w.name for w in weights if block_of(w.module, blocks) == k + 1}
        for chunk, whole in zip(calibration.samples.chunks(2), expected, strict=True):
            with stream.starting_at(len(blocks), chunk):
                assert torch.equal(forward(chunk), whole)
    assert len(seen) > 8 and all(torch.equal(squares, collected.squares[name]) for name, squares in seen.items())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_chunk_that_memory_does_not_hold_is_halved_and_every_sample_is_visited_once_in_order(limit):
    case, visited, halved = mlp(), [], []
    calibration = Calibration(case.model, case.batches)

    def act(chunk):
        if chunk.size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        visited.extend((chunk.stack, i) for i in range(chunk.start, chunk.stop))

    calibration.visit(8, act, after=Chunk(0, 0, 2), make_room=lambda: halved.append(1))
    assert visited == [(0, i) for i in range(2, len(calibration.samples))] and halved


def test_memory_for_a_single_sample_or_twice_for_one_part_and_other_errors_are_raised():
    case, calls = mlp(), []
    calibration = Calibration(case.model, case.batches)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), ValueError("mine")):
        with pytest.raises(type(error)):
            calibration.visit(2, lambda chunk, error=error: (_ for _ in ()).throw(error))
    with pytest.raises(torch.OutOfMemoryError):
        calibration.each_once([1, 2], failing({2, 3}, calls.append))
    assert calls == [1]


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos", "image_grid_thw"])
def test_pixels_that_are_not_rows_of_a_sample_are_one_line(name):
    packed = {"input_ids": torch.zeros(2, 5, dtype=torch.long), name: torch.zeros(8, 3)}
    with pytest.raises(ValueError, match=f"{name} has 8 rows.*batches of one sample each"):
        samples_of([packed])
    alone = {"input_ids": torch.zeros(1, 5, dtype=torch.long), name: torch.zeros(8, 3)}
    assert len(samples_of([alone, alone])) == 2


def failing(at, own):
    """A function whose calls number ``at`` run out of memory before they do anything."""
    calls = []

    def function(*args):
        calls.append(1)
        if len(calls) in at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(*args)

    return function


PLACES = {
    "rows of a pass": (gram.Tokens, "flatten_"),
    "a product": (gram, "_add_product_"),
    "a block": (gram.Gram, "take"),
    "the last product": (gram.Gram, "moments"),
    "the lower triangle": (gram, "_mirror_"),
    "squares": (norms._Sums, "add"),
}


@pytest.mark.parametrize(("place", "at"), each_once(PLACES, [{1}, {2}, {3, 8}]), ids=str)
def test_what_a_pass_adds_is_added_once_wherever_memory_runs_out(place, at, monkeypatch):
    case, other = llama(num_layers=2), llama(num_layers=2)
    monkeypatch.setattr(gram, "BLOCK", 8)
    options = {"score": "wanda" if place == "squares" else None, "batch_size": 3}
    expected = prune(other.model, other.batches, **options)
    where, name = PLACES[place]
    monkeypatch.setattr(where, name, failing(at, getattr(where, name)))
    found = prune(case.model, case.batches, **options)
    assert found.num_pruned == expected.num_pruned
    for a, b in zip(case.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


class Peak(TorchDispatchMode):
    """The most bytes that results of operations have taken at once."""

    def __init__(self):
        super().__init__()
        self.most, self._alive = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self._alive += [weakref.ref(leaf) for leaf in tree_leaves(found) if torch.is_tensor(leaf)]
        self._alive = [each for each in self._alive if each() is not None]
        storages = [tensor.untyped_storage() for each in self._alive if (tensor := each()) is not None]
        self.most = max(self.most, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return found


def test_the_windows_of_a_grouped_convolution_are_not_copied_all_at_once():
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3, groups=8), nn.ReLU()), torch.randn(4, 16, 34, 34)
    with Peak() as peak:
        prune(model, [x], 0.5, batch_size=4)
    windows = 4 * 16 * 9 * 32 * 32 * 4  # bytes: samples, channels, places of a kernel, places of an image, float32
    assert windows <= peak.most < 1.7 * windows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gram_matrix_on_cuda_goes_on_where_memory_ran_out(dtype, monkeypatch):
    x = torch.randn(5000, 300, device="cuda", dtype=dtype)
    expected = gram.Gram()
    expected.add(x, 2 * x)
    own = gram._add_product_
    for at in range(1, 7):  # of three products a block, in two blocks
        found, rows = gram.Gram(), gram.Tokens([x, 2 * x])
        monkeypatch.setattr(gram, "_add_product_", failing({at}, own))
        with pytest.raises(torch.OutOfMemoryError):
            found.take(rows)
        found.take(rows)
        monkeypatch.setattr(gram, "_add_product_", own)
        here, there = found.moments(), deepcopy(expected).moments()
        assert here.num_tokens == there.num_tokens
        for name in ("gram", "cross", "dense"):
            torch.testing.assert_close(getattr(here, name), getattr(there, name))


def test_the_streams_of_a_rank_hold_its_share_of_the_samples(monkeypatch):
    case = mlp()
    calibration, own = (Calibration(case.model, batches) for batches in (case.batches, case.batches[1:]))
    monkeypatch.setattr(Calibration, "shared", lambda self: own)
    with torch.no_grad(), calibration.open():
        streams = Streams(calibration)
    assert streams.dense.samples is streams.pruned.samples is own.samples
