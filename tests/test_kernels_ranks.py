"""Ranks whose parts are read by kernels find the masks of one process: in the interpreter, or compiled on a GPU."""

import threading

import pytest
import torch
from covering import quickly
from reference import draw
from test_threshold_ranks import LAYOUTS, assert_as_one, found_by_ranks, layouts_for, source_of

from prunus import rows, threshold
from prunus.ops import bits, candidates
from prunus.ops.candidates import Candidates, candidates_reference
from prunus.ops.lazy import Lazy, sortable
from prunus.score import SCORES as TABLE
from prunus.score import random
from prunus.select import Global, NofM, PerLayer, PerRow

triton = pytest.importorskip("triton", reason="kernels need triton")

from test_kernels import DEVICE, TILE, matrix, sources  # noqa: E402

from prunus.ops._triton import address_table, launch  # noqa: E402
from prunus.ops._triton import candidates as kernels  # noqa: E402
from prunus.ops._triton.readable import readable  # noqa: E402

SHAPES = [(1, 8), (13, 8), (3, 4, 2), (40, 24), (8, 4, 2, 2), (61, 53)]
KINDS = ["normal", "many ties", "all equal", "signed zeros", "half zero", "bfloat16", "wide range"]
SCORES = ["magnitude", "bitter0", "bitter3", "bitter5", "bitter7", "bitter9", "fisher", "wanda", "movement"]


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    """Kernels on small tiles, wherever the tensors are; ranks are threads, and the interpreter takes one at a time."""
    monkeypatch.setattr(kernels, "TILE", TILE)
    if DEVICE == "cpu":
        turn, compiled = threading.Lock(), launch._compile

        def one_at_a_time(*args):
            with turn:
                compiled(*args)

        monkeypatch.setattr(launch, "_compile", one_at_a_time)
        for module in (candidates, rows):
            monkeypatch.setattr(module, "kernels_read", lambda source: source.shard and not source.takes_position)


@pytest.fixture
def descents(monkeypatch):
    """How often ranks found the cut by counting everything."""
    seen, original = [], threshold._without_bracket

    def counted(*args):
        seen.extend([args] if args[0][0].shard else [])
        return original(*args)

    monkeypatch.setattr(threshold, "_without_bracket", counted)
    return seen


@pytest.fixture(params=matrix([1 << 19, 256], [256]), ids=lambda size: f"sample of {size}")
def room(request, monkeypatch):
    monkeypatch.setattr(candidates, "SAMPLE", request.param)
    return request.param


def on_device(scores):
    return {name: score.to(DEVICE) for name, score in scores.items()}


@pytest.mark.parametrize("layout", matrix(list(LAYOUTS), ["columns of 3"]))
def test_parts_are_cut_as_one(layout, room):
    for number, kind in enumerate(matrix(KINDS, ["normal", "half zero"])):
        if DEVICE == "cuda" and (number + list(LAYOUTS).index(layout)) % 3:  # all kinds come by, not all everywhere
            continue
        torch.manual_seed(number)
        given = source_of(on_device(draw(kind, *SHAPES)))
        within = {source.name: (torch.rand(source.shape) > 0.3).to(DEVICE) for source in given[1:]}
        for sparsity, live in ((0.5, {}), (0.9, within)):
            assert_as_one(Global(), given, sparsity, live, LAYOUTS[layout])
    few = source_of(on_device({"a": torch.randn(1, 40), "b": torch.randn(2, 3)}))
    assert_as_one(Global(), few, 0.5, {}, LAYOUTS["rows of 4, some empty"])


@pytest.mark.parametrize("layout", matrix(["rows of 3", "columns of 2", "grid"], ["rows of 3"]))
@pytest.mark.parametrize("selector", quickly([PerLayer(), PerRow(), NofM(2, 4)], PerRow()), ids=str)
def test_selectors_cut_parts_as_one(selector, layout):
    given = source_of(on_device(draw("many ties", (13, 8), (40, 24), (2, 16))))
    within = {source.name: (torch.rand(source.shape) > 0.3).to(DEVICE) for source in given[1:]}
    assert_as_one(selector, given, 0.5, within, LAYOUTS[layout])


@pytest.mark.rounding
@pytest.mark.parametrize("name", matrix(SCORES, ["bitter9"]))
def test_every_score_is_cut_as_one(name, monkeypatch):
    monkeypatch.setattr(candidates, "SAMPLE", 256)
    assert_as_one(Global(), sources(name, [(37, 41), (8, 128), (5, 5, 7)]), 0.6, {}, LAYOUTS["rows of 2"])


def test_a_bracket_that_holds_needs_one_pass_and_no_descent(monkeypatch, descents):
    passes, original = [], kernels.candidates
    monkeypatch.setattr(kernels, "candidates", lambda *args: passes.append(args) or original(*args))
    monkeypatch.setattr(candidates, "SAMPLE", 256)
    given = source_of(on_device(draw("normal", (301, 97), (64, 211))))
    sparsities = matrix([0.02, 0.5, 0.97], [0.5])
    for sparsity in sparsities:
        assert_as_one(Global(), given, sparsity, {}, LAYOUTS["rows of 2"])
    assert not descents and len(passes) == 2 * len(sparsities)


def test_more_ties_than_there_is_room_for_are_counted(monkeypatch, descents):
    monkeypatch.setattr(address_table, "num_multiprocessors", lambda device: 1)  # every program brings room of its own
    given = source_of(on_device(draw("half zero", (301, 97), (64, 211))))
    monkeypatch.setattr(threshold, "bracket", lambda *_: (0.0, 0.0, 200))
    assert kernels.candidates(readable(given), 0.0, 0.0, 200, {}) is None
    assert_as_one(Global(), given, 0.3, {}, LAYOUTS["rows of 2"])
    assert len(descents) == 2


def test_a_cut_beyond_the_bracket_is_counted(monkeypatch, descents):
    """The pass lists what lies 32 floats beyond an edge too, so a threshold found there is not to be trusted."""
    scores = (torch.arange(4096, dtype=torch.int32) + 0x3F800000).view(torch.float32)  # neighbours, all of them
    given = source_of(on_device({"a": scores.view(64, 64)}))
    monkeypatch.setattr(threshold, "bracket", lambda *_: (scores[100].item(), scores[1000].item(), 4096))
    for num_drop in (101, 1001):
        assert_as_one(Global(), given, num_drop / 4096, {}, LAYOUTS["rows of 2"])
    assert not descents
    for number, num_drop in enumerate(matrix([60, 68, 69, 100, 1002, 1033, 1034], [69, 1033])):
        assert_as_one(Global(), given, num_drop / 4096, {}, LAYOUTS["rows of 2"])
        assert len(descents) == 2 * (number + 1)  # of two ranks


@pytest.mark.rounding
def test_the_pass_lists_what_the_definition_lists(room):
    given = sources("bitter7", [(37, 41), (8, 128), (0, 5), (61, 53)])
    live = {"layer3": bits.pack(torch.rand(61, 53) > 0.4).to(DEVICE)}
    scores = torch.cat([source.all().flatten() for source in given]).sort().values
    lo, hi = scores[999:1001].mean().item(), scores[1999:2001].mean().item()
    found = Candidates(*kernels.candidates(readable(given), lo, hi, 1 << 14, live))
    wanted = candidates_reference(given, lo, hi, 1 << 14, live)
    masks, others = found.masks(given), wanted.masks(given)
    starts = torch.tensor(wanted.starts) - torch.tensor(found.starts)
    moved = found.positions.cpu() + 8 * starts[found.owners(found.positions).cpu()]
    listed = dict(zip(moved.tolist(), found.scores.tolist(), strict=True))
    expected = dict(zip(wanted.positions.tolist(), wanted.scores.tolist(), strict=True))
    assert {at: score for at, score in listed.items() if lo <= score <= hi} == pytest.approx(expected, rel=1e-6)
    assert len(listed) <= len(wanted.scores) + 4  # beyond the edges lie very few
    for number, source in enumerate(given):
        assert not (masks[source.name] & ~others[source.name]).any()
        assert int(bits.count(masks[source.name])) == found.num_above[number]


def test_a_sample_is_of_the_live_and_finite(room):
    scores = torch.randn(200, 64)
    scores[::3] = float("nan")
    scores[1::3] = float("inf")
    live = torch.rand(200, 64) > 0.5
    given = source_of(on_device({"a": scores, "b": torch.zeros(0, 4)}))
    keys = kernels.sampled(readable(given), 0.1, {"a": bits.pack(live).to(DEVICE)})
    known = set(sortable(scores[2::3][live[2::3]]).tolist())
    assert 0 < len(keys) < 0.2 * scores.numel() and set(keys.tolist()) <= known


@pytest.mark.parametrize("where", matrix([0, 1], [1]))
def test_what_is_not_finite_on_one_rank_is_an_error_on_all(where, room):
    scores = draw("positive", (12, 8), (16, 8))
    scores[f"layer{where}"][-1, -1] = float("nan")
    given = source_of(on_device(scores))
    with pytest.raises(ValueError, match=f"layer{where} has some that are not"):
        found_by_ranks(Global(), given, 0.5, {}, layouts_for(given, LAYOUTS["rows of 2"]))


def test_random_scores_are_keyed_by_the_position_in_the_whole():
    """Kernels count from the first element of a part, so that they must not read such a score."""
    how = {"takes_position": True, "formula": TABLE["random"].formula}
    weights = {f"w{i}": torch.zeros(shape, device=DEVICE) for i, shape in enumerate([(13, 8), (6, 24)])}
    given = [Lazy(name, weight, random, {}, {"name": name}, **how) for name, weight in weights.items()]
    for selector in (Global(), PerRow(), NofM(2, 4)):
        assert_as_one(selector, given, 0.5, {}, LAYOUTS["rows of 2"])
