"""Kernels of the exact cut: bracket, one pass, finish, without a word to the host in between.

Scores are compared as sortable integers. ``state`` holds the few numbers that kernels hand on.
"""

import triton
import triton.language as tl

from .formula import evaluate, sortable, uniform
from .plan import COLUMNS, EXTRA, FIRST, LIVE, NUMEL, OUT, M, V, W, is_live, locate

BINS = tl.constexpr(1 << 16)  # of the sample's leading digit
FINE = tl.constexpr(1 << 12)  # of its next digit
BUCKETS = tl.constexpr(1 << 14)  # of the bracket
LIST = tl.constexpr(1024)  # elements of the bucket that holds the cut

# numbers in ``state``, int64
NUM_SAMPLED, LO, HI, SHIFT, BUCKET, NEED, NUM_LISTED, NUM_ABOVE, NUM_INSIDE, FOUND, NOT_FINITE, OVERFLOW = (
    tl.constexpr(i) for i in range(12)
)
STATE = 16


@triton.jit
def scores_at(table, constants, tensor, at, valid, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr):
    """Scores of elements ``at`` of one tensor; a type of None is a register that the formula does not read."""
    row = table + tensor * COLUMNS
    a, b = tl.load(constants + tensor * 4), tl.load(constants + tensor * 4 + 1)
    w, m, v = 0.0, 0.0, 0.0
    if NAME == "random":
        w = uniform(at, tl.load(row + EXTRA))
    elif WT is not None:
        w = tl.load(tl.load(row + W).to(tl.pointer_type(WT)) + at, mask=valid, other=0.0).to(tl.float32)
    if MT is not None:
        m = tl.load(tl.load(row + M).to(tl.pointer_type(MT)) + at, mask=valid, other=0.0).to(tl.float32)
        m = m * tl.load(constants + tensor * 4 + 2)
    if VT is not None:
        place = at % tl.load(row + EXTRA) if NAME == "wanda" else at
        v = tl.load(tl.load(row + V).to(tl.pointer_type(VT)) + place, mask=valid, other=0.0).to(tl.float32)
        v = v * tl.load(constants + tensor * 4 + 3)
    return evaluate(NAME, w, m, v, a, b)


@triton.jit
def sample_kernel(
    table, constants, num_tensors, num_tiles, sample, histogram, state,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):
    """Keys of ``LANES`` live elements of every tile, one at a random place of each stride, counted by leading digit."""
    lane = tl.arange(0, LANES).to(tl.int64)
    num = 0
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tensor = locate(table, num_tensors, tile, DEPTH)
        row = table + tensor * COLUMNS
        start = (tile - tl.load(row + FIRST)) * TILE
        jitter = tl.randint(1, (tile * LANES + lane).to(tl.int32)).to(tl.uint32) % (TILE // LANES)
        at = start + lane * (TILE // LANES) + jitter.to(tl.int64)
        live = is_live(tl.load(row + LIVE), at, at < tl.load(row + NUMEL))
        key = sortable(scores_at(table, constants, tensor, at, live, NAME, WT, MT, VT))
        tl.store(sample + tile * LANES + lane, tl.where(live, key, 0x7FFFFFFF))
        tl.atomic_add(histogram + (key >> 16) + BINS // 2, 1, mask=live)
        num += tl.sum(live.to(tl.int32))
    tl.atomic_add(state + NUM_SAMPLED, num.to(tl.int64))


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
    digit = (key >> 16) + BINS // 2
    next = (key >> 4) & (FINE - 1)
    for side in tl.static_range(2):
        tl.atomic_add(fine + side * FINE + next, 1, mask=(at < num) & (digit == tl.load(coarse + side * 2)))


@triton.jit
def bracket_kernel(coarse, fine, state):
    """The keys lo and hi, and the shift that spreads what lies between them over the buckets."""
    low_digit, high_digit = tl.load(coarse), tl.load(coarse + 2)
    low, _ = rank_in(fine, FINE, FINE, tl.load(coarse + 1))
    high, _ = rank_in(fine + FINE, FINE, FINE, tl.load(coarse + 3))
    lo = tl.where(low_digit < 0, -(1 << 31), (low_digit - BINS // 2) * 65536 + low.to(tl.int64) * 16)
    hi = tl.where(high_digit < 0, (1 << 31) - 1, (high_digit - BINS // 2) * 65536 + high.to(tl.int64) * 16 + 15)
    shift = 0
    for _ in range(32):
        shift += (((hi - lo) >> shift) >= BUCKETS).to(tl.int32)
    tl.store(state + LO, lo)
    tl.store(state + HI, hi)
    tl.store(state + SHIFT, shift.to(tl.int64))


@triton.jit
def sweep_kernel(
    table, constants, num_tensors, num_tiles, buckets, inside_keys, inside_places, counters, state, capacity,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):
    """The pass: bits of what lies above the bracket, and a list for each program of what lies in it."""
    program = tl.program_id(0).to(tl.int64)
    lo, hi = tl.load(state + LO).to(tl.int32), tl.load(state + HI).to(tl.int32)
    shift = tl.load(state + SHIFT)
    num_above = 0
    turn = 0
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tensor = locate(table, num_tensors, tile, DEPTH)
        row = table + tensor * COLUMNS
        first = (tile - tl.load(row + FIRST)) * TILE
        numel, live = tl.load(row + NUMEL), tl.load(row + LIVE)
        out = tl.load(row + OUT).to(tl.pointer_type(tl.uint8))
        for start in range(0, TILE, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            at = first + lane
            valid = at < numel
            s = scores_at(table, constants, tensor, at, valid, NAME, WT, MT, VT)
            key = sortable(s)
            over = tl.reshape((valid & (key > hi)).to(tl.int32), (BLOCK // 8, 8))
            bits = tl.sum(over << tl.arange(0, 8)[None, :], axis=1)
            byte = first // 8 + start // 8 + tl.arange(0, BLOCK // 8)
            real = byte * 8 < numel
            bits &= tl.load(live.to(tl.pointer_type(tl.uint8)) + byte, mask=real & (byte * 0 + live != 0), other=255).to(tl.int32)
            tl.store(out + byte, bits.to(tl.uint8), mask=real)
            num_above += tl.sum(ones_in(bits))

            inside = is_live(live, at, valid & (key >= lo) & (key <= hi))
            offset = key.to(tl.int64) - lo.to(tl.int64)
            slot = tl.atomic_add(counters + program + lane * 0, 1, mask=inside)
            fits = inside & (slot < capacity)
            tl.store(inside_keys + program * capacity + slot, offset.to(tl.int32), mask=fits)
            tl.store(inside_places + program * capacity + slot, turn + lane, mask=fits)
            tl.atomic_add(buckets + (offset >> shift), 1, mask=inside)
            strange = is_live(live, at, valid & ((s != s) | (tl.abs(s) == float("inf"))))
            tl.store(state + NOT_FINITE + lane * 0, tensor + 1, mask=strange)
        turn += TILE
    tl.atomic_add(state + NUM_ABOVE, num_above.to(tl.int64))


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
    table, num_tensors, inside_keys, inside_places, counters, state, listed_keys, listed_orders,
    capacity, num_programs, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
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
        set_bits(table, num_tensors, tile, place % TILE, valid & (here > bucket), DEPTH, TILE)
        mine = valid & (here == bucket)
        slot = tl.atomic_add(state + NUM_LISTED + at * 0, 1, mask=mine)
        fits = mine & (slot < LIST)
        tl.store(listed_keys + slot, offset, mask=fits)
        tl.store(listed_orders + slot, tile * TILE + place % TILE, mask=fits)


@triton.jit
def set_bits(table, num_tensors, tile, lane, wanted, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """Set the bit of one element of each tile, atomically in words of 32 bits."""
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    at = (tile - tl.load(row + FIRST)) * TILE + lane
    word = tl.load(row + OUT).to(tl.pointer_type(tl.int32)) + at // 32
    tl.atomic_or(word, (1 << (at % 32)).to(tl.int32), mask=wanted)


@triton.jit
def finish_kernel(table, num_tensors, listed_keys, listed_orders, state, DEPTH: tl.constexpr, TILE: tl.constexpr):
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
    set_bits(table, num_tensors, order // TILE, order % TILE, wanted, DEPTH, TILE)
