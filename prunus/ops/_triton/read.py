"""Scores of a block of elements, and what is done with them: ranked as integers, packed as bits."""

import triton
import triton.language as tl

from .formula import evaluate, uniform
from .plan import EXTRA, OUT, M, V, W, load, typed


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
def is_strange(s):
    """Where a score is NaN or infinite."""
    return (tl.abs(s) < float("inf")) == 0


@triton.jit
def packed(keep, BLOCK: tl.constexpr):
    """Bytes of a block of booleans, the first in the lowest bit."""
    places = tl.reshape(keep.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    return tl.sum(places, axis=1).to(tl.uint8)


@triton.jit
def ones_in(byte):
    """Number of set bits of each byte."""
    pairs = byte - ((byte >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def set_bits(row, masks, at, wanted):
    """Set the bits of elements ``at`` of the tensors in ``row``, atomically in words of 32 bits."""
    word = (masks + tl.load(row + OUT)).to(tl.pointer_type(tl.int32), bitcast=True) + at // 32
    tl.atomic_or(word, (1 << (at % 32)).to(tl.int32), mask=wanted, sem="relaxed")


@triton.jit
def slot_of(bin, NUM: tl.constexpr):
    """Where a bin is counted: neighbours stand 32 bytes apart, since atomics on one sector wait for each other."""
    return (bin % (NUM // 8)) * 8 + bin // (NUM // 8)


@triton.jit
def added(counts, slot, NUM: tl.constexpr, COPIES: tl.constexpr):
    """Counts at ``slot`` of a histogram that was made in copies."""
    total = tl.load(counts + slot)
    for copy in tl.static_range(1, COPIES):
        total += tl.load(counts + copy * NUM + slot)
    return total


@triton.jit
def total_of(counts, NUM: tl.constexpr, COPIES: tl.constexpr):
    return tl.sum(added(counts, tl.arange(0, NUM), NUM, COPIES))


@triton.jit
def rank_in(counts, NUM: tl.constexpr, COPIES: tl.constexpr, rank):
    """Bin of the element of 0-based ``rank`` in a histogram by ``slot_of``, and how many stand before it."""
    line, column = tl.arange(0, NUM // 128), tl.arange(0, 128)
    grid = added(counts, slot_of(line[:, None] * 128 + column[None, :], NUM), NUM, COPIES)
    lines = tl.cumsum(tl.sum(grid, axis=1))
    at = tl.minimum(tl.sum((lines <= rank).to(tl.int32)), NUM // 128 - 1)
    before = tl.max(tl.where((lines <= rank) & (line < at), lines, 0))
    up_to = tl.cumsum(added(counts, slot_of(at * 128 + column, NUM), NUM, COPIES)) + before
    before = tl.maximum(before, tl.max(tl.where(up_to <= rank, up_to, 0)))
    return at * 128 + tl.sum((up_to <= rank).to(tl.int32)), before
