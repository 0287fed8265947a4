"""Kernels of the exact cut: bracket, one pass, finish, without a word to the host in between.

``state`` holds the few numbers that kernels hand on. The pass compares scores as they are; where
they are ranked, they are integers in the same order (``sortable``).
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

# ``counts``, int32: the histogram of leading digits, two of fine digits, the buckets, a counter for each program
FINE_AT, BUCKETS_AT = tl.constexpr(1 << 14), tl.constexpr((1 << 14) + (2 << 12))
COUNTERS_AT = tl.constexpr((2 << 14) + (2 << 12))

MARGIN = tl.constexpr(32)  # keys by which the pass sees the bracket wider: more than its roots can be off

# numbers in ``state``, int64
LO, HI, BASE, SHIFT, SURE_FROM, SURE_TO, BUCKET, NEED, NUM_LISTED, NUM_ABOVE, FOUND, NOT_FINITE, OVERFLOW = (
    tl.constexpr(i) for i in range(13)
)
COARSE = tl.constexpr(16)  # two leading digits, each with a rank in it
KEYS_AT, ORDERS_AT = tl.constexpr(20), tl.constexpr(20 + 1024)  # the last bucket's elements
STATE = 20 + 2 * 1024


@triton.jit
def scores_of(
    row, numbers, first, lane, valid, FULL: tl.constexpr, FAST: tl.constexpr, NAME: tl.constexpr,
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
    return evaluate(NAME, FAST, w, m, v, tl.load(numbers), tl.load(numbers + 1))


@triton.jit
def sample_kernel(
    table, constants, num_tensors, num_tiles, sample, counts,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys of ``LANES`` live elements of every tile, one at a random place of each stride, counted by leading digit."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    place = tile * LANES + lane
    known = (tile < num_tiles) & (lane >= 0)
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    jitter = tl.randint(1, place).to(tl.uint32) % (TILE // LANES)
    at = (tile - tl.load(row + FIRST)) * TILE + lane * (TILE // LANES) + jitter.to(tl.int32)
    live = is_live(tl.load(row + LIVE), at, known & (at < tl.load(row + NUMEL)))
    key = sortable(scores_of(row, constants + tensor * 4, at, 0, live, False, False, NAME, WT, MT, VT, 1))
    tl.store(sample + place, tl.where(live, key, 0x7FFFFFFF), mask=known)
    tl.atomic_add(counts + slot_of((key >> COARSE_SHIFT) + BINS // 2, BINS), 1, mask=live, sem="relaxed")


@triton.jit
def slot_of(bin, NUM: tl.constexpr):
    """Where a bin is counted: neighbours stand 32 bytes apart, since atomics on one sector wait for each other."""
    return (bin % (NUM // 8)) * 8 + bin // (NUM // 8)


@triton.jit
def rank_in(counts, NUM: tl.constexpr, CHUNK: tl.constexpr, rank):
    """Bin of the element of 0-based ``rank``, and how many stand in the bins before it."""
    bin, before, carry = 0, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, NUM, CHUNK):
        up_to = tl.cumsum(tl.load(counts + slot_of(start + tl.arange(0, CHUNK), NUM)).to(tl.int64)) + carry
        bin += tl.sum((up_to <= rank).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(up_to <= rank, up_to, 0)))
        carry = tl.max(up_to)
    return bin, before


@triton.jit
def total_of(counts, NUM: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, NUM, CHUNK):
        total += tl.sum(tl.load(counts + start + tl.arange(0, CHUNK)).to(tl.int64))
    return total


@triton.jit
def coarse_kernel(counts, state, share, sigmas, CHUNK: tl.constexpr):
    """Leading digits of the two keys that enclose the cut, and their ranks within these digits.

    Program 0 finds the lower one, program 1 the upper one; a rank outside the sample is digit -1.
    """
    side = tl.program_id(0)
    num = total_of(counts, BINS, CHUNK)
    slack = sigmas * tl.sqrt(num.to(tl.float32) * share * (1 - share)) + 1
    centre = share * num.to(tl.float32)
    rank = tl.where(side == 0, tl.floor(centre - slack), tl.ceil(centre + slack)).to(tl.int64)
    digit, before = rank_in(counts, BINS, CHUNK, rank)
    outside = (rank < 0) | (rank >= num)
    tl.store(state + COARSE + side * 2, tl.where(outside, -1, digit))
    tl.store(state + COARSE + side * 2 + 1, rank - before)


@triton.jit
def fine_kernel(sample, num, state, counts, BLOCK: tl.constexpr):
    """Counts of the next digit among the sampled keys that begin with either leading digit."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(sample + at, mask=at < num, other=0x7FFFFFFF)
    digit = (key >> COARSE_SHIFT) + BINS // 2
    next = (key >> FINE_SHIFT) & (FINE - 1)
    for side in tl.static_range(2):
        here = (at < num) & (digit == tl.load(state + COARSE + side * 2))
        tl.atomic_add(counts + FINE_AT + side * FINE + slot_of(next, FINE), 1, mask=here, sem="relaxed")


@triton.jit
def bracket_kernel(state, counts):
    """The scores lo and hi, and the shift that spreads what lies between them over the buckets."""
    low_digit, high_digit = tl.load(state + COARSE), tl.load(state + COARSE + 2)
    low, _ = rank_in(counts + FINE_AT, FINE, FINE, tl.load(state + COARSE + 1))
    high, _ = rank_in(counts + FINE_AT + FINE, FINE, FINE, tl.load(state + COARSE + 3))
    low_key = ((low_digit - BINS // 2) << COARSE_SHIFT) + (low.to(tl.int64) << FINE_SHIFT)
    high_key = ((high_digit - BINS // 2) << COARSE_SHIFT) + ((high.to(tl.int64) + 1) << FINE_SHIFT) - 1
    infinity = 0x7F800000
    lo = tl.where(low_digit < 0, -infinity - 1, tl.maximum(low_key, -infinity - 1))  # the key of -infinity at the least
    hi = tl.where(high_digit < 0, infinity, tl.minimum(high_key, infinity))
    base = lo - 2 * MARGIN
    span = hi + 2 * MARGIN - base
    shift = tl.zeros((), tl.int64)
    for _ in range(32):
        shift += ((span >> shift) >= BUCKETS).to(tl.int64)
    tl.store(state + LO, lo)
    tl.store(state + HI, hi)
    tl.store(state + BASE, base)
    tl.store(state + SHIFT, shift)
    # the cut is certain in buckets that lie wholly between lo and hi; open ends are certain too
    tl.store(state + SURE_FROM, tl.where(low_digit < 0, 0, ((2 * MARGIN) >> shift) + 1))
    tl.store(state + SURE_TO, tl.where(high_digit < 0, BUCKETS, ((span - 2 * MARGIN) >> shift)))


@triton.jit
def edge(state, margin):
    """A score of the bracket from its key, moved outwards by ``margin`` of the numbers that float32 has."""
    key = tl.minimum(tl.maximum(tl.load(state) + margin, -0x7F800001), 0x7F800000).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sweep_block(
    row, numbers, first, start, left, live, turn, lo, hi, tensor, masks, list_at, counter, state, capacity,
    FULL: tl.constexpr, FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a tile: writes its bits, lists the bytes with anything inside, returns the set bits of each byte."""
    lane = start + tl.arange(0, BLOCK)
    valid = lane < left
    s = scores_of(row, numbers, first, lane, valid, FULL, FAST, NAME, WT, MT, VT, ALIGN)
    over, least, strange = s > hi, s >= lo, (tl.abs(s) < float("inf")) == 0
    if not FULL:
        over, least, strange = over & valid, least & valid, strange & valid
    # three bits an element, side by side in the three bytes of a word for each eight elements
    flags = over.to(tl.int32) + least.to(tl.int32) * 256 + strange.to(tl.int32) * 65536
    words = tl.sum(tl.reshape(flags, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
    byte = start // 8 + tl.arange(0, BLOCK // 8)
    real = byte * 8 < left
    if live != 0:
        alive = tl.load(live.to(tl.pointer_type(tl.uint8)) + first // 8 + byte, mask=real, other=0).to(tl.int32)
        words &= alive * 0x010101
    bits = words & 255
    inside = ((words >> 8) & 255) ^ bits
    tl.store(masks + tl.load(row + OUT) + first // 8 + byte, bits.to(tl.uint8), mask=real)
    slot = tl.atomic_add(counter + byte * 0, 1, mask=inside != 0, sem="relaxed")
    tl.store(list_at + slot, ((turn + byte) << 8) | inside, mask=(inside != 0) & (slot < capacity))
    tl.store(state + NOT_FINITE + byte * 0, tensor + 1, mask=(words >> 16) != 0)
    return ones_in(bits)


@triton.jit
def sweep_kernel(
    table, constants, num_tensors, num_tiles, masks, listed, counts, state, capacity,
    FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The pass: bits of what lies above the bracket, and for each program a list of bytes with what lies in it."""
    program = tl.program_id(0).to(tl.int64)
    lo, hi = edge(state + LO, -MARGIN), edge(state + HI, MARGIN)
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
                    row, numbers, first, start, left, live, turn, lo, hi, tensor, masks, listed + program * capacity,
                    counts + COUNTERS_AT + program, state, capacity, True, FAST, NAME, WT, MT, VT, ALIGN, BLOCK,
                )  # fmt: skip
        else:
            for start in range(0, TILE, BLOCK):
                num_above += sweep_block(
                    row, numbers, first, start, left, live, turn, lo, hi, tensor, masks, listed + program * capacity,
                    counts + COUNTERS_AT + program, state, capacity, False, FAST, NAME, WT, MT, VT, ALIGN, BLOCK,
                )  # fmt: skip
        turn += TILE // 8
    tl.atomic_add(state + NUM_ABOVE, tl.sum(num_above).to(tl.int64))


@triton.jit
def ones_in(byte):
    """Number of set bits of each byte."""
    pairs = byte - ((byte >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def expand(
    table,
    num_tensors,
    listed,
    start,
    num,
    program,
    num_programs,
    DEPTH: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """What entries of a list stand for: bits inside, tensor's row and number, tile, its first element, byte in it."""
    at = start + tl.arange(0, BYTES)
    entry = tl.load(listed + at, mask=at < num, other=0)
    byte = (entry >> 8) & 0xFFFFFF
    tile = program + (byte // (TILE // 8)) * num_programs
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    return entry & 255, row, tensor, tile, (tile - tl.load(row + FIRST)) * TILE, (byte % (TILE // 8)) * 8


@triton.jit
def lowest(bits):
    """Place of the lowest set bit of each byte."""
    return ones_in((bits & -bits) - 1)


@triton.jit
def spread_kernel(
    table, constants, num_tensors, listed, keys, state, counts, capacity, num_programs, NAME: tl.constexpr,
    WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, DEPTH: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts of what lies inside the bracket by bucket, and the key of the first element of each entry."""
    program = tl.program_id(0)
    num, shift = tl.minimum(tl.load(counts + COUNTERS_AT + program), capacity), tl.load(state + SHIFT)
    listed += program.to(tl.int64) * capacity
    keys += program.to(tl.int64) * capacity
    base = tl.load(state + BASE)
    for start in range(tl.program_id(1) * BYTES, num, tl.num_programs(1) * BYTES):
        left, row, tensor, _, first, byte = expand(
            table, num_tensors, listed, start, num, program, num_programs, DEPTH, BYTES, TILE
        )
        at = start + tl.arange(0, BYTES)
        is_first = left >= 0
        while tl.max(left) > 0:
            s = scores_of(
                row, constants + tensor * 4, first, byte + lowest(left), left != 0, False, False, NAME, WT, MT, VT, 1
            )
            offset = sortable(s).to(tl.int64) - base
            tl.store(
                keys + at, (offset & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), mask=(left != 0) & is_first
            )
            bucket = slot_of((offset >> shift).to(tl.int32), BUCKETS)
            tl.atomic_add(counts + BUCKETS_AT + bucket, 1, mask=left != 0, sem="relaxed")
            left = left & (left - 1)
            is_first = left < 0


@triton.jit
def decide_kernel(counts, num_programs, capacity, state, num_live, num_drop, CHUNK: tl.constexpr):
    """Which bucket the cut falls into and how many of it are dropped, or that the bracket missed."""
    largest = tl.zeros((), tl.int32)
    for start in range(0, num_programs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.max(tl.load(counts + COUNTERS_AT + at, mask=at < num_programs, other=0)))
    num_inside = total_of(counts + BUCKETS_AT, BUCKETS, CHUNK)
    need = num_drop - (num_live - num_inside - tl.load(state + NUM_ABOVE))
    bucket, before = rank_in(counts + BUCKETS_AT, BUCKETS, CHUNK, need - 1)
    tl.store(state + BUCKET, bucket.to(tl.int64))
    tl.store(state + NEED, need - before)
    sure = (bucket >= tl.load(state + SURE_FROM)) & (bucket < tl.load(state + SURE_TO))
    tl.store(state + FOUND, ((need > 0) & (need <= num_inside) & (largest <= capacity) & sure).to(tl.int64))


@triton.jit
def settle_kernel(
    table, constants, num_tensors, masks, listed, keys, state, counts, capacity, num_programs,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set the bits of the buckets above the cut's, and list what its own bucket holds."""
    program = tl.program_id(0)
    num = tl.where(tl.load(state + FOUND) != 0, tl.load(counts + COUNTERS_AT + program), 0)
    bucket, shift, base = tl.load(state + BUCKET), tl.load(state + SHIFT), tl.load(state + BASE)
    listed += program.to(tl.int64) * capacity
    keys += program.to(tl.int64) * capacity
    for start in range(tl.program_id(1) * BYTES, num, tl.num_programs(1) * BYTES):
        left, row, tensor, tile, first, byte = expand(
            table, num_tensors, listed, start, num, program, num_programs, DEPTH, BYTES, TILE
        )
        at = start + tl.arange(0, BYTES)
        offset = tl.load(keys + at, mask=left != 0, other=0).to(tl.int64) & 0xFFFFFFFF
        while tl.max(left) > 0:
            place = byte + lowest(left)
            set_bits(row, masks, first + place, (left != 0) & ((offset >> shift) > bucket))
            mine = (left != 0) & ((offset >> shift) == bucket)
            slot = tl.atomic_add(state + NUM_LISTED + place * 0, 1, mask=mine)
            tl.store(state + KEYS_AT + slot, offset, mask=mine & (slot < LIST))
            tl.store(state + ORDERS_AT + slot, tile.to(tl.int64) * TILE + place, mask=mine & (slot < LIST))
            left = left & (left - 1)
            if tl.max(left) > 0:  # a second element of a byte is rare: its key was not kept
                s = scores_of(
                    row,
                    constants + tensor * 4,
                    first,
                    byte + lowest(left),
                    left != 0,
                    False,
                    False,
                    NAME,
                    WT,
                    MT,
                    VT,
                    1,
                )
                offset = sortable(s).to(tl.int64) - base


@triton.jit
def set_bits(row, masks, at, wanted):
    """Set the bits of elements ``at`` of the tensors in ``row``, atomically in words of 32 bits."""
    word = (masks + tl.load(row + OUT)).to(tl.pointer_type(tl.int32), bitcast=True) + at // 32
    tl.atomic_or(word, (1 << (at % 32)).to(tl.int32), mask=wanted, sem="relaxed")


@triton.jit
def finish_kernel(table, num_tensors, masks, state, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """Drop the smallest of the bucket's elements, the first of equal ones first, and set the bits of the others."""
    num = tl.load(state + NUM_LISTED)
    overflow = num > LIST
    tl.store(state + OVERFLOW, overflow.to(tl.int64))
    num = tl.where((tl.load(state + FOUND) == 0) | overflow, 0, num)
    at = tl.arange(0, LIST)
    valid = at < num
    key = tl.load(state + KEYS_AT + at, mask=valid, other=0)
    order = tl.load(state + ORDERS_AT + at, mask=valid, other=0)
    rank = tl.zeros((LIST,), tl.int32)
    for j in range(num):
        other, other_order = tl.load(state + KEYS_AT + j), tl.load(state + ORDERS_AT + j)
        rank += ((other < key) | ((other == key) & (other_order < order))).to(tl.int32)
    row = table + locate(table, num_tensors, order // TILE, DEPTH) * COLUMNS
    set_bits(row, masks, order - tl.load(row + FIRST) * TILE, valid & (rank >= tl.load(state + NEED)))
