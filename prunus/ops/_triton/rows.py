"""Cuts within rows and within groups of M: each is decided by one program, from one read."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import bits
from ..lazy import Lazy
from .address_table import COLUMNS, FIRST, LIVE, OUT, TILE, is_live, locate
from .cut import check_finite
from .launch import launch
from .readable import readable
from .scores import find_tile, is_strange, packed, read_by, scores_of, sortable

LONGEST = 1 << 15  # inputs of a row that a program holds in registers
WIDEST = 16  # of a group
BLOCK = 1024
NOTHING = tl.constexpr(0x7FFFFFFF)  # the key of what is not ranked
BOTH = tl.constexpr(LONGEST + 1)  # base of two counts of a row in one number: 65536 would overflow int32


@triton.jit
def kth_smallest(keys, lowest, highest, num, total):
    """The ``num``-th smallest (from 1) of ``total`` keys, which lie from ``lowest`` to ``highest``.

    Each round counts the keys below a pivot. Where the threshold should lie by the counts at both ends of its range
    is the next pivot, and the middle of the range every fourth time, so that no distribution takes long. A range
    where it must be the first or the last key is narrow enough.
    """
    lo, hi = lowest.to(tl.int64), highest.to(tl.int64) + 1
    below, up_to = tl.zeros((), tl.int32), total  # keys below lo, and below hi
    turn = 0
    while (num - below > 1) & (num < up_to) & (hi - lo > 1):
        share = ((num - below).to(tl.float32) - 0.5) / (up_to - below).to(tl.float32)
        guess = ((hi - lo).to(tl.float32) * share).to(tl.int64)
        step = tl.where(turn % 4 == 3, (hi - lo) // 2, guess)
        pivot = lo + tl.minimum(tl.maximum(step, 1), hi - lo - 1)
        count = tl.sum((keys < pivot.to(tl.int32)).to(tl.int32))
        is_low = count < num
        lo, below = tl.where(is_low, pivot, lo), tl.where(is_low, count, below)
        hi, up_to = tl.where(is_low, hi, pivot), tl.where(is_low, up_to, count)
        turn += 1
    if num - below == 1:
        threshold = tl.min(tl.where(keys >= lo.to(tl.int32), keys, NOTHING))
    else:
        threshold = tl.max(tl.where(keys <= (hi - 1).to(tl.int32), keys, -NOTHING - 1))
    return threshold


@triton.jit(do_not_specialize=["num_tensors"])
def row_kernel(
    table, constants, num_tensors, goals, masks, strange,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of one row without the smallest, of which the dead are the first; ``goals`` are inputs and drops a row."""
    number = tl.program_id(0)
    tensor = locate(table, num_tensors, number, DEPTH)
    row = table + tensor * COLUMNS
    num_inputs = tl.multiple_of(tl.load(goals + tensor * 2).to(tl.int32), 8)
    num_drop = tl.load(goals + tensor * 2 + 1).to(tl.int32)
    first = tl.multiple_of((number - tl.load(row + FIRST)) * num_inputs, 8)
    lane = tl.arange(0, BLOCK)
    valid = lane < num_inputs
    read = read_by(row, constants + tensor * 4)
    s = scores_of(read, first, lane, valid, FULL, False, NAME, WT, MT, VT, ALIGN)
    keys = tl.minimum(sortable(s), NOTHING - 1)  # a GPU's own NaN would have the key of nothing
    if not FULL:
        keys = tl.where(valid, keys, NOTHING)
    num_live, live = num_inputs, tl.load(row + LIVE)
    if live != 0:
        bytes = tl.load(live.to(tl.pointer_type(tl.uint8)) + first // 8 + lane // 8, mask=valid, other=0).to(tl.int32)
        alive = ((bytes >> (lane % 8)) & 1) != 0
        keys = tl.where(alive, keys, NOTHING)
        num_live = tl.sum(alive.to(tl.int32))
    ranked = keys != NOTHING
    need = num_drop - (num_inputs - num_live)
    lowest, highest = tl.min(keys), tl.max(tl.where(ranked, keys, -NOTHING - 1))
    keep = ranked
    if need > 0:
        threshold = kth_smallest(keys, lowest, highest, need, num_live)
        counts = tl.sum((keys < threshold).to(tl.int32) + (keys == threshold).to(tl.int32) * BOTH)
        num_equal = need - counts % BOTH  # of equal ones so many are dropped, the first ones
        keep = ranked & (keys > threshold)
        if num_equal < counts // BOTH:
            equal = keys == threshold
            keep = keep | (equal & (tl.cumsum(equal.to(tl.int32)) > num_equal))
    byte = tl.arange(0, BLOCK // 8)
    tl.store(masks + tl.load(row + OUT) + first // 8 + byte, packed(keep, BLOCK), mask=byte * 8 < num_inputs)
    # a score that is not finite has a key beyond those of all others
    if (num_live > 0) & ((lowest <= -0x7F800001) | (highest >= 0x7F800000)):
        tl.store(strange + tensor, 1)


@triton.jit
def group_kernel(
    table, constants, num_tensors, masks, strange, num_drop,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of a tile without the ``num_drop`` smallest of every ``GROUP`` elements."""
    tile = tl.program_id(0)
    tensor, row, first, left, live, read = find_tile(table, constants, num_tensors, tile, DEPTH, TILE)
    mask = masks + tl.load(row + OUT) + first // 8
    for start in range(0, TILE, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        alive = is_live(live, first + lane, lane < left)
        s = scores_of(read, first, lane, lane < left, FULL, False, NAME, WT, MT, VT, ALIGN)
        keys = tl.reshape(tl.where(alive, sortable(s), -0x7FFFFFFF), (BLOCK // GROUP, GROUP))
        place = tl.arange(0, GROUP)
        rank = tl.zeros((BLOCK // GROUP, GROUP), tl.int32)
        for j in tl.static_range(GROUP):  # who is smaller, or equal and stands before, is dropped before
            other = tl.sum(tl.where(place[None, :] == j, keys, 0), axis=1)[:, None]
            rank += ((other < keys) | ((other == keys) & (place[None, :] > j))).to(tl.int32)
        keep = tl.reshape(rank >= num_drop, (BLOCK,)) & alive
        byte = start // 8 + tl.arange(0, BLOCK // 8)
        tl.store(mask + byte, packed(keep, BLOCK), mask=byte * 8 < left)
        tl.store(strange + tensor + lane * 0, 1, mask=alive & is_strange(s))


def drop_in_rows(sources: Sequence[Lazy], num_drop: Sequence[int], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every row, of the sources whose rows kernels can read.

    One launch for all sources whose rows take blocks of the same size.
    """
    chosen = [
        (source, n, drop)
        for source, drop in zip(sources, num_drop, strict=True)
        if drop > 0 and 0 < (n := num_inputs(source)) <= LONGEST and n % 8 == 0
    ]
    chosen.sort(key=lambda each: block_of(each[1]))
    low = readable([source for source, _, _ in chosen]) if chosen else None
    if low is None:
        return {}
    lengths = [n for _, n, _ in chosen]
    offsets = [0, *accumulate(source.numel // 8 for source in low.sources)]
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=sources[0].device)
    goals = torch.tensor([(n, drop) for _, n, drop in chosen], dtype=torch.int64).to(out.device)
    strange = torch.zeros(len(chosen), dtype=torch.int32, device=out.device)
    for block, run in groupby(range(len(chosen)), lambda i: block_of(lengths[i])):
        numbers = list(run)
        here = slice(numbers[0], numbers[-1] + 1)
        t = low.some(here).table(live, offsets[here], lengths[here])
        how = {**low.read, "ALIGN": t.align, "FULL": all(n == block for n in lengths[here]), "DEPTH": t.depth}
        how |= {"BLOCK": block, "num_warps": max(1, min(16, block // 1024))}
        launch(row_kernel, (t.num_tiles,), (t.rows, t.constants, len(t.rows), goals[here], out, strange[here]), how)
    return _split(low.sources, out, offsets, strange)


def block_of(length: int) -> int:
    """Elements that a program holds for a row."""
    return max(64, 1 << (length - 1).bit_length())


def drop_in_groups(
    sources: Sequence[Lazy], num_drop: int, group: int, live: Mapping[str, Tensor], tile: int = TILE
) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every ``group`` inputs, of sources that kernels can read."""
    low = readable(sources)
    if low is None or group > WIDEST or group & group - 1 or not all(num_inputs(source) for source in sources):
        return {}
    offsets = [0, *accumulate(bits.num_bytes(source.numel) for source in sources)]
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=sources[0].device)
    strange = torch.zeros(len(sources), dtype=torch.int32, device=out.device)
    t = low.table(live, offsets, tile)
    shape = {"ALIGN": t.align, "FULL": t.is_full, "DEPTH": t.depth, "GROUP": group}
    constants = {**low.read, **shape, "BLOCK": min(BLOCK, tile), "TILE": tile}
    launch(group_kernel, (t.num_tiles,), (t.rows, t.constants, len(t.rows), out, strange, num_drop), constants)
    return _split(sources, out, offsets, strange)


def _split(sources: Sequence[Lazy], out: Tensor, offsets: Sequence[int], strange: Tensor) -> dict[str, Tensor]:
    """The mask of each source; ValueError for one with scores that are not finite, the one word from the device."""
    check_finite(sources, [number * flag for number, flag in enumerate(strange.tolist(), 1)])
    parts = out.split_with_sizes([stop - start for start, stop in pairwise(offsets)])
    return dict(zip([source.name for source in sources], parts, strict=True))


def num_inputs(source: Lazy) -> int:
    """Inputs of a row if the elements of each row lie side by side, else 0."""
    return source.num_inputs if source.outputs in ((), (0,)) and source.weight.is_contiguous() else 0
