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
from .cut_state import MARGIN
from .launch import launch
from .readable import readable
from .scores import find_tile, moved, packed, read_by, score_at, scores_of, sortable

LONGEST = 1 << 15  # inputs of a row that a program holds in registers
WIDEST = 16  # of a group
BLOCK = 1024
EACH_WARP, MOST_WARPS = 1024, 16  # elements of a row, and warps of a program
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def number_of(ones, BLOCK: tl.constexpr):
    """The sum of small whole numbers; a thread adds its own up as floats, which takes it half the instructions."""
    return tl.sum(tl.sum(tl.reshape(ones, (BLOCK // 8, 8)), axis=1).to(tl.int32))


@triton.jit
def number_below(s, edge, BLOCK: tl.constexpr):
    return number_of(tl.where(s < edge, 1.0, 0.0), BLOCK)


@triton.jit
def kth_smallest(s, lowest, highest, guess, num, total, BLOCK: tl.constexpr):
    """The ``num``-th smallest (from 1) of ``total`` scores, which lie from ``lowest`` to ``highest``.

    Each round counts the scores below a pivot. The first one is a guess; then it is where the threshold should lie by
    the counts at both ends of its range, and every fourth time the middle, so that no distribution takes long. A
    range where it must be the first or the last score is narrow enough. Ranges are of sortable integers.
    """
    lo, hi = sortable(lowest), sortable(highest) + 1
    below, up_to, turn = tl.zeros((), tl.int32), total, 0
    width = (hi - lo).to(tl.uint32, bitcast=True)
    step = (sortable(guess) - lo).to(tl.uint32, bitcast=True)
    while (num - below > 1) & (num < up_to) & (width > 1):
        pivot = lo + tl.minimum(tl.maximum(step, 1), width - 1).to(tl.int32, bitcast=True)
        count = number_below(s, score_at(pivot), BLOCK)
        is_low = count < num
        lo, below = tl.where(is_low, pivot, lo), tl.where(is_low, count, below)
        hi, up_to = tl.where(is_low, hi, pivot), tl.where(is_low, up_to, count)
        width = (hi - lo).to(tl.uint32, bitcast=True)
        share = ((num - below).to(tl.float32) - 0.5) / (up_to - below).to(tl.float32)
        turn += 1
        step = tl.where(turn % 4 == 3, width // 2, (width.to(tl.float32) * share).to(tl.uint32))
    if num - below == 1:
        threshold = tl.min(tl.where(s >= score_at(lo), s, INFINITY))
    else:
        threshold = tl.max(tl.where(s < score_at(hi), s, -INFINITY))
    return threshold


@triton.jit
def kept_of_row(
    read, first, lane, valid, live, num_inputs, num_drop,
    FULL: tl.constexpr, FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What is kept of a row, whether that is certain, and what is not 0 if a score is not finite.

    It is certain unless ``FAST`` roots, which are off by an ulp or two, leave open who is the last to go.
    """
    s = scores_of(read, first, lane, valid, FULL, FAST, NAME, WT, MT, VT, ALIGN)
    if not FULL:
        s = tl.where(valid, s, 0.0)
    num_live, total, highest = num_inputs, tl.sum(s), tl.max(s)
    strange = tl.sum(s * 0.0)
    if not FULL:
        s = tl.where(valid, s, INFINITY)
    if live != 0:
        bytes = tl.load(live.to(tl.pointer_type(tl.uint8)) + first // 8 + lane // 8, mask=valid, other=0).to(tl.int32)
        alive = ((bytes >> (lane % 8)) & 1) != 0
        num_live, total = tl.sum(alive.to(tl.int32)), tl.sum(tl.where(alive, s, 0.0))
        strange = tl.sum(tl.where(alive, s, 0.0) * 0.0)
        s = tl.where(alive, s, INFINITY)
        highest = tl.max(tl.where(alive, s, -INFINITY))
    keep, sure = s < INFINITY, num_live >= 0
    need = num_drop - (num_inputs - num_live)
    if (need > 0) & (strange == 0):
        # of the absolute values of normal numbers a share s lies below about 1.6 s times their mean
        guess = total * (1.6 * need.to(tl.float32) / num_live.to(tl.float32)) / num_live.to(tl.float32)
        guess = tl.minimum(tl.maximum(guess, tl.min(s)), highest)
        threshold = kth_smallest(s, tl.min(s), highest, guess, need, num_live, BLOCK)
        if FAST:
            low, high = moved(threshold, -MARGIN), moved(threshold, MARGIN)
            near = number_of(tl.where(s < high, 1.0, 0.0) - tl.where(s < low, 1.0, 0.0), BLOCK)
            sure, keep = near == 1, keep & (s > threshold)
        else:
            equal = s == threshold
            num_equal = need - number_below(s, threshold, BLOCK)  # of equal ones so many are dropped, the first ones
            keep = keep & (s > threshold)
            if num_equal < tl.sum(equal.to(tl.int32)):
                keep = keep | (equal & (tl.cumsum(equal.to(tl.int32)) > num_equal))
    return keep, sure, strange


@triton.jit(do_not_specialize=["num_tensors"])
def row_kernel(
    table, constants, num_tensors, goals, masks, strange,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, FAST: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
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
    read, live = read_by(row, constants + tensor * 4), tl.load(row + LIVE)
    keep, sure, odd = kept_of_row(
        read, first, lane, valid, live, num_inputs, num_drop, FULL, FAST, NAME, WT, MT, VT, ALIGN, BLOCK
    )
    if FAST:  # noqa: SIM102  (FAST is known when a kernel is compiled, the other is not)
        if (sure == 0) | (odd != 0):  # fast roots of very large numbers are not finite
            keep, sure, odd = kept_of_row(
                read, first, lane, valid, live, num_inputs, num_drop, FULL, False, NAME, WT, MT, VT, ALIGN, BLOCK
            )
    byte = tl.arange(0, BLOCK // 8)
    tl.store(masks + tl.load(row + OUT) + first // 8 + byte, packed(keep, BLOCK), mask=byte * 8 < num_inputs)
    if odd != 0:  # NaN, as infinity times zero is
        tl.store(strange + tensor, 1)


@triton.jit
def kept_of_four(s, num_drop, BLOCK: tl.constexpr):
    """Bytes of what is kept of groups of four, and whether the last to go and the first to stay are close.

    Of two, the earlier one goes first if it is no larger.
    """
    even, odd = tl.split(tl.reshape(s, (BLOCK // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    ab, ac, ad = (b >= a).to(tl.int32), (c >= a).to(tl.int32), (d >= a).to(tl.int32)
    bc, bd, cd = (c >= b).to(tl.int32), (d >= b).to(tl.int32), (d >= c).to(tl.int32)
    stays_a, stays_b = 3 - ab - ac - ad >= num_drop, ab + 2 - bc - bd >= num_drop
    stays_c, stays_d = ac + bc + 1 - cd >= num_drop, ad + bd + cd >= num_drop
    least = tl.minimum(least_of(stays_a, a, stays_b, b), least_of(stays_c, c, stays_d, d))
    most = -tl.minimum(least_of(~stays_a, -a, ~stays_b, -b), least_of(~stays_c, -c, ~stays_d, -d))
    bits = (stays_a & (a > -INFINITY)).to(tl.int32) | (stays_b & (b > -INFINITY)).to(tl.int32) << 1
    bits |= (stays_c & (c > -INFINITY)).to(tl.int32) << 2 | (stays_d & (d > -INFINITY)).to(tl.int32) << 3
    low, high = tl.split(tl.reshape(bits, (BLOCK // 8, 2)))
    return (low | high << 4).to(tl.uint8), are_close(most, least)


@triton.jit
def least_of(has_a, a, has_b, b):
    return tl.minimum(tl.where(has_a, a, INFINITY), tl.where(has_b, b, INFINITY))


@triton.jit
def are_close(most, least):
    """Whether what goes may be larger than what stays, by roots that are off by an ulp or two."""
    return (least <= moved(most, MARGIN)) & (most > -INFINITY)


@triton.jit
def kept_of_group(s, num_drop, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """``kept_of_four`` of groups of any size."""
    keys = tl.reshape(s, (BLOCK // GROUP, GROUP))
    place = tl.arange(0, GROUP)
    rank = tl.zeros((BLOCK // GROUP, GROUP), tl.int32)
    for j in tl.static_range(GROUP):  # who is smaller, or equal and stands before, is dropped before
        other = tl.min(tl.where(place[None, :] == j, keys, INFINITY), axis=1)[:, None]
        rank += ((other < keys) | ((other == keys) & (place[None, :] > j))).to(tl.int32)
    stays = rank >= num_drop
    least = tl.min(tl.where(stays, keys, INFINITY), axis=1)
    most = tl.max(tl.where(stays, -INFINITY, keys), axis=1)
    return packed(tl.reshape(stays & (keys > -INFINITY), (BLOCK,)), BLOCK), are_close(most, least)


@triton.jit
def write_groups(
    read, first, left, live, mask, num_drop,
    FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the bits of a tile; in how many groups they are not certain, and NaN if a score is not finite."""
    unsure, strange = tl.zeros((BLOCK // GROUP,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, TILE, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        s = scores_of(read, first, lane, lane < left, FULL, FAST, NAME, WT, MT, VT, ALIGN)
        real = s
        if not FULL:
            real, s = tl.where(lane < left, s, 0.0), tl.where(lane < left, s, -INFINITY)
        if live != 0:
            alive = is_live(live, first + lane, lane < left)
            real, s = tl.where(alive, s, 0.0), tl.where(alive, s, -INFINITY)
        strange += real * 0.0
        if GROUP == 4:
            bytes, close = kept_of_four(s, num_drop, BLOCK)
        else:
            bytes, close = kept_of_group(s, num_drop, GROUP, BLOCK)
        unsure += close.to(tl.int32)
        byte = start // 8 + tl.arange(0, BLOCK // 8)
        tl.store(mask + byte, bytes, mask=byte * 8 < left)
    return tl.sum(unsure), tl.sum(strange)


@triton.jit
def group_kernel(
    table, constants, num_tensors, masks, strange, num_drop,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, FAST: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Bits of a tile without the ``num_drop`` smallest of every ``GROUP`` elements."""
    tensor, row, first, left, live, read = find_tile(table, constants, num_tensors, tl.program_id(0), DEPTH, TILE)
    mask = masks + tl.load(row + OUT) + first // 8
    unsure, odd = write_groups(
        read, first, left, live, mask, num_drop, FAST, NAME, WT, MT, VT, ALIGN, FULL, GROUP, BLOCK, TILE
    )
    if FAST:  # noqa: SIM102
        if (unsure > 0) | (odd != 0):
            unsure, odd = write_groups(
                read, first, left, live, mask, num_drop, False, NAME, WT, MT, VT, ALIGN, FULL, GROUP, BLOCK, TILE
            )
    if odd != 0:  # NaN, as infinity times zero is
        tl.store(strange + tensor, 1)


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
        how = {**low.read, "ALIGN": t.align, "FULL": all(n == block for n in lengths[here])}
        how |= {"FAST": low.formulas[0].has_fast_roots, "DEPTH": t.depth, "BLOCK": block}
        how |= {"num_warps": max(1, min(MOST_WARPS, block // EACH_WARP))}
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
    shape = {"ALIGN": t.align, "FULL": t.is_full, "FAST": low.formulas[0].has_fast_roots, "DEPTH": t.depth}
    constants = {**low.read, **shape, "GROUP": group, "BLOCK": min(BLOCK, tile), "TILE": tile}
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
