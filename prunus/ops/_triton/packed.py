"""Packed masks: tensors zeroed by them, one or many in one launch, and their bits counted.

What is zeroed is read and written whole: memory with error correction reads what it writes in part, so that storing the
zeros alone saves nothing, and costs the wide stores.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .address_table import COLUMNS, FIRST, alignment, locate, made_table, typed
from .launch import launch
from .scores import ones_in

BLOCK = 2048
TILE = 8192  # elements that a program of many tensors zeroes
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by bytes of an element
WORD, MASK, NUMEL = (tl.constexpr(i) for i in (0, 3, 5))  # columns of the table


@triton.jit
def zero_block(words, mask, start, left, FULL: tl.constexpr, BLOCK: tl.constexpr):
    byte = start // 8 + tl.arange(0, BLOCK // 8)
    place = tl.arange(0, 8)[None, :]
    at = byte[:, None] * 8 + place
    if FULL:
        kept = (tl.load(mask + byte).to(tl.int32)[:, None] >> place) & 1
        tl.store(words + at, tl.where(kept != 0, tl.load(words + at), 0))
    else:
        kept = (tl.load(mask + byte, mask=byte * 8 < left, other=0).to(tl.int32)[:, None] >> place) & 1
        tl.store(words + at, tl.where(kept != 0, tl.load(words + at, mask=at < left, other=0), 0), mask=at < left)


@triton.jit
def zero_kernel(words, mask, numel, BLOCK: tl.constexpr):
    """Write zero where the bit is not set."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if numel - start >= BLOCK:
        zero_block(words, mask, start, numel, True, BLOCK)
    else:
        zero_block(words, mask, start, numel, False, BLOCK)


@triton.jit
def zero_each_kernel(
    table, num_tensors, KIND: tl.constexpr, ALIGN: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``zero_kernel`` of all tensors of a table."""
    tile = tl.program_id(0)
    row = table + locate(table, num_tensors, tile, DEPTH) * COLUMNS
    first = (tile - tl.load(row + FIRST)) * TILE
    left, words = tl.load(row + NUMEL) - first, typed(tl.load(row + WORD), KIND, ALIGN) + first
    mask = tl.load(row + MASK).to(tl.pointer_type(tl.uint8)) + first // 8
    if left >= TILE:
        for start in range(0, TILE, BLOCK):
            zero_block(words, mask, start, left, True, BLOCK)
    else:
        for start in range(0, TILE, BLOCK):
            zero_block(words, mask, start, left, False, BLOCK)


@triton.jit(do_not_specialize=["num_tensors"])
def count_bits_kernel(table, num_tensors, totals, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """Set bits of the masks of each tensor."""
    tile = tl.program_id(0)
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    first = (tile - tl.load(row + FIRST)) * TILE
    byte = tl.arange(0, TILE // 8)
    mask = tl.load(row + MASK).to(tl.pointer_type(tl.uint8)) + first // 8
    bits = tl.load(mask + byte, mask=byte * 8 < tl.load(row + NUMEL) - first, other=0).to(tl.int32)
    tl.atomic_add(totals + tensor, tl.sum(ones_in(bits)).to(tl.int64), sem="relaxed")


def zero_(words: Tensor, packed: Tensor) -> None:
    """Zero integers that lie side by side where their packed mask is not set."""
    if words.numel():
        launch(zero_kernel, (triton.cdiv(words.numel(), BLOCK),), (words, packed, words.numel()), {"BLOCK": BLOCK})


def zero_each_(pairs: Sequence[tuple[Tensor, Tensor]], tile: int = TILE) -> None:
    """``zero_`` of contiguous tensors on one device, of elements of one width, none of them empty."""
    first = pairs[0][0]
    rows = tuple((t.data_ptr(), 0, 0, mask.data_ptr(), 0, t.numel(), 0) for t, mask in pairs)
    table = made_table(rows, ((0.0,),), first.device, tile)
    constants = {"KIND": WORDS[first.element_size()], "ALIGN": alignment(row[0] for row in rows)}
    shape = {"DEPTH": table.depth, "BLOCK": min(BLOCK, tile), "TILE": tile}
    launch(zero_each_kernel, (table.num_tiles,), (table.rows, len(rows)), constants | shape)


def count_each(masks: Sequence[Tensor], numels: Sequence[int], tile: int = TILE) -> list[int]:
    """Set bits of each of some packed masks on one device, by one launch and one wait."""
    rows = tuple((0, 0, 0, mask.data_ptr(), 0, numel, 0) for mask, numel in zip(masks, numels, strict=True))
    table = made_table(rows, ((0.0,),), masks[0].device, tile)
    totals = torch.zeros(len(rows), dtype=torch.int64, device=masks[0].device)
    if table.num_tiles:
        how = {"DEPTH": table.depth, "TILE": tile}
        launch(count_bits_kernel, (table.num_tiles,), (table.rows, len(rows), totals), how)
    return totals.tolist()
