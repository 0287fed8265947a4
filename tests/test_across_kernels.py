"""Ranks whose parts are read by kernels find the masks of one process: in the interpreter, or compiled on a GPU."""

import threading

import pytest
import torch
from reference import draw
from test_across import LAYOUTS, assert_as_one, found_by_ranks, layouts_for, source_of

from prunus import across, select
from prunus.ops import bits, sample
from prunus.ops.source import Lazy
from prunus.ops.sweep import sweep_all
from prunus.score import random
from prunus.select import Global, NofM, PerLayer, PerRow

triton = pytest.importorskip("triton", reason="kernels need triton")

from test_kernels import DEVICE, TILE, sources  # noqa: E402

from prunus.ops._triton import launch, parts, plan  # noqa: E402
from prunus.ops._triton.lowered import lowered  # noqa: E402

SHAPES = [(1, 8), (13, 8), (3, 4, 2), (40, 24), (8, 4, 2, 2), (61, 53)]
KINDS = ["normal", "many ties", "all equal", "signed zeros", "half zero", "bfloat16", "wide range"]
SCORES = ["magnitude", "bitter0", "bitter3", "bitter5", "bitter7", "bitter9", "fisher", "wanda", "movement"]


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    """Kernels on small tiles, wherever the tensors are; ranks are threads, and the interpreter takes one at a time."""
    monkeypatch.setattr(parts, "TILE", TILE)
    if DEVICE == "cpu":
        turn, compiled = threading.Lock(), launch._compile

        def one_at_a_time(*args):
            with turn:
                compiled(*args)

        monkeypatch.setattr(launch, "_compile", one_at_a_time)
        for module in (across, select):
            monkeypatch.setattr(module, "kernels_read", lambda source: source.part and not source.takes_position)


@pytest.fixture
def descents(monkeypatch):
    """How often the cut was found by counting everything."""
    seen, by_descent = [], across._by_descent

    def counted(*args):
        seen.append(args)
        return by_descent(*args)

    monkeypatch.setattr(across, "_by_descent", counted)
    return seen


@pytest.fixture(params=[1 << 19, 256], ids=["all listed", "sampled"])
def room(request, monkeypatch):
    monkeypatch.setattr(sample, "SAMPLE", request.param)
    return request.param


def on_device(scores):
    return {name: score.to(DEVICE) for name, score in scores.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_cut_as_one(layout, room):
    for number, kind in enumerate(KINDS):
        if (number + list(LAYOUTS).index(layout)) % 3:  # all kinds come by, not all everywhere
            continue
        torch.manual_seed(number)
        given = source_of(on_device(draw(kind, *SHAPES)))
        within = {source.name: (torch.rand(source.shape) > 0.3).to(DEVICE) for source in given[1:]}
        for sparsity, live in ((0.5, {}), (0.9, within)):
            assert_as_one(Global(), given, sparsity, live, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["rows of 3", "columns of 2", "grid"])
@pytest.mark.parametrize("selector", [PerLayer(), PerRow(), NofM(2, 4)], ids=["layers", "rows", "2:4"])
def test_selectors_cut_parts_as_one(selector, layout):
    given = source_of(on_device(draw("many ties", (13, 8), (40, 24), (2, 16))))
    within = {source.name: (torch.rand(source.shape) > 0.3).to(DEVICE) for source in given[1:]}
    assert_as_one(selector, given, 0.5, within, LAYOUTS[layout])


@pytest.mark.parametrize("name", SCORES)
def test_every_score_is_cut_as_one(name, monkeypatch):
    monkeypatch.setattr(sample, "SAMPLE", 256)
    assert_as_one(Global(), sources(name, [(37, 41), (8, 128), (5, 5, 7)]), 0.6, {}, LAYOUTS["rows of 2"])


def test_a_bracket_that_holds_needs_one_pass_and_no_descent(monkeypatch, descents):
    passes, swept = [], parts.swept
    monkeypatch.setattr(parts, "swept", lambda *args: passes.append(args) or swept(*args))
    monkeypatch.setattr(sample, "SAMPLE", 256)
    given = source_of(on_device(draw("normal", (301, 97), (64, 211))))
    for sparsity in (0.02, 0.5, 0.97):
        assert_as_one(Global(), given, sparsity, {}, LAYOUTS["rows of 2"])
    assert not descents and len(passes) == 3 * 2


def test_more_ties_than_there_is_room_for_are_counted(monkeypatch, descents):
    monkeypatch.setattr(plan, "num_multiprocessors", lambda device: 1)  # every program brings room of its own
    given = source_of(on_device(draw("half zero", (301, 97), (64, 211))))
    monkeypatch.setattr(across, "_bracket", lambda *_: (0.0, 0.0, 200))
    assert parts.swept(lowered(given), 0.0, 0.0, 200, {}) is None
    assert_as_one(Global(), given, 0.3, {}, LAYOUTS["rows of 2"])
    assert len(descents) == 2


def test_a_cut_beyond_the_bracket_is_counted(monkeypatch, descents):
    """The pass lists what lies 32 floats beyond an edge too, so a threshold found there is not to be trusted."""
    scores = (torch.arange(4096, dtype=torch.int32) + 0x3F800000).view(torch.float32)  # neighbours, all of them
    given = source_of(on_device({"a": scores.view(64, 64)}))
    monkeypatch.setattr(across, "_bracket", lambda *_: (scores[100].item(), scores[1000].item(), 4096))
    for num_drop in (101, 1001):
        assert_as_one(Global(), given, num_drop / 4096, {}, LAYOUTS["rows of 2"])
    assert not descents
    for number, num_drop in enumerate((60, 68, 69, 100, 1002, 1033, 1034)):
        assert_as_one(Global(), given, num_drop / 4096, {}, LAYOUTS["rows of 2"])
        assert len(descents) == 2 * (number + 1)  # of two ranks


def test_the_pass_lists_what_the_definition_lists(room):
    given = sources("bitter7", [(37, 41), (8, 128), (0, 5), (61, 53)])
    live = {"layer3": bits.pack(torch.rand(61, 53) > 0.4).to(DEVICE)}
    scores = torch.cat([source.whole().flatten() for source in given]).sort().values
    lo, hi = scores[999:1001].mean().item(), scores[1999:2001].mean().item()
    found, wanted = (way(lo, hi) for way in (_by_kernel(given, live), _by_definition(given, live)))
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


def _by_kernel(given, live):
    return lambda lo, hi: parts.swept(lowered(given), lo, hi, 1 << 14, live)


def _by_definition(given, live):
    return lambda lo, hi: sweep_all(given, lo, hi, 1 << 14, live)


def test_a_sample_is_of_the_live_and_finite(room):
    scores = torch.randn(200, 64)
    scores[::3] = float("nan")
    scores[1::3] = float("inf")
    live = torch.rand(200, 64) > 0.5
    given = source_of(on_device({"a": scores, "b": torch.zeros(0, 4)}))
    keys = parts.sampled(lowered(given), 0.1, {"a": bits.pack(live).to(DEVICE)})
    known = set(across.sortable(scores[2::3][live[2::3]]).tolist())
    assert 0 < len(keys) < 0.2 * scores.numel() and set(keys.tolist()) <= known


def test_a_rank_without_elements_takes_part():
    given = source_of(on_device({"a": torch.randn(1, 40), "b": torch.randn(2, 3)}))
    assert_as_one(Global(), given, 0.5, {}, LAYOUTS["rows of 4, some empty"])


@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_on_one_rank_is_an_error_on_all(where, room):
    scores = draw("positive", (12, 8), (16, 8))
    scores[f"layer{where}"][-1, -1] = float("nan")
    given = source_of(on_device(scores))
    with pytest.raises(ValueError, match=f"layer{where} has some that are not"):
        found_by_ranks(Global(), given, 0.5, {}, layouts_for(given, LAYOUTS["rows of 2"]))


def test_random_scores_are_keyed_by_the_position_in_the_whole():
    """Kernels count from the first element of a part, so that they must not read such a score."""
    given = [
        Lazy(
            f"w{i}",
            torch.zeros(shape, device=DEVICE),
            random,
            {},
            {"name": f"w{i}"},
            takes_position=True,
            formula="random",
        )
        for i, shape in enumerate([(13, 8), (6, 24)])
    ]
    for selector in (Global(), PerRow(), NofM(2, 4)):
        assert_as_one(selector, given, 0.5, {}, LAYOUTS["rows of 2"])
