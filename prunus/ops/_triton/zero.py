"""Zeroing many tensors by their masks, in one launch a width."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import PROGRAMS_PER_SM, TILE, is_live, locate, num_multiprocessors

BLOCK = 1024
WIDTHS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
MASK, NUMEL, FIRST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(7)


@triton.jit
def zero_kernel(
    table, num_tensors, num_tiles, KIND: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Write zero where the bit is not set; what stays is not touched."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = table + locate(table, num_tensors, tile, DEPTH) * 8
        first, numel, mask = (tile - tl.load(row + FIRST)) * TILE, tl.load(row + NUMEL), tl.load(row + MASK)
        tensor = tl.load(row).to(tl.pointer_type(KIND))
        for start in range(0, TILE, BLOCK):
            at = first + start + tl.arange(0, BLOCK)
            valid = at < numel
            zero = tl.zeros((BLOCK,), KIND)
            tl.store(tensor + at, zero, mask=valid & (is_live(mask, at, valid) == 0))


def zero_all_(tensors: Sequence[Tensor], masks: Sequence[Tensor], tile: int = TILE) -> None:
    """Zero contiguous tensors where their packed masks are not set."""
    device = tensors[0].device
    for width, kind in WIDTHS.items():
        rows, num_tiles = [], 0
        for tensor, mask in zip(tensors, masks, strict=True):
            if tensor.element_size() == width and tensor.numel():
                rows.append([tensor.data_ptr(), mask.data_ptr(), tensor.numel(), 0, 0, 0, 0, num_tiles])
                num_tiles += triton.cdiv(tensor.numel(), tile)
        if rows:
            table = torch.tensor(rows).to(device, non_blocking=True)
            num_programs = max(1, min(num_tiles, PROGRAMS_PER_SM * num_multiprocessors(device)))
            depth = max(1, (len(rows) - 1).bit_length())
            zero_kernel[(num_programs,)](
                table, len(rows), num_tiles, KIND=kind, DEPTH=depth, BLOCK=min(BLOCK, tile), TILE=tile
            )
