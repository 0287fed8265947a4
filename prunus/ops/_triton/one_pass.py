"""The pass: one read of all that the scores read."""

import triton
import triton.language as tl

from .address_table import COLUMNS, FIRST, LIVE, NUMEL, OUT, locate
from .cut_state import CROWDED, HI, LO, MARGIN, NOT_FINITE, NUM_ABOVE, STATE, group_of
from .scores import is_strange, ones_in, read_by, score_at, scores_of


@triton.jit
def pass_block(
    read, first, start, left, live, turn, lo, hi, tensor, mask, list_at, counter, state, capacity,
    FULL: tl.constexpr, FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a tile: writes its bits, lists the bytes with anything inside, returns the set bits of each byte."""
    lane = start + tl.arange(0, BLOCK)
    valid = lane < left
    s = scores_of(read, first, lane, valid, FULL, FAST, NAME, WT, MT, VT, ALIGN)
    over, least, strange = s > hi, s >= lo, is_strange(s)
    if not FULL:
        over, least, strange = over & valid, least & valid, strange & valid
    # three bits an element, side by side in the three bytes of a word for each eight elements
    flags = tl.where(over, 1, 0) + tl.where(least, 256, 0) + tl.where(strange, 65536, 0)
    words = tl.sum(tl.reshape(flags, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
    byte = start // 8 + tl.arange(0, BLOCK // 8)
    real = byte * 8 < left
    if live != 0:
        alive = tl.load(live.to(tl.pointer_type(tl.uint8)) + first // 8 + byte, mask=real, other=0).to(tl.int32)
        words &= alive * 0x010101
    bits = words & 255
    inside = ((words >> 8) & 255) ^ bits
    tl.store(mask + byte, bits.to(tl.uint8), mask=real)
    slot = tl.atomic_add(counter + byte * 0, 1, mask=inside != 0, sem="relaxed")
    tl.store(list_at + slot, ((turn + byte) << 8) | inside, mask=(inside != 0) & (slot < capacity))
    tl.store(state + NOT_FINITE + byte * 0, tensor + 1, mask=(words >> 16) != 0)
    return ones_in(bits)


@triton.jit(do_not_specialize=["num_tensors", "num_tiles", "capacity"])
def pass_kernel(
    table, constants, num_tensors, num_tiles, masks, listed, counters, state, capacity,
    FAST: tl.constexpr, NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    DEPTH: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of what lies above the bracket, and for each program a list of bytes with what lies in it."""
    program = tl.program_id(0).to(tl.int64)
    listed += program * capacity
    counters += program
    turn = 0
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tensor = locate(table, num_tensors, tile, DEPTH)
        row = table + tensor * COLUMNS
        of_group = state + group_of(tensor, EACH) * STATE
        if tl.load(of_group + CROWDED) == 0:
            lo, hi = score_at(tl.load(of_group + LO) - MARGIN), score_at(tl.load(of_group + HI) + MARGIN)
            first = (tile - tl.load(row + FIRST)) * TILE
            left, live = tl.load(row + NUMEL) - first, tl.load(row + LIVE)
            read = read_by(row, constants + tensor * 4)
            mask = masks + tl.load(row + OUT) + first // 8
            num_above = tl.zeros((BLOCK // 8,), tl.int32)
            if left >= TILE:
                for start in tl.range(0, TILE, BLOCK, num_stages=3):
                    num_above += pass_block(
                        read, first, start, left, live, turn, lo, hi, tensor, mask, listed, counters, of_group,
                        capacity, True, FAST, NAME, WT, MT, VT, ALIGN, BLOCK,
                    )  # fmt: skip
            else:
                for start in range(0, TILE, BLOCK):
                    num_above += pass_block(
                        read, first, start, left, live, turn, lo, hi, tensor, mask, listed, counters, of_group,
                        capacity, False, FAST, NAME, WT, MT, VT, ALIGN, BLOCK,
                    )  # fmt: skip
            tl.atomic_add(of_group + NUM_ABOVE, tl.sum(num_above).to(tl.int64), sem="relaxed")
        turn += TILE // 8
