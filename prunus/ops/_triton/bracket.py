"""Kernels that bracket the cut: order statistics of a sample, by counting two digits of its keys."""

import triton
import triton.language as tl

from . import cut_state as cs
from .address_table import COLUMNS, FIRST, LIVE, NUMEL, is_live, locate
from .scores import read_by, scores_of, sortable

CLUSTER = tl.constexpr(8)  # neighbours that are sampled together: a read from memory brings them all


@triton.jit(do_not_specialize=["num_tensors", "num_tiles"])
def sample_kernel(
    table, constants, num_tensors, num_tiles, sample, counts,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, EACH: tl.constexpr, COPIES: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys of ``LANES`` live elements of every tile, clusters at random places of equal strides, and their digits."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    place = tile * LANES + lane
    known = (tile < num_tiles) & (lane >= 0)
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    jitter = tl.randint(1, place // CLUSTER).to(tl.uint32) % (TILE // LANES)
    inside = (lane // CLUSTER * (TILE // LANES) + jitter.to(tl.int32)) * CLUSTER + lane % CLUSTER
    at = (tile - tl.load(row + FIRST)) * TILE + inside
    live = is_live(tl.load(row + LIVE), at, known & (at < tl.load(row + NUMEL)))
    read = read_by(row, constants + tensor * 4)
    key = sortable(scores_of(read, at, 0, live, False, False, NAME, WT, MT, VT, 1))
    tl.store(sample + place, tl.where(live, key, 0x7FFFFFFF), mask=known)
    slot = cs.slot_of((key >> cs.COARSE_SHIFT) + cs.BINS // 2, cs.BINS)
    bins = cs.counts_of(counts, cs.group_of(tensor, EACH), COPIES) + cs.BINS_AT + (tl.program_id(0) % COPIES) * cs.BINS
    tl.atomic_add(bins + slot, 1, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["num_live", "num_drop"])
def coarse_kernel(
    counts, state, goals, num_live, num_drop, sigmas, EACH: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    """Leading digits of the two keys that enclose the cut, ranks within these digits, samples before them.

    Of each group program 0 finds the lower one, program 1 the upper one; a rank outside the sample is digit -1.
    """
    side, group = tl.program_id(0), tl.program_id(1)
    bins = cs.counts_of(counts, group, COPIES) + cs.BINS_AT
    state += group * cs.STATE
    num_live, num_drop, _ = cs.goal_of(goals, group, num_live, num_drop, 0, EACH)
    share = num_drop.to(tl.float32) / num_live.to(tl.float32)
    num = cs.total_of(bins, cs.BINS, COPIES)
    slack = sigmas * tl.sqrt(num.to(tl.float32) * share * (1 - share)) + 1
    centre = share * num.to(tl.float32)
    rank = tl.where(side == 0, tl.floor(centre - slack), tl.ceil(centre + slack)).to(tl.int32)
    digit, before = cs.rank_in(bins, cs.BINS, COPIES, rank)
    outside = (rank < 0) | (rank >= num)
    tl.store(state + cs.COARSE + side * 3, tl.where(outside, -1, digit))
    tl.store(state + cs.COARSE + side * 3 + 1, rank - before)
    tl.store(state + cs.COARSE + side * 3 + 2, before)
    tl.store(state + cs.NUM_SAMPLED, num.to(tl.int64))


@triton.jit(do_not_specialize=["num", "num_tensors"])
def fine_kernel(
    sample, num, table, num_tensors, state, counts,
    DEPTH: tl.constexpr, EACH: tl.constexpr, COPIES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts of the next digit among the sampled keys that begin with either leading digit."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = 0
    if EACH:
        group = locate(table, num_tensors, at // LANES, DEPTH)
    key = tl.load(sample + at, mask=at < num, other=0x7FFFFFFF)
    digit = (key >> cs.COARSE_SHIFT) + cs.BINS // 2
    next = (key >> cs.FINE_SHIFT) & (cs.FINE - 1)
    counts = cs.counts_of(counts, group, COPIES)
    for side in tl.static_range(2):
        here = (at < num) & (digit == tl.load(state + group * cs.STATE + cs.COARSE + side * 3))
        tl.atomic_add(counts + side * cs.FINE + cs.slot_of(next, cs.FINE), 1, mask=here, sem="relaxed")


@triton.jit(do_not_specialize=["num_live", "room"])
def bracket_kernel(state, counts, goals, num_live, room, EACH: tl.constexpr, COPIES: tl.constexpr):
    """The scores lo and hi, the shift that spreads what lies between them over the buckets, whether that is too much.

    ``room`` is how many elements the lists of the pass hold.
    """
    group = tl.program_id(0)
    num_live, _, room = cs.goal_of(goals, group, num_live, 0, room, EACH)
    state += group * cs.STATE
    counts = cs.counts_of(counts, group, COPIES)
    low_digit, high_digit = tl.load(state + cs.COARSE), tl.load(state + cs.COARSE + 3)
    low, before_low = cs.rank_in(counts, cs.FINE, 1, tl.load(state + cs.COARSE + 1).to(tl.int32))
    high, before_high = cs.rank_in(counts + cs.FINE, cs.FINE, 1, tl.load(state + cs.COARSE + 4).to(tl.int32))
    low_key = ((low_digit - cs.BINS // 2) << cs.COARSE_SHIFT) + (low.to(tl.int64) << cs.FINE_SHIFT)
    high_key = ((high_digit - cs.BINS // 2) << cs.COARSE_SHIFT) + ((high.to(tl.int64) + 1) << cs.FINE_SHIFT) - 1
    infinity = 0x7F800000
    lo = tl.where(low_digit < 0, -infinity - 1, tl.maximum(low_key, -infinity - 1))  # the key of -infinity at the least
    hi = tl.where(high_digit < 0, infinity, tl.minimum(high_key, infinity))
    base = lo - 2 * cs.MARGIN
    span = hi + 2 * cs.MARGIN - base
    shift = tl.zeros((), tl.int64)
    for _ in range(32):
        shift += ((span >> shift) >= cs.BUCKETS).to(tl.int64)
    tl.store(state + cs.LO, lo)
    tl.store(state + cs.HI, hi)
    tl.store(state + cs.BASE, base)
    tl.store(state + cs.SHIFT, shift)
    # the cut is certain in buckets that lie wholly between lo and hi; open ends are certain too
    tl.store(state + cs.SURE_FROM, tl.where(low_digit < 0, 0, (2 * cs.MARGIN - 1 >> shift) + 1))
    tl.store(state + cs.SURE_TO, tl.where(high_digit < 0, cs.BUCKETS, (span - 2 * cs.MARGIN + 1) >> shift))
    num = tl.load(state + cs.NUM_SAMPLED)
    below = tl.where(low_digit < 0, 0, tl.load(state + cs.COARSE + 2) + before_low)
    last = tl.load(counts + cs.FINE + cs.slot_of(tl.minimum(high, cs.FINE - 1), cs.FINE))
    up_to = tl.where(high_digit < 0, num, tl.load(state + cs.COARSE + 5) + before_high + last)
    expected = (up_to - below).to(tl.float64) / tl.maximum(num, 1).to(tl.float64) * num_live.to(tl.float64)
    tl.store(state + cs.CROWDED, (expected > room).to(tl.int64))
