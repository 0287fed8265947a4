"""A cut without lists: digits of the threshold by counting, ties by counting them tile by tile.

It serves where the bracket missed, or where so many scores tie that no list would hold them.
"""

import triton
import triton.language as tl

from .address_table import OUT, is_live
from .cut_state import BASE, DIGIT, DIGITS, FOUND, NEED, NOT_FINITE, NUM_ABOVE, SHIFT, SPAN
from .scores import find_tile, is_strange, packed, scores_of, sortable


@triton.jit
def count_kernel(
    table, constants, num_tensors, num_tiles, state, counts,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts by digit of the keys from base to base + span, and of those above."""
    base, span = tl.load(state + BASE), tl.load(state + SPAN)
    lo, hi = base.to(tl.int32), tl.minimum(base + span, 0x7FFFFFFF).to(tl.int32)
    shift = tl.load(state + SHIFT).to(tl.uint32)
    digits, above = tl.zeros((DIGITS,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tensor, _row, first, left, live, read = find_tile(table, constants, num_tensors, tile, DEPTH, TILE)
        for start in range(0, TILE, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            valid = is_live(live, first + lane, lane < left)
            s = scores_of(read, first, lane, lane < left, FULL, False, NAME, WT, MT, VT, ALIGN)
            key = sortable(s)
            offset = (key.to(tl.uint32, bitcast=True) - lo.to(tl.uint32, bitcast=True)) >> shift
            inside = valid & (key >= lo) & (key <= hi)
            digits += tl.histogram(offset.to(tl.int32) & (DIGITS - 1), DIGITS, mask=inside)
            above += (valid & (key > hi)).to(tl.int32)
            tl.store(state + NOT_FINITE + lane * 0, tensor + 1, mask=valid & is_strange(s))
    tl.atomic_add(counts + tl.arange(0, DIGITS), digits.to(tl.int64), sem="relaxed")
    tl.atomic_add(state + NUM_ABOVE, tl.sum(above).to(tl.int64))


@triton.jit
def pick_kernel(state, counts, num_live, num_drop, IS_FIRST: tl.constexpr):
    """The digit that holds the cut; the range is narrowed to it."""
    up_to = tl.cumsum(tl.load(counts + tl.arange(0, DIGITS)))
    need = tl.load(state + NEED)
    if IS_FIRST:
        num_inside = tl.max(up_to)
        need = num_drop - (num_live - num_inside - tl.load(state + NUM_ABOVE))
        tl.store(state + FOUND, ((need > 0) & (need <= num_inside)).to(tl.int64))
    shift = tl.load(state + SHIFT)
    tl.store(state + BASE, tl.load(state + BASE) + (tl.sum((up_to < need).to(tl.int64)) << shift))
    tl.store(state + NEED, need - tl.max(tl.where(up_to < need, up_to, 0)))
    tl.store(state + SPAN, (tl.full((), 1, tl.int64) << shift) - 1)
    tl.store(state + SHIFT, tl.maximum(shift - DIGIT, 0))


@triton.jit
def tally_kernel(
    table, constants, num_tensors, num_tiles, state, tallies,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many live elements of each tile equal the threshold."""
    threshold = tl.load(state + BASE).to(tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _tensor, _row, first, left, live, read = find_tile(table, constants, num_tensors, tile, DEPTH, TILE)
        equal = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, TILE, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            valid = is_live(live, first + lane, lane < left)
            s = scores_of(read, first, lane, lane < left, FULL, False, NAME, WT, MT, VT, ALIGN)
            equal += (valid & (sortable(s) == threshold)).to(tl.int32)
        tl.store(tallies + tile, tl.sum(equal))


@triton.jit
def write_kernel(
    table, constants, num_tensors, num_tiles, masks, state, tallies, up_to,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of what lies above the threshold, and of what equals it but the first ``NEED`` in order."""
    threshold, need = tl.load(state + BASE).to(tl.int32), tl.load(state + NEED)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _tensor, row, first, left, live, read = find_tile(table, constants, num_tensors, tile, DEPTH, TILE)
        num_equal = tl.load(tallies + tile)
        drop = need - (tl.load(up_to + tile) - num_equal)  # of this tile's equal ones
        seen = tl.zeros((), tl.int32)
        for start in range(0, TILE, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            valid = is_live(live, first + lane, lane < left)
            s = scores_of(read, first, lane, lane < left, FULL, False, NAME, WT, MT, VT, ALIGN)
            key = sortable(s)
            equal = valid & (key == threshold)
            keep = valid & (key > threshold)
            if drop <= 0:
                keep = keep | equal
            elif drop < num_equal:
                keep = keep | (equal & (tl.cumsum(equal.to(tl.int32)) + seen > drop))
                seen += tl.sum(equal.to(tl.int32))
            byte = start // 8 + tl.arange(0, BLOCK // 8)
            tl.store(masks + tl.load(row + OUT) + first // 8 + byte, packed(keep, BLOCK), mask=byte * 8 < left)
