"""Masks found by ranks that each hold a part are those of one process, to the bit, whoever holds what."""

import pytest
import torch
from covering import covering, each_once
from ranks import on_ranks
from reference import draw

from prunus import threshold
from prunus.ops import bits, candidates
from prunus.ops.lazy import Lazy, alike, stored
from prunus.score import SCORES, random
from prunus.select import Global, NofM, PerLayer, PerRow

SHAPES = [(1, 8), (13, 8), (3, 4, 2), (12, 24), (8, 4, 2, 2), (5, 16)]
LAYOUTS = {
    "rows of 2": ((2,), 1),
    "rows of 3": ((3,), 1),
    "rows of 4, some empty": ((4,), 1),
    "columns of 2": ((1, 2), 1),
    "columns of 3": ((1, 3), 1),
    "grid": ((2, 2), 1),
    "copies": ((1,), 3),
    "copies of rows": ((2,), 2),
    "third dimension": ((1, 1, 2), 1),
}
SELECTORS = {
    "global": Global(),
    "uniform": PerLayer(),
    "depth": PerLayer("depth"),
    "erk": PerLayer("erk"),
    "rows": PerRow(),
    "2:4": NofM(2, 4),
    "1:8": NofM(1, 8),
}


def source_of(scores):
    return alike([stored(name, score) for name, score in scores.items()])


def found_by_ranks(select, sources, sparsity, within, layouts):
    """Whole masks put together from the ranks' parts, every copy compared, and the bytes exchanged."""
    live = {name: lambda part, mask=mask: bits.pack(part.of(mask)) for name, mask in (within or {}).items()}
    outcomes, num_bytes = on_ranks(lambda s, alive: select.packed(s, sparsity, alive), sources, live, layouts)
    for outcome, _ in outcomes:
        if isinstance(outcome, ValueError):
            assert all(isinstance(other, ValueError) for other, _ in outcomes)
            raise outcome
    whole = {source.name: torch.full(source.shape, -1, dtype=torch.int8) for source in sources}
    for packed, parts in outcomes:
        for source in parts:
            here = source.shard.of(whole[source.name])
            mask = bits.unpack(packed[source.name], source.shape).to("cpu", torch.int8)
            assert ((here == -1) | (here == mask)).all(), "copies differ"
            here.copy_(mask)
    assert all((mask >= 0).all() for mask in whole.values())
    return {name: mask.bool() for name, mask in whole.items()}, num_bytes


def layouts_for(sources, layout):
    split, copies = layout
    return [((split if source.weight.ndim >= len(split) else (1,)), copies) for source in sources]


def by_one(select, sources, sparsity, within):
    live = {name: bits.pack(mask) for name, mask in (within or {}).items()}
    masks = select.packed(sources, sparsity, live)
    return {source.name: bits.unpack(masks[source.name], source.shape).cpu() for source in sources}


def assert_as_one(select, sources, sparsity, within, layout):
    masks, _ = found_by_ranks(select, sources, sparsity, within, layouts_for(sources, layout))
    for name, mask in by_one(select, sources, sparsity, within).items():
        assert torch.equal(masks[name], mask), name


def asked(select):
    return [select.sparsity] if isinstance(select, NofM) else [0.0, 0.37, 0.5, 0.95]


ROOMS = {"all candidates": 1 << 19, "sampled": 64}
KINDS = ["normal", "many ties", "all equal", "signed zeros", "half zero", "bfloat16", "wide range", "float64"]


@pytest.fixture
def room(request, monkeypatch, small_chunks):
    monkeypatch.setattr(candidates, "SAMPLE", ROOMS[request.param])


@pytest.mark.parametrize(
    ("select", "layout", "room", "kind"),
    each_once(SELECTORS, LAYOUTS, ROOMS, KINDS, times=4, one_of=4),
    indirect=["room"],
)
def test_ranks_find_the_masks_of_one_process(select, layout, room, kind):
    number = KINDS.index(kind)
    torch.manual_seed(number)
    shapes = [shape for shape in SHAPES if select != "1:8" or shape[1:] in [(8,), (24,), (16,)]]
    sources = source_of(draw(kind, *shapes))
    within = {source.name: torch.rand(source.shape) > 0.3 for source in sources[1:]} if number % 2 else {}
    sparsities = asked(SELECTORS[select])
    sparsity = sparsities[number % len(sparsities)]
    assert_as_one(SELECTORS[select], sources, sparsity, within, LAYOUTS[layout])


@pytest.mark.parametrize("kind", ["normal", "half zero"])
def test_a_global_cut_exchanges_less_than_a_mebibyte_whatever_its_way(kind):
    torch.manual_seed(0)
    sources = source_of(draw(kind, (1100, 500), (9,), (300, 70, 3)))
    assert sum(source.numel for source in sources) > candidates.SAMPLE
    layouts = layouts_for(sources, ((2,), 1))
    masks, num_bytes = found_by_ranks(Global(), sources, 0.4, {}, layouts)
    assert 0 < num_bytes < 100_000
    assert all(torch.equal(masks[n], mask) for n, mask in by_one(Global(), sources, 0.4, {}).items())


def test_only_the_weight_whose_ties_are_cut_through_is_ranked_by_position(monkeypatch):
    """Those behind it, with ties or without, are kept as they are."""
    ranked: list[str] = []
    behind = threshold._behind
    monkeypatch.setattr(threshold, "_behind", lambda source, *rest: ranked.append(source.name) or behind(source, *rest))
    scores = {name: torch.rand(8, 6) + 2 for name in "abcd"} | {"tied": torch.ones(8, 6)}
    scores = {name: scores[name] for name in ("a", "tied", "b", "c", "d")}
    scores["c"][:] = 1
    sources = source_of(scores)
    masks, _ = found_by_ranks(Global(), sources, 0.1, {}, layouts_for(sources, ((2,), 1)))
    assert ranked == ["tied"] * 2
    assert {name: int((~mask).sum()) for name, mask in masks.items()} == {"a": 0, "tied": 24, "b": 0, "c": 0, "d": 0}


def test_rows_and_groups_that_lie_whole_on_a_rank_send_nothing_but_flags():
    sources = source_of(draw("normal", (40, 24), (16, 8)))
    for select, split in ((PerRow(), (2,)), (NofM(2, 4), (2,)), (NofM(2, 4), (1, 2))):
        _, num_bytes = found_by_ranks(select, sources, 0.5, {}, layouts_for(sources, (split, 1)))
        assert num_bytes < 100


@pytest.mark.parametrize(
    ("where", "select", "layout", "room"),
    covering([0, 1, 2], ["global", "uniform", "rows", "2:4"], LAYOUTS, ROOMS),
    indirect=["room"],
)
def test_a_score_that_is_not_finite_on_one_rank_is_an_error_on_all(where, select, layout, room):
    scores = draw("positive", (12, 8), (16, 8), (4, 8))
    scores[f"layer{where}"][-1, -1] = float("nan")
    sources = source_of(scores)
    with pytest.raises(ValueError, match=f"layer{where}"):
        found_by_ranks(SELECTORS[select], sources, 0.5, {}, layouts_for(sources, LAYOUTS[layout]))


def test_random_scores_are_keyed_by_the_position_in_the_whole():
    formula = SCORES["random"].formula
    sources = [
        Lazy(f"w{i}", torch.zeros(shape), random, {}, {"name": f"w{i}"}, takes_position=True, formula=formula)
        for i, shape in enumerate([(13, 8), (6, 24)])
    ]
    for layout in LAYOUTS.values():
        for select in (Global(), PerRow()):
            assert_as_one(select, sources, 0.5, {}, layout)
