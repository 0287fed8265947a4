"""A sparse matrix as tiles of 16 rows by 128 columns, bits and values: the form that matrix units multiply.

A tile is 64 words of bits, then its values without the zeros, filled up to 16 bytes. Its elements are in the order in
which the lanes of a warp hold them as operands of a matrix instruction (16 x 16): for each half of the columns and
each half of the rows, four groups of 128, which are four neighbouring columns for each lane. The two words of a lane
have the bits of its own elements. At 50 % it takes 0.57 of the dense bytes, at 80 % 0.27. 16-bit numbers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..ops import bits
from .gaps import Launches

ROWS, COLUMNS = 16, 128
TILE = ROWS * COLUMNS
UNIT = 8  # values in 16 bytes, the unit of places in ``data``
HEAD = TILE // 8 // 16  # units of a tile's bits
DTYPES = (torch.bfloat16, torch.float16)
CHUNK = 1 << 24  # weights packed at a time


@dataclass(frozen=True)
class Tiles:
    """A matrix (out, in) in tiles, those of the first 16 rows first."""

    data: Tensor  # (units * UNIT,), int16: bits and values as they are, so that no change of type touches them
    starts: Tensor  # (tiles + 1,), int32: the first unit of each tile, and where the last one ends
    shape: tuple[int, int]
    dtype: torch.dtype
    stage: int  # bytes of the largest tile, a multiple of 128
    launches: Launches = field(default_factory=Launches, repr=False, compare=False)

    PARTS = ("data", "starts")

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.starts.nbytes

    @property
    def across(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.shape[1] // COLUMNS)

    def clone(self) -> "Tiles":
        return Tiles(self.data.clone(), self.starts.clone(), self.shape, self.dtype, self.stage)


def tiles_of(packed: Tensor, values: Tensor, shape: Sequence[int]) -> Tiles:
    """The matrix of ``shape`` that keeps ``values``, in row-major order, where the bits of ``packed`` are set."""
    num_rows, width = shape
    parts, used, step = [], 0, max(ROWS, CHUNK // max(1, width) // ROWS * ROWS)
    for first in range(0, num_rows if width else 0, step):
        last = min(first + step, num_rows)
        keep = bits.unpack(packed[first * width // 8 : bits.num_bytes(last * width)], (last - first, width))
        weight = torch.zeros(keep.shape, dtype=values.dtype, device=values.device)
        num_kept = int(keep.sum())
        weight[keep] = values[used : used + num_kept]
        parts.append(_packed(weight, keep))
        used += num_kept
    return _joined(parts, values.dtype, values.device, (num_rows, width))


def tiles_of_dense(weight: Tensor) -> Tiles:
    """The tiles of a matrix; its zeros are left out, -0.0 too."""
    weight = weight.detach()
    step = max(ROWS, CHUNK // max(1, weight.shape[1]) // ROWS * ROWS)
    parts = [_packed(part, part != 0) for part in weight.split(step)] if weight.numel() else []
    return _joined(parts, weight.dtype, weight.device, (weight.shape[0], weight.shape[1]))


def joined_tiles(parts: Sequence[Tiles]) -> tuple[Tiles, list[Tiles]]:
    """Matrices of whole tiles one below the other, and each again, whose data is a view of the whole."""
    starts, start = [], parts[0].starts[:1]
    for part in parts:
        starts.append(part.starts[:-1] + start)
        start = start + part.starts[-1:]
    data = torch.cat([part.data for part in parts])
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    stage = max(part.stage for part in parts)
    whole = Tiles(data, torch.cat([*starts, start]), shape, parts[0].dtype, stage)
    views = data.split([len(part.data) for part in parts])
    return whole, [replace(part, data=view, launches=Launches()) for part, view in zip(parts, views, strict=True)]


def dense_reference(tiles: Tiles) -> Tensor:
    """The matrix with its zeros."""
    num_rows, width = tiles.shape
    if not num_rows * width:
        return torch.zeros(tiles.shape, dtype=tiles.dtype, device=tiles.data.device)
    heads, start = _heads(tiles), tiles.starts[:-1].long()[:, None] * UNIT
    lanes = bits.unpack(heads.view(torch.uint8).view(-1), (len(heads), 32, 2, 4, 2, 4))  # tile, lane, half, j, r, e
    keep = lanes.permute(0, 2, 4, 3, 1, 5).reshape(-1, TILE)
    flat = torch.zeros_like(keep, dtype=torch.int16)
    flat[keep] = tiles.data[(start + HEAD * UNIT - 1 + keep.cumsum(1))[keep]]
    axes = flat.view(-1, tiles.across, 2, 2, 2, 2, 8, 4, 4).permute(0, 3, 6, 1, 2, 4, 7, 5, 8)
    matrix = axes.reshape(-1, tiles.across * COLUMNS)
    return matrix[:num_rows, :width].contiguous().view(tiles.dtype)


def check_tiles(tiles: Tiles) -> None:
    """ValueError unless every place that a product would read exists: for tiles that come from a file."""
    starts, num_tiles = tiles.starts, -(-tiles.shape[0] // ROWS) * tiles.across
    whole = starts.dtype == torch.int32 and starts.shape == (num_tiles + 1,) and int(starts[0]) == 0
    whole = whole and tiles.data.shape == (int(starts[-1]) * UNIT,) and tiles.data.dtype == torch.int16
    sizes = starts.diff().long() - HEAD
    whole = whole and bool((sizes >= 0).all()) and bool((sizes <= TILE // UNIT).all())
    if whole and num_tiles:
        num_kept = bits.count(_heads(tiles).view(torch.uint8))
        whole = torch.equal((num_kept + UNIT - 1) // UNIT, sizes)
    if not whole:
        num_rows, width = tiles.shape
        raise ValueError(f"the parts of a sparse {num_rows} x {width} matrix do not fit together; save it anew")


def _heads(tiles: Tiles) -> Tensor:
    """The bits of each tile, (tiles, HEAD * UNIT)."""
    return tiles.data[tiles.starts[:-1].long()[:, None] * UNIT + torch.arange(HEAD * UNIT, device=tiles.data.device)]


def _packed(weight: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Data, and units of each tile, of some rows."""
    down, across = (-(-size // part) for size, part in zip(weight.shape, (ROWS, COLUMNS), strict=True))
    pad = (0, across * COLUMNS - weight.shape[1], 0, down * ROWS - weight.shape[0])

    def ordered(matrix: Tensor) -> Tensor:
        full = torch.nn.functional.pad(matrix, pad).view(down, 2, 8, across, 2, 2, 4, 2, 4)
        return full.permute(0, 3, 4, 1, 5, 7, 2, 6, 8).reshape(down * across, TILE)  # tile, half, r, i, h, g, t, e

    weight, keep = ordered(weight.view(torch.int16)), ordered(keep)
    units = HEAD + (keep.sum(1) + UNIT - 1) // UNIT
    start = (units.cumsum(0) - units) * UNIT
    lanes = keep.view(-1, 2, 2, 4, 32, 4).permute(0, 4, 1, 3, 2, 5).reshape(len(keep), TILE)  # lane, half, j, r, e
    data = weight.new_zeros(int(units.sum()) * UNIT)
    head = bits.pack(lanes).view(torch.int16).view(-1, HEAD * UNIT)
    data[start[:, None] + torch.arange(HEAD * UNIT, device=start.device)] = head
    place = start[:, None] + HEAD * UNIT + keep.cumsum(1) - 1
    data[place[keep]] = weight[keep]
    return data, units


def _joined(
    parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype, device: torch.device, shape: tuple[int, int]
) -> Tiles:
    data = torch.cat([torch.empty(0, dtype=torch.int16, device=device), *(part[0] for part in parts)])
    units = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *(part[1] for part in parts)])
    if len(data) // UNIT >= 1 << 31:
        raise ValueError(f"{shape[0]} x {shape[1]} is more than a matrix in tiles can have")
    return Tiles(data, units.cumsum(0).to(torch.int32), shape, dtype, stage_of(int(units.max())))


def stage_of(units: int) -> int:
    """Bytes that a kernel sets aside for a tile of so many units."""
    return -(-units * 16 // 128) * 128
