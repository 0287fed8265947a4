"""Kernels of the exact cut: bracket, one pass, finish, without a word to the host in between.

Scores are compared as sortable integers. ``state`` holds the few numbers that kernels hand on.
"""

import triton
import triton.language as tl

from .formula import evaluate, sortable, uniform
from .plan import COLUMNS, EXTRA, FIRST, LIVE, NUMEL, OUT, M, V, W, is_live, load, locate, typed

BINS = tl.constexpr(1 << 14)  # of the sample's leading digit
FINE = tl.constexpr(1 << 12)  # of its next digit
COARSE_SHIFT, FINE_SHIFT = tl.constexpr(18), tl.constexpr(6)
BUCKETS = tl.constexpr(1 << 14)  # of the bracket
LIST = tl.constexpr(1024)  # elements of the bucket that holds the cut

# numbers in ``state``, int64
NUM_SAMPLED, LO, HI, SHIFT, BUCKET, NEED, NUM_LISTED, NUM_ABOVE, NUM_INSIDE, FOUND, NOT_FINITE, OVERFLOW = (
    tl.constexpr(i) for i in range(12)
)
STATE = 16


@triton.jit
def scores_of(
    row, numbers, first, lane, valid, FULL: tl.constexpr, NAME: tl.constexpr,
    WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Scores of the elements ``first + lane`` of one tensor; a type of None is a register that is not read."""
    w, m, v = 0.0, 0.0, 0.0
    if NAME == "random":
        w = uniform(first + lane, tl.load(row + EXTRA))
    elif WT is not None:
        w = load(typed(tl.load(row + W), WT, ALIGN) + first + lane, valid, FULL)
    if MT is not None:
        m = load(typed(tl.load(row + M), MT, ALIGN) + first + lane, valid, FULL) * tl.load(numbers + 2)
    if NAME == "wanda":
        v = load(tl.load(row + V).to(tl.pointer_type(VT)) + (first + lane) % tl.load(row + EXTRA), valid, FULL)
    elif VT is not None:
        v = load(typed(tl.load(row + V), VT, ALIGN) + first + lane, valid, FULL) * tl.load(numbers + 3)
    return evaluate(NAME, w, m, v, tl.load(numbers), tl.load(numbers + 1))


@triton.jit
def sample_kernel(
    table, constants, num_tensors, sample, histogram, state,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys of ``LANES`` live elements of a tile, one at a random place of each stride, counted by leading digit."""
    tile = tl.program_id(0)
    lane = tl.arange(0, LANES)
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    first = (tile - tl.load(row + FIRST)) * TILE
    jitter = tl.randint(1, tile * LANES + lane).to(tl.uint32) % (TILE // LANES)
    at = lane * (TILE // LANES) + jitter.to(tl.int32)
    live = is_live(tl.load(row + LIVE), first + at, first + at < tl.load(row + NUMEL))
    key = sortable(scores_of(row, constants + tensor * 4, first, at, live, False, NAME, WT, MT, VT, 1))
    tl.store(sample + tile.to(tl.int64) * LANES + lane, tl.where(live, key, 0x7FFFFFFF))
    tl.atomic_add(histogram + (key >> COARSE_SHIFT) + BINS // 2, 1, mask=live)
    tl.atomic_add(state + NUM_SAMPLED, tl.sum(live.to(tl.int64)))


@triton.jit
def rank_in(counts, NUM: tl.constexpr, CHUNK: tl.constexpr, rank):
    """Bin of the element of 0-based ``rank``, and how many stand in the bins before it."""
    bin, before, carry = 0, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, NUM, CHUNK):
        up_to = tl.cumsum(tl.load(counts + start + tl.arange(0, CHUNK)).to(tl.int64)) + carry
        bin += tl.sum((up_to <= rank).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(up_to <= rank, up_to, 0)))
        carry = tl.max(up_to)
    return bin, before


@triton.jit
def coarse_kernel(histogram, state, coarse, share, sigmas, CHUNK: tl.constexpr):
    """Leading digits of the two keys that enclose the cut, and their ranks within these digits.

    Program 0 finds the lower one, program 1 the upper one; a rank outside the sample is digit -1.
    """
    side = tl.program_id(0)
    num = tl.load(state + NUM_SAMPLED)
    slack = sigmas * tl.sqrt(num.to(tl.float32) * share * (1 - share)) + 1
    centre = share * num.to(tl.float32)
    rank = tl.where(side == 0, tl.floor(centre - slack), tl.ceil(centre + slack)).to(tl.int64)
    digit, before = rank_in(histogram, BINS, CHUNK, rank)
    outside = (rank < 0) | (rank >= num)
    tl.store(coarse + side * 2, tl.where(outside, -1, digit))
    tl.store(coarse + side * 2 + 1, rank - before)


@triton.jit
def fine_kernel(sample, num, coarse, fine, BLOCK: tl.constexpr):
    """Counts of the next digit among the sampled keys that begin with either leading digit."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(sample + at, mask=at < num, other=0x7FFFFFFF)
    digit = (key >> COARSE_SHIFT) + BINS // 2
    next = (key >> FINE_SHIFT) & (FINE - 1)
    for side in tl.static_range(2):
        tl.atomic_add(fine + side * FINE + next, 1, mask=(at < num) & (digit == tl.load(coarse + side * 2)))


@triton.jit
def bracket_kernel(coarse, fine, state):
    """The keys lo and hi, and the shift that spreads what lies between them over the buckets."""
    low_digit, high_digit = tl.load(coarse), tl.load(coarse + 2)
    low, _ = rank_in(fine, FINE, FINE, tl.load(coarse + 1))
    high, _ = rank_in(fine + FINE, FINE, FINE, tl.load(coarse + 3))
    low_key = ((low_digit - BINS // 2) << COARSE_SHIFT) + (low.to(tl.int64) << FINE_SHIFT)
    high_key = ((high_digit - BINS // 2) << COARSE_SHIFT) + ((high.to(tl.int64) + 1) << FINE_SHIFT) - 1
    lo = tl.where(low_digit < 0, -(1 << 31), low_key)
    hi = tl.where(high_digit < 0, (1 << 31) - 1, high_key)
    shift = 0
    for _ in range(32):
        shift += (((hi - lo) >> shift) >= BUCKETS).to(tl.int32)
    tl.store(state + LO, lo)
    tl.store(state + HI, hi)
    tl.store(state + SHIFT, shift.to(tl.int64))


@triton.jit
def sweep_block(
    row, numbers, first, start, left, live, turn, program, lo, hi, shift, tensor,
    masks, buckets, inside_keys, inside_places, counters, state, capacity, FULL: tl.constexpr, NAME: tl.constexpr,
    WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a tile: writes its bits, lists what lies inside, returns how many bits are set in each byte."""
    lane = start + tl.arange(0, BLOCK)
    valid = lane < left
    s = scores_of(row, numbers, first, lane, valid, FULL, NAME, WT, MT, VT, ALIGN)
    key = sortable(s)
    over, inside = key > hi, (key >= lo) & (key <= hi)
    strange = (s != s) | (tl.abs(s) == float("inf"))
    if not FULL:
        over, inside, strange = over & valid, inside & valid, strange & valid
    bits = tl.sum(tl.reshape(over.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
    byte = start // 8 + tl.arange(0, BLOCK // 8)
    real = byte * 8 < left
    out = masks + tl.load(row + OUT) + first // 8
    if live != 0:
        bits &= tl.load(live.to(tl.pointer_type(tl.uint8)) + first // 8 + byte, mask=real, other=0).to(tl.int32)
        inside = is_live(live, first + lane, inside)
        strange = is_live(live, first + lane, strange)
    tl.store(out + byte, bits.to(tl.uint8), mask=real)

    slot = tl.atomic_add(counters + program + lane * 0, 1, mask=inside)
    fits = inside & (slot < capacity)
    offset = (key - lo).to(tl.uint32, bitcast=True)
    tl.store(inside_keys + program * capacity + slot, offset.to(tl.int32, bitcast=True), mask=fits)
    tl.store(inside_places + program * capacity + slot, turn + lane, mask=fits)
    tl.atomic_add(buckets + (offset >> shift), 1, mask=inside)
    tl.store(state + NOT_FINITE + lane * 0, tensor + 1, mask=strange)
    return ones_in(bits)


@triton.jit
def sweep_kernel(
    table, constants, num_tensors, num_tiles, masks, buckets, inside_keys, inside_places, counters, state, capacity,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The pass: bits of what lies above the bracket, and a list for each program of what lies in it."""
    program = tl.program_id(0).to(tl.int64)
    lo, hi = tl.load(state + LO).to(tl.int32), tl.load(state + HI).to(tl.int32)
    shift = tl.load(state + SHIFT).to(tl.uint32)
    num_above = tl.zeros((BLOCK // 8,), tl.int32)
    turn = 0
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tensor = locate(table, num_tensors, tile, DEPTH)
        row, numbers = table + tensor * COLUMNS, constants + tensor * 4
        first = (tile - tl.load(row + FIRST)) * TILE
        left, live = tl.load(row + NUMEL) - first, tl.load(row + LIVE)
        if left >= TILE:
            for start in range(0, TILE, BLOCK):
                num_above += sweep_block(
                    row, numbers, first, start, left, live, turn, program, lo, hi, shift, tensor, masks, buckets,
                    inside_keys, inside_places, counters, state, capacity, True, NAME, WT, MT, VT, ALIGN, BLOCK,
                )  # fmt: skip
        else:
            for start in range(0, TILE, BLOCK):
                num_above += sweep_block(
                    row, numbers, first, start, left, live, turn, program, lo, hi, shift, tensor, masks, buckets,
                    inside_keys, inside_places, counters, state, capacity, False, NAME, WT, MT, VT, ALIGN, BLOCK,
                )  # fmt: skip
        turn += TILE
    tl.atomic_add(state + NUM_ABOVE, tl.sum(num_above).to(tl.int64))


@triton.jit
def ones_in(byte):
    """Number of set bits of each byte."""
    pairs = byte - ((byte >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def decide_kernel(buckets, counters, num_programs, capacity, state, num_live, num_drop, CHUNK: tl.constexpr):
    """Which bucket the cut falls into and how many of it are dropped, or that the bracket missed."""
    num_inside, largest = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num_programs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        counts = tl.load(counters + at, mask=at < num_programs, other=0).to(tl.int64)
        num_inside += tl.sum(counts)
        largest = tl.maximum(largest, tl.max(counts))
    num_below = num_live - num_inside - tl.load(state + NUM_ABOVE)
    need = num_drop - num_below
    found = (need >= 0) & (need <= num_inside) & (largest <= capacity)
    bucket, before = rank_in(buckets, BUCKETS, CHUNK, need - 1)
    tl.store(state + BUCKET, tl.where(need > 0, bucket, -1).to(tl.int64))
    tl.store(state + NEED, tl.where(need > 0, need - before, 0))
    tl.store(state + NUM_INSIDE, num_inside)
    tl.store(state + FOUND, found.to(tl.int64))


@triton.jit
def settle_kernel(
    table,
    num_tensors,
    masks,
    inside_keys,
    inside_places,
    counters,
    state,
    listed_keys,
    listed_orders,
    capacity,
    num_programs,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Set the bits of the buckets above the cut's, and list what its own bucket holds."""
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num = tl.where(tl.load(state + FOUND) != 0, tl.load(counters + program), 0)
    bucket, shift = tl.load(state + BUCKET), tl.load(state + SHIFT)
    for start in range(part * BLOCK, num, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < num
        offset = tl.load(inside_keys + program * capacity + at, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
        place = tl.load(inside_places + program * capacity + at, mask=valid, other=0)
        tile = program + (place // TILE).to(tl.int64) * num_programs
        here = offset >> shift
        set_bits(table, num_tensors, masks, tile, place % TILE, valid & (here > bucket), DEPTH, TILE)
        mine = valid & (here == bucket)
        slot = tl.atomic_add(state + NUM_LISTED + at * 0, 1, mask=mine)
        fits = mine & (slot < LIST)
        tl.store(listed_keys + slot, offset, mask=fits)
        tl.store(listed_orders + slot, tile * TILE + place % TILE, mask=fits)


@triton.jit
def set_bits(table, num_tensors, masks, tile, lane, wanted, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """Set the bit of one element of each tile, atomically in words of 32 bits."""
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    at = (tile - tl.load(row + FIRST)) * TILE + lane
    word = (masks + tl.load(row + OUT)).to(tl.pointer_type(tl.int32), bitcast=True) + at // 32
    tl.atomic_or(word, (1 << (at % 32)).to(tl.int32), mask=wanted)


@triton.jit
def finish_kernel(
    table, num_tensors, masks, listed_keys, listed_orders, state, DEPTH: tl.constexpr, TILE: tl.constexpr
):
    """Drop the smallest of the bucket's elements, the first of equal ones first, and set the bits of the others."""
    num = tl.load(state + NUM_LISTED)
    overflow = num > LIST
    tl.store(state + OVERFLOW, overflow.to(tl.int64))
    num = tl.where((tl.load(state + FOUND) == 0) | overflow, 0, num)
    at = tl.arange(0, LIST)
    valid = at < num
    key = tl.load(listed_keys + at, mask=valid, other=0)
    order = tl.load(listed_orders + at, mask=valid, other=0)
    rank = tl.zeros((LIST,), tl.int32)
    for j in range(0, num):
        other, other_order = tl.load(listed_keys + j), tl.load(listed_orders + j)
        rank += ((other < key) | ((other == key) & (other_order < order))).to(tl.int32)
    wanted = valid & (rank >= tl.load(state + NEED))
    set_bits(table, num_tensors, masks, order // TILE, order % TILE, wanted, DEPTH, TILE)
