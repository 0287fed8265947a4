"""One launch over many tensors: a table of their addresses, and tiles that are dealt out to resident programs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16384  # elements of one tensor that a program works on before it takes the next tile
COLUMNS = tl.constexpr(8)  # of the table: w, m, v, live, out, numel, extra, first tile
W, M, V, LIVE, OUT, NUMEL, EXTRA, FIRST = (tl.constexpr(i) for i in range(8))
PROGRAMS_PER_SM = 16
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Table:
    """Addresses and constants of all tensors on the device, and how many tiles they make."""

    rows: Tensor  # (num_tensors, COLUMNS) int64
    constants: Tensor  # (num_tensors, 4) float32: a, b, factor of m, factor of v
    num_tiles: int
    align: int  # bytes that all addresses of w, m and v are multiples of
    is_full: bool  # whether all tiles are

    @property
    def kind(self) -> tuple:
        """What compiled forms depend on."""
        return self.rows.device, self.align, self.depth

    @property
    def depth(self) -> int:
        """Halvings that find a tile's tensor."""
        return max(1, (len(self.rows) - 1).bit_length())

    @property
    def num_programs(self) -> int:
        return max(1, min(self.num_tiles, PROGRAMS_PER_SM * num_multiprocessors(self.rows.device)))


_TABLES: dict[tuple, Table] = {}  # the last few; a training asks for the same one at every event


def made_table(
    rows: tuple[tuple[int, ...], ...],
    constants: tuple[tuple[float, ...], ...],
    device: torch.device,
    tile: int | tuple[int, ...],
) -> Table:
    """Table of tensors given as rows of addresses (w, m, v, live), offset of the mask, numel and extra."""
    key = (rows, constants, device, tile)
    if key in _TABLES:
        return _TABLES[key]
    tiles = (tile,) * len(rows) if isinstance(tile, int) else tile
    filled, num_tiles = [], 0
    for row, size in zip(rows, tiles, strict=True):
        filled.append([*row, num_tiles])
        num_tiles += -(-row[5] // size)
    table, numbers = torch.tensor(filled, dtype=torch.int64), torch.tensor(constants, dtype=torch.float32)
    if device.type == "cuda":  # a copy from pinned memory does not wait for the device
        table, numbers = (t.pin_memory().to(device, non_blocking=True) for t in (table, numbers))
    align = alignment(address for row in rows for address in row[:3])
    is_full = all(row[5] % size == 0 for row, size in zip(rows, tiles, strict=True))
    made = Table(table, numbers, num_tiles, align, is_full)
    if len(_TABLES) >= 8:
        _TABLES.pop(next(iter(_TABLES)), None)  # another thread may have done so
    _TABLES[key] = made
    return made


def alignment(addresses: Iterable[int]) -> int:
    """16 where every address allows loads of 16 bytes, else 1."""
    return 16 if all(address % 16 == 0 for address in addresses) else 1


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def locate(table, num_tensors, tile, DEPTH: tl.constexpr):
    """Which tensor ``tile`` belongs to: the last whose first tile is not behind it."""
    lo, hi = 0, num_tensors
    for _ in tl.static_range(DEPTH):
        middle = (lo + hi) // 2
        before = tl.load(table + middle * COLUMNS + FIRST, mask=middle < num_tensors, other=1 << 62) <= tile
        lo = tl.where(before, middle, lo)
        hi = tl.where(before, hi, middle)
    return lo


@triton.jit
def is_live(live, at, valid):
    """Whether the bit of each element is set; all are live where there is no mask (address 0)."""
    bits = tl.load(live.to(tl.pointer_type(tl.uint8)) + at // 8, mask=valid & (at * 0 + live != 0), other=255)
    return valid & (((bits.to(tl.int32) >> (at % 8).to(tl.int32)) & 1) != 0)


@triton.jit
def typed(address, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer from an address that is a multiple of ``ALIGN``; told of 16, the compiler loads 16 bytes at a time."""
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGN > 1:
        pointer = tl.multiple_of(pointer, ALIGN)
    return pointer


@triton.jit
def load(pointer, valid, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer).to(tl.float32)
    return tl.load(pointer, mask=valid, other=0.0).to(tl.float32)
