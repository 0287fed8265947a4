"""One launch over many tensors: a table of addresses, and tiles that are dealt out to resident programs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16384  # elements of one tensor that a program works on before it takes the next tile
COLUMNS = 8  # of the table: w, m, v, live, out, numel, extra, first tile
W, M, V, LIVE, OUT, NUMEL, EXTRA, FIRST = (tl.constexpr(i) for i in range(COLUMNS))
PROGRAMS_PER_SM = 8
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Plan:
    """Addresses and constants of all tensors on the device, and how many tiles they make."""

    table: Tensor  # (num_tensors, COLUMNS) int64
    constants: Tensor  # (num_tensors, 4) float32: a, b, factor of m, factor of v
    num_tiles: int

    @property
    def depth(self) -> int:
        """Halvings that find a tile's tensor."""
        return max(1, (len(self.table) - 1).bit_length())

    @property
    def num_programs(self) -> int:
        return max(1, min(self.num_tiles, PROGRAMS_PER_SM * num_multiprocessors(self.table.device)))


def plan(
    rows: Sequence[Sequence[int]], constants: Sequence[Sequence[float]], device: torch.device, tile: int
) -> Plan:
    """Plan for tensors given as rows of addresses (w, m, v, live, out), numel and extra."""
    filled, num_tiles = [], 0
    for row in rows:
        filled.append([*row, num_tiles])
        num_tiles += triton.cdiv(row[5], tile)
    table = torch.tensor(filled, dtype=torch.int64).to(device, non_blocking=True)
    return Plan(table, torch.tensor(constants, dtype=torch.float32).to(device, non_blocking=True), num_tiles)


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
