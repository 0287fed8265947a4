"""A sparse matrix with 4-bit codes as tiles of 16 rows by 128 columns: bits, scales and codes, for matrix units.

A tile is the bits of ``tiles.py``, then 16 scales (bfloat16; of rows 0 and 8, 1 and 9 ...), then its codes without the
pruned ones, two in a byte, filled up to 16 bytes. A scale belongs to a row of a tile: its group is the tile's 128
columns. Codes are ordered by half of the columns, by lane, and by pair j: those of the row above from the last to the
first, then those of the row 8 below from the first to the last. So 32 bits around the middle of a pair have all its
codes, wherever it begins. At 50 % it takes 0.20 of the bytes in bfloat16, at 80 % 0.12.

A kept weight is ``scale * (c - 7.5)``; kernels multiply by that number before it is rounded to the type of the matrix.
Weights on grids of other bits or groups are kept as values, in the other forms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import bits
from ..ops.grid import GROUP, Coded, Grid, coded
from .tiles import COLUMNS, ROWS, TILE, TileForm, check_tiles, heads_of, joined_parts, keep_of, row_parts

BITS = 4
SCALES = 2 * ROWS  # bytes of a tile's scales
HEAD = (TILE // 8 + SCALES) // 16  # units of a tile's bits and scales
UNIT = 32  # codes in 16 bytes


@dataclass(frozen=True)
class CodedTiles(TileForm):
    """Tiles of bits, scales and 4-bit codes; ``data`` is (units * 16,), uint8, and ``dtype`` that of the values."""

    def dense(self) -> Tensor:
        num_rows, width = self.shape
        if not num_rows * width:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        keep = _in_order(keep_of(self))
        place = self.starts[:-1].long()[:, None] * UNIT + HEAD * UNIT - 1 + keep.cumsum(1)
        nibbles = torch.stack([self.data & 15, self.data >> 4], 1).view(-1)
        codes = torch.zeros_like(keep, dtype=torch.uint8)
        codes[keep] = nibbles[place[keep]]
        codes, keep = (_in_order(part.view(-1, 2, 32, 4, 2, 4).transpose(1, 2)) for part in (codes, keep))
        down, across = len(keep) // self.across, self.across

        def matrix(part: Tensor) -> Tensor:
            """From (tile, half, lane, j, r, e) to rows and columns."""
            axes = part.view(down, across, 2, 8, 4, 2, 2, 2, 4).permute(0, 7, 3, 1, 2, 5, 4, 6, 8)
            return axes.reshape(down * ROWS, across * COLUMNS)[:num_rows, :width]

        return Grid(BITS).values(matrix(codes), self.scales(), self.dtype) * matrix(keep)

    def scales(self) -> Tensor:
        """The scales (out, groups); those of rows and groups without a weight are the smallest one."""
        pairs = heads_of(self, TILE // 8 + SCALES)[:, TILE // 8 :].contiguous().view(torch.bfloat16)
        down, across = -(-self.shape[0] // ROWS), self.across
        axes = pairs.view(down, across, ROWS // 2, 2).permute(0, 3, 2, 1)
        scales = axes.reshape(down * ROWS, across)[: self.shape[0]]
        return scales.masked_fill(scales == 0, torch.finfo(torch.bfloat16).tiny)

    def check(self) -> None:
        check_tiles(self, HEAD, UNIT, torch.uint8)


def can_code(grid: Grid) -> bool:
    """Whether tiles hold the codes of a grid."""
    return grid.bits == BITS and grid.group == GROUP == COLUMNS


def coded_tiles_of(weight: Coded, dtype: torch.dtype) -> CodedTiles:
    """The tiles of a matrix (out, in) by its codes, whose values are of ``dtype``."""
    assert can_code(weight.grid) and weight.grid.outputs == (0,)
    parts = [
        _packed(codes, keep, weight.scales[first : first + len(keep)])
        for first, codes, keep in row_parts(weight.packed, weight.codes, weight.shape)
    ]
    return CodedTiles(*joined_parts(parts, weight.codes.new_empty(0), weight.shape, dtype))


def coded_tiles_of_dense(weight: Tensor, scales: Tensor) -> CodedTiles:
    """The tiles of a matrix that is on the grid of these scales, (out, groups)."""
    return coded_tiles_of(coded(weight.contiguous(), scales, Grid(BITS)), weight.dtype)


def _packed(codes: Tensor, keep: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    down, across = (-(-size // part) for size, part in zip(keep.shape, (ROWS, COLUMNS), strict=True))
    pad = (0, across * COLUMNS - keep.shape[1], 0, down * ROWS - keep.shape[0])

    def lanes(matrix: Tensor) -> Tensor:
        full = torch.nn.functional.pad(matrix, pad).view(down, 2, 8, across, 2, 2, 4, 2, 4)
        return full.permute(0, 3, 2, 6, 4, 5, 7, 1, 8).reshape(-1, 32, 2, 4, 2, 4)  # tile, lane, half, j, r, e

    keep = lanes(keep)
    empty = ~keep.permute(0, 4, 1, 2, 3, 5).reshape(-1, 2, 8, 4 * 2 * 4 * 4).any(3)  # tile, r, g
    scales = torch.nn.functional.pad(scales.to(torch.bfloat16), (0, 0, 0, pad[3]))
    scales = scales.view(down, 2, 8, across).permute(0, 3, 2, 1).reshape(-1, 8, 2)
    scales = scales.masked_fill(empty.transpose(1, 2), 0).contiguous()  # so that a product with nothing is zero
    head = torch.cat([bits.pack(keep).view(len(keep), -1), scales.view(torch.uint8).view(len(keep), -1)], 1)
    keep, codes = _in_order(keep), _in_order(lanes(codes))
    units = HEAD + (keep.sum(1) + UNIT - 1) // UNIT
    start = (units.cumsum(0) - units)[:, None] * UNIT
    nibbles = codes.new_zeros(int(units.sum()) * UNIT)
    nibbles[(start + HEAD * UNIT - 1 + keep.cumsum(1))[keep]] = codes[keep]
    data = nibbles[::2] | nibbles[1::2] << 4
    data[start // 2 + torch.arange(head.shape[1], device=head.device)] = head
    return data, units


def _in_order(lanes: Tensor) -> Tensor:
    """From (tile, lane, half, j, r, e) to (tile, TILE), the order of codes; from (tile, half, ...) back again."""
    above, below = lanes.transpose(1, 2).unbind(4)
    return torch.stack([above.flip(-1), below], 4).reshape(len(lanes), TILE)
