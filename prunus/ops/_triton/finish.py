"""The finish: what lies inside the bracket, counted by buckets, and the cut's own bucket ranked."""

import triton
import triton.language as tl

from . import cut_state as cs
from .address_table import COLUMNS, FIRST, OUT, locate
from .scores import ones_in, read_by, scores_of, set_bits, sortable


@triton.jit
def expand(
    table, num_tensors, listed, start, num, program, num_programs,
    DEPTH: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["num_tensors", "capacity", "num_programs"])
def spread_kernel(
    table, constants, num_tensors, listed, keys, state, counts, counters, capacity, num_programs,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, EACH: tl.constexpr, COPIES: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts of what lies inside the bracket by bucket, and the key of the first element of each entry."""
    program = tl.program_id(0)
    num = tl.minimum(tl.load(counters + program), capacity)
    listed += program.to(tl.int64) * capacity
    keys += program.to(tl.int64) * capacity
    for start in range(tl.program_id(1) * BYTES, num, tl.num_programs(1) * BYTES):
        left, row, tensor, _, first, byte = expand(
            table, num_tensors, listed, start, num, program, num_programs, DEPTH, BYTES, TILE
        )
        group = cs.group_of(tensor, EACH)
        base, shift = tl.load(state + group * cs.STATE + cs.BASE), tl.load(state + group * cs.STATE + cs.SHIFT)
        buckets = cs.counts_of(counts, group, COPIES) + cs.BUCKETS_AT
        read = read_by(row, constants + tensor * 4)
        at = start + tl.arange(0, BYTES)
        is_first = left >= 0
        while tl.max(left) > 0:
            s = scores_of(read, first, byte + lowest(left), left != 0, False, False, NAME, WT, MT, VT, 1)
            offset = sortable(s).to(tl.int64) - base
            tl.store(
                keys + at, (offset & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), mask=(left != 0) & is_first
            )
            bucket = cs.slot_of((offset >> shift).to(tl.int32), cs.BUCKETS)
            tl.atomic_add(buckets + bucket, 1, mask=left != 0, sem="relaxed")
            left = left & (left - 1)
            is_first = left < 0


@triton.jit(do_not_specialize=["num_programs", "capacity", "num_live", "num_drop"])
def decide_kernel(
    counts, counters, num_programs, capacity, state, goals, num_live, num_drop,
    EACH: tl.constexpr, COPIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Which bucket holds the cut and how many of it are dropped; or that the bracket missed, or its lists are full."""
    group = tl.program_id(0)
    num_live, num_drop, _ = cs.goal_of(goals, group, num_live, num_drop, 0, EACH)
    state += group * cs.STATE
    buckets = cs.counts_of(counts, group, COPIES) + cs.BUCKETS_AT
    largest = tl.zeros((), tl.int32)
    for start in range(0, num_programs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.max(tl.load(counters + at, mask=at < num_programs, other=0)))
    crowded = (tl.load(state + cs.CROWDED) != 0) | (largest > capacity)
    num_inside = cs.total_of(buckets, cs.BUCKETS, 1).to(tl.int64)
    need = num_drop - (num_live - num_inside - tl.load(state + cs.NUM_ABOVE))
    holds = (need > 0) & (need <= num_inside) & (crowded == 0)
    bucket, before = cs.rank_in(buckets, cs.BUCKETS, 1, tl.where(holds, need - 1, 0).to(tl.int32))
    sure = (bucket >= tl.load(state + cs.SURE_FROM)) & (bucket < tl.load(state + cs.SURE_TO))
    tl.store(state + cs.BUCKET, bucket.to(tl.int64))
    tl.store(state + cs.NEED, need - before)
    tl.store(state + cs.CROWDED, crowded.to(tl.int64))
    tl.store(state + cs.FOUND, (holds & sure).to(tl.int64))


@triton.jit(do_not_specialize=["num_tensors", "room", "order_bits", "capacity", "num_programs"])
def split_kernel(
    table, constants, num_tensors, masks, own, room, order_bits,
    listed, keys, state, counters, capacity, num_programs,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, EACH: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set the bits of the buckets above the cut's, and list what its own bucket holds by key, then order."""
    program = tl.program_id(0)
    num = tl.minimum(tl.load(counters + program), capacity)
    if not EACH:
        num = tl.where(tl.load(state + cs.FOUND) != 0, num, 0)
    listed += program.to(tl.int64) * capacity
    keys += program.to(tl.int64) * capacity
    for start in range(tl.program_id(1) * BYTES, num, tl.num_programs(1) * BYTES):
        left, row, tensor, tile, first, byte = expand(
            table, num_tensors, listed, start, num, program, num_programs, DEPTH, BYTES, TILE
        )
        group = cs.group_of(tensor, EACH)
        of_group = state + group * cs.STATE
        if EACH:
            left = tl.where(tl.load(of_group + cs.FOUND) != 0, left, 0)
        bucket, shift, base = tl.load(of_group + cs.BUCKET), tl.load(of_group + cs.SHIFT), tl.load(of_group + cs.BASE)
        read = read_by(row, constants + tensor * 4)
        at = start + tl.arange(0, BYTES)
        offset = tl.load(keys + at, mask=left != 0, other=0).to(tl.int64) & 0xFFFFFFFF
        above = left * 0
        while tl.max(left) > 0:
            place = byte + lowest(left)
            above |= tl.where((offset >> shift) > bucket, left & -left, 0)
            mine = (left != 0) & ((offset >> shift) == bucket)
            slot = tl.atomic_add(of_group + cs.NUM_LISTED + place * 0, 1, mask=mine)
            order = tile.to(tl.int64) * TILE + place
            entry = ((offset - (bucket << shift)) << order_bits.to(tl.int64)) | order
            tl.store(own + group * room + slot, entry, mask=mine & (slot < room))
            left = left & (left - 1)
            if tl.max(left) > 0:  # a second element of a byte is rare: its key was not kept
                s = scores_of(read, first, byte + lowest(left), left != 0, False, False, NAME, WT, MT, VT, 1)
                offset = sortable(s).to(tl.int64) - base
        mask = masks + tl.load(row + OUT) + (first + byte) // 8  # a byte is listed once: nobody else writes it now
        tl.store(mask, (tl.load(mask, mask=above != 0, other=0) | above).to(tl.uint8), mask=above != 0)


@triton.jit
def keep_above(table, num_tensors, masks, entry, wanted, order_bits, DEPTH: tl.constexpr, TILE: tl.constexpr):
    order = entry & ((tl.full((), 1, tl.int64) << order_bits.to(tl.int64)) - 1)
    row = table + locate(table, num_tensors, order // TILE, DEPTH) * COLUMNS
    set_bits(row, masks, order - tl.load(row + FIRST) * TILE, wanted)


@triton.jit(do_not_specialize=["num_tensors", "room", "order_bits"])
def finish_kernel(
    table, num_tensors, masks, own, room, order_bits, state, counts,
    DEPTH: tl.constexpr, TILE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Set the bits of the elements of a group's bucket but the smallest, the first of equal ones first.

    Few are compared all with all; many are ranked by a radix descent over key and order.
    """
    state += tl.program_id(0) * cs.STATE
    own += tl.program_id(0) * room
    num, need = tl.load(state + cs.NUM_LISTED), tl.load(state + cs.NEED)
    num = tl.where((tl.load(state + cs.FOUND) == 0) | (num > room), 0, num)
    at = tl.arange(0, cs.LIST)
    if num <= cs.LIST:
        valid = at < num
        entry = tl.load(own + at, mask=valid, other=0)
        rank = tl.zeros((cs.LIST,), tl.int32)
        for j in range(num):
            rank += (tl.load(own + j) < entry).to(tl.int32)
        keep_above(table, num_tensors, masks, entry, valid & (rank >= need), order_bits, DEPTH, TILE)
    else:
        bins = cs.counts_of(counts, tl.program_id(0), COPIES) + cs.BINS_AT  # free: the bracket is found
        each, many = tl.arange(0, cs.DIGITS_OWN), tl.arange(0, 4 * cs.LIST)
        prefix, left = tl.zeros((), tl.int64), tl.load(state + cs.SHIFT) + order_bits
        while left > 0:
            low = tl.maximum(left - cs.DIGIT_OWN, 0)
            tl.store(bins + each, 0)
            tl.debug_barrier()
            for start in range(0, num, 4 * cs.LIST):
                entry = tl.load(own + start + many, mask=start + many < num, other=0)
                here = (start + many < num) & ((entry >> left) == prefix)
                tl.atomic_add(bins + ((entry >> low) - (prefix << (left - low))), 1, mask=here, sem="relaxed")
            tl.debug_barrier()
            up_to = tl.cumsum(tl.load(bins + each, volatile=True))  # not what this core may have kept of them
            tl.debug_barrier()
            prefix = (prefix << (left - low)) + tl.sum((up_to < need).to(tl.int64))
            need -= tl.max(tl.where(up_to < need, up_to, 0))
            left = low
        for start in range(0, num, 4 * cs.LIST):
            valid = start + many < num
            entry = tl.load(own + start + many, mask=valid, other=0)
            keep_above(table, num_tensors, masks, entry, valid & (entry > prefix), order_bits, DEPTH, TILE)
