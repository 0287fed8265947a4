"""Cuts within rows and within groups of M: each is decided by one program, from one read."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import bits
from ..source import Lazy
from .formula import sortable
from .launch import launch
from .lowered import lowered
from .plan import COLUMNS, FIRST, LIVE, NUMEL, OUT, TILE, is_live, locate
from .read import is_strange, packed, scores_of

LONGEST = 1 << 15  # inputs of a row that a program holds in registers
WIDEST = 16  # of a group
BLOCK = 1024


@triton.jit
def kth_smallest(keys, valid, num):
    """The ``num``-th smallest of the valid keys (from 1), bit by bit: each bit is settled by one count."""
    words = keys.to(tl.uint32, bitcast=True) ^ 0x80000000
    words = tl.where(valid, words, 0xFFFFFFFF)
    found, bit = tl.zeros((), tl.uint32), tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | bit
        found = tl.where(tl.sum((words < trial).to(tl.int32)) < num, trial, found)
        bit = bit >> 1
    return (found ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def row_kernel(
    table, constants, masks, strange, num_inputs, num_drop,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of one row of a tensor without the ``num_drop`` smallest, of which the dead are the first."""
    first = tl.program_id(0).to(tl.int64) * num_inputs
    lane = tl.arange(0, BLOCK)
    valid = lane < num_inputs
    live = is_live(tl.load(table + LIVE), first + lane, valid)
    s = scores_of(table, constants, first, lane, valid, False, False, NAME, WT, MT, VT, ALIGN)
    keys = tl.where(live, sortable(s), -0x7FFFFFFF)
    threshold = kth_smallest(keys, valid, num_drop)
    equal = valid & (keys == threshold)
    num_equal = num_drop - tl.sum((valid & (keys < threshold)).to(tl.int32))
    keep = valid & (keys > threshold)
    if num_equal < tl.sum(equal.to(tl.int32)):
        keep = keep | (equal & (tl.cumsum(equal.to(tl.int32)) > num_equal))
    byte = tl.arange(0, BLOCK // 8)
    tl.store(masks + tl.load(table + OUT) + first // 8 + byte, packed(keep & live, BLOCK), mask=byte * 8 < num_inputs)
    tl.store(strange + lane * 0, 1, mask=live & is_strange(s))


@triton.jit
def group_kernel(
    table, constants, num_tensors, masks, strange, num_drop,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of a tile without the ``num_drop`` smallest of every ``GROUP`` elements."""
    tile = tl.program_id(0)
    tensor = locate(table, num_tensors, tile, DEPTH)
    row, numbers = table + tensor * COLUMNS, constants + tensor * 4
    first = (tile - tl.load(row + FIRST)) * TILE
    left = tl.load(row + NUMEL) - first
    for start in range(0, TILE, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        live = is_live(tl.load(row + LIVE), first + lane, lane < left)
        s = scores_of(row, numbers, first, lane, lane < left, FULL, False, NAME, WT, MT, VT, ALIGN)
        keys = tl.reshape(tl.where(live, sortable(s), -0x7FFFFFFF), (BLOCK // GROUP, GROUP))
        place = tl.arange(0, GROUP)
        rank = tl.zeros((BLOCK // GROUP, GROUP), tl.int32)
        for j in tl.static_range(GROUP):  # who is smaller, or equal and stands before, is dropped before
            other = tl.sum(tl.where(place[None, :] == j, keys, 0), axis=1)[:, None]
            rank += ((other < keys) | ((other == keys) & (place[None, :] > j))).to(tl.int32)
        keep = tl.reshape(rank >= num_drop, (BLOCK,)) & live
        byte = start // 8 + tl.arange(0, BLOCK // 8)
        tl.store(masks + tl.load(row + OUT) + first // 8 + byte, packed(keep, BLOCK), mask=byte * 8 < left)
        tl.store(strange + tensor + lane * 0, 1, mask=live & is_strange(s))


def drop_in_rows(sources: Sequence[Lazy], num_drop: Sequence[int], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every row, of the sources whose rows kernels can read."""
    rows = [
        (source, n, drop)
        for source, drop in zip(sources, num_drop, strict=True)
        if drop > 0 and 0 < (n := num_inputs(source)) <= LONGEST and n % 8 == 0
    ]
    low = lowered([source for source, _, _ in rows]) if rows else None
    if low is None:
        return {}
    offsets = [0, *accumulate(source.numel // 8 for source in low.sources)]
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=sources[0].device)
    strange = torch.zeros(len(rows), dtype=torch.int32, device=out.device)
    for i, p in enumerate(low.planned_each(live, offsets, TILE)):
        source, n, drop = rows[i]
        block = max(64, triton.next_power_of_2(n))
        constants = {**low.read, "ALIGN": p.align, "BLOCK": block, "num_warps": max(1, min(8, block // 2048))}
        launch(row_kernel, (source.numel // n,), (p.table, p.constants, out, strange[i:], n, drop), constants)
    refuse(low.sources, strange)
    return _split(low.sources, out, offsets)


def drop_in_groups(
    sources: Sequence[Lazy], num_drop: int, group: int, live: Mapping[str, Tensor], tile: int = TILE
) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every ``group`` inputs, of sources that kernels can read."""
    low = lowered(sources)
    if low is None or group > WIDEST or group & group - 1 or not all(num_inputs(source) for source in sources):
        return {}
    offsets = [0, *accumulate(bits.num_bytes(source.numel) for source in sources)]
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=sources[0].device)
    strange = torch.zeros(len(sources), dtype=torch.int32, device=out.device)
    p = low.planned(live, offsets, tile)
    shape = {"ALIGN": p.align, "FULL": p.is_full, "DEPTH": p.depth, "GROUP": group}
    constants = {**low.read, **shape, "BLOCK": min(BLOCK, tile), "TILE": tile}
    launch(group_kernel, (p.num_tiles,), (p.table, p.constants, len(p.table), out, strange, num_drop), constants)
    refuse(sources, strange)
    return _split(sources, out, offsets)


def _split(sources: Sequence[Lazy], out: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
    return {source.name: out[start:stop] for source, (start, stop) in zip(sources, pairwise(offsets), strict=True)}


def num_inputs(source: Lazy) -> int:
    """Inputs of a row if the elements of each row lie side by side, else 0."""
    return source.num_inputs if source.outputs in ((), (0,)) and source.weight.is_contiguous() else 0


def refuse(sources: Sequence[Lazy], strange: Tensor) -> None:
    """ValueError that names a source with scores that are not finite: the one word from the device."""
    if any(flags := strange.tolist()):
        raise ValueError(
            f"scores must be finite, but {sources[flags.index(1)].name} has some that are not; "
            "look for NaN in weight and moments"
        )
