"""Masks found by ranks that each hold a part are those of one process, to the bit, whoever holds what."""

import pytest
import torch
from ranks import on_ranks
from reference import draw

from prunus.ops import bits, sample
from prunus.ops.source import alike, stored
from prunus.select import Global, NofM, PerLayer, PerRow

SHAPES = [(1, 8), (13, 8), (3, 4, 2), (40, 24), (8, 4, 2, 2), (5, 16)]
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
            here = source.part.of(whole[source.name])
            mask = bits.unpack(packed[source.name], source.shape).to(torch.int8)
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
    return {source.name: bits.unpack(masks[source.name], source.shape) for source in sources}


def assert_as_one(select, sources, sparsity, within, layout):
    masks, _ = found_by_ranks(select, sources, sparsity, within, layouts_for(sources, layout))
    for name, mask in by_one(select, sources, sparsity, within).items():
        assert torch.equal(masks[name], mask), name


def asked(select):
    return [select.sparsity] if isinstance(select, NofM) else [0.0, 0.37, 0.5, 0.95]


@pytest.fixture(params=[1 << 19, 64], ids=["all candidates", "sampled"])
def room(request, monkeypatch, small_pieces):
    monkeypatch.setattr(sample, "SAMPLE", request.param)


KINDS = ["normal", "many ties", "all equal", "signed zeros", "half zero", "bfloat16", "wide range", "float64"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("select", SELECTORS)
def test_ranks_find_the_masks_of_one_process(select, layout, room):
    for number, kind in enumerate(KINDS):
        torch.manual_seed(number)
        shapes = [shape for shape in SHAPES if select != "1:8" or shape[1:] in [(8,), (24,), (16,)]]
        sources = source_of(draw(kind, *shapes))
        within = {source.name: torch.rand(source.shape) > 0.3 for source in sources[1:]} if number % 2 else {}
        sparsities = asked(SELECTORS[select])
        sparsity = sparsities[number % len(sparsities)]
        assert_as_one(SELECTORS[select], sources, sparsity, within, LAYOUTS[layout])
