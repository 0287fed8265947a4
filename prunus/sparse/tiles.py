"""A sparse matrix as tiles of 16 rows by 128 columns, bits and values: the form that matrix units multiply.

A tile is 64 words of bits, then its values without the zeros, filled up to 16 bytes. Its elements are in the order in
which the lanes of a warp hold them as operands of a matrix instruction (16 x 16): for each half of the columns and
each half of the rows, four groups of 128, which are four neighbouring columns for each lane. The two words of a lane
have the bits of its own elements. At 50 % it takes 0.57 of the dense bytes, at 80 % 0.27. 16-bit numbers alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

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
class TileForm:
    """A matrix (out, in) in tiles, those of the first 16 rows first; as ``Tiles`` and the forms of codes are."""

    data: Tensor  # integers: bits and values as they are, so that no change of type touches them
    starts: Tensor  # (tiles + 1,), int32: the first unit of 16 bytes of each tile, and where the last one ends
    shape: tuple[int, int]
    dtype: torch.dtype
    stage: int  # bytes of the largest tile, a multiple of 128
    launches: Launches = field(default_factory=Launches, repr=False, compare=False)

    PARTS = ("data", "starts")
    TILE_COLUMNS = COLUMNS

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.starts.nbytes

    @property
    def across(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.shape[1] // self.TILE_COLUMNS)

    def clone(self: "Form") -> "Form":
        return replace(self, data=self.data.clone(), starts=self.starts.clone(), launches=Launches())


Form = TypeVar("Form", bound=TileForm)


@dataclass(frozen=True)
class Tiles(TileForm):
    """Tiles of bits and 16-bit values; ``data`` is (units * UNIT,), int16."""

    def dense(self) -> Tensor:
        num_rows, width = self.shape
        if not num_rows * width:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.data.device)
        start = self.starts[:-1].long()[:, None] * UNIT
        keep = keep_of(self).permute(0, 2, 4, 3, 1, 5).reshape(-1, TILE)
        flat = torch.zeros_like(keep, dtype=torch.int16)
        flat[keep] = self.data[(start + HEAD * UNIT - 1 + keep.cumsum(1))[keep]]
        axes = flat.view(-1, self.across, 2, 2, 2, 2, 8, 4, 4).permute(0, 3, 6, 1, 2, 4, 7, 5, 8)
        matrix = axes.reshape(-1, self.across * COLUMNS)
        return matrix[:num_rows, :width].contiguous().view(self.dtype)

    def check(self) -> None:
        """ValueError unless every place that a product would read exists: for forms that come from a file."""
        check_tiles(self, HEAD, UNIT, torch.int16)


def tiles_of(packed: Tensor, values: Tensor, shape: Sequence[int]) -> Tiles:
    """The matrix of ``shape`` that keeps ``values``, in row-major order, where the bits of ``packed`` are set."""
    parts = [_packed(weight, keep) for _, weight, keep in row_parts(packed, values, shape)]
    return Tiles(*joined_parts(parts, torch.empty(0, dtype=torch.int16, device=values.device), shape, values.dtype))


def row_parts(
    packed: Tensor, values: Tensor, shape: Sequence[int], chunk: int = CHUNK
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first of some rows, their values with zeros, and which are kept; about ``chunk`` weights at a time."""
    (num_rows, width), used = shape, 0
    step = max(ROWS, chunk // max(1, width) // ROWS * ROWS)
    for first in range(0, num_rows if width else 0, step):
        last = min(first + step, num_rows)
        keep = bits.unpack(packed[first * width // 8 : bits.num_bytes(last * width)], (last - first, width))
        matrix = torch.zeros(keep.shape, dtype=values.dtype, device=values.device)
        num_kept = int(keep.sum())
        matrix[keep] = values[used : used + num_kept]
        used += num_kept
        yield first, matrix, keep


def tiles_of_dense(weight: Tensor) -> Tiles:
    """The tiles of a matrix; its zeros are left out, -0.0 too."""
    weight = weight.detach()
    step = max(ROWS, CHUNK // max(1, weight.shape[1]) // ROWS * ROWS)
    parts = [_packed(part, part != 0) for part in weight.split(step)] if weight.numel() else []
    return Tiles(*joined_parts(parts, weight.new_empty(0, dtype=torch.int16), weight.shape, weight.dtype))


def joined_tiles(parts: Sequence[Form]) -> tuple[Form, list[Form]]:
    """Matrices of whole tiles one below the other, and each again, whose data is a view of the whole."""
    starts, start = [], parts[0].starts[:1]
    for part in parts:
        starts.append(part.starts[:-1] + start)
        start = start + part.starts[-1:]
    data = torch.cat([part.data for part in parts])
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    stage = max(part.stage for part in parts)
    starts = torch.cat([*starts, start])
    whole = replace(parts[0], data=data, starts=starts, shape=shape, stage=stage, launches=Launches())
    views = data.split([len(part.data) for part in parts])
    return whole, [replace(part, data=view, launches=Launches()) for part, view in zip(parts, views, strict=True)]


def check_tiles(tiles: TileForm, head: int, in_unit: int, dtype: torch.dtype) -> None:
    """Refuse tiles with ``head`` units before their values, of which a unit holds ``in_unit``, as ``check`` does."""
    whole = are_places(tiles, dtype, head, head + TILE // in_unit)
    if whole and len(tiles.starts) > 1:
        num_kept = bits.count(heads_of(tiles, TILE // 8))
        whole = torch.equal((num_kept + in_unit - 1) // in_unit, tiles.starts.diff().long() - head)
    if not whole:
        raise misfit(tiles)


def are_places(tiles: TileForm, dtype: torch.dtype, least: int, most: int) -> bool:
    """Whether data and starts fit the shape and each other, with ``least`` to ``most`` units in a tile."""
    starts, data, num_tiles = tiles.starts, tiles.data, -(-tiles.shape[0] // ROWS) * tiles.across
    if starts.dtype != torch.int32 or starts.shape != (num_tiles + 1,) or int(starts[0]) != 0:
        return False
    sizes = starts.diff()
    are_sizes = bool((sizes >= least).all()) and bool((sizes <= most).all())
    return are_sizes and data.dtype == dtype and data.ndim == 1 and data.nbytes == 16 * int(starts[-1])


def misfit(form: Any) -> ValueError:
    num_rows, width = form.shape
    return ValueError(f"the parts of a sparse {num_rows} x {width} matrix do not fit together; save it again")


def heads_of(tiles: TileForm, num_bytes: int) -> Tensor:
    """The first bytes of each tile, (tiles, num_bytes): the bits, and what follows them."""
    place = torch.arange(num_bytes, device=tiles.data.device)
    return tiles.data.view(torch.uint8)[tiles.starts[:-1].long()[:, None] * 16 + place]


def keep_of(tiles: TileForm) -> Tensor:
    """Which elements are kept, as (tile, lane, half, j, r, e)."""
    heads = heads_of(tiles, TILE // 8)
    return bits.unpack(heads.view(-1), (len(heads), 32, 2, 4, 2, 4))


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


def joined_parts(
    parts: Sequence[tuple[Tensor, Tensor]], empty: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[int, int], torch.dtype, int]:
    """The fields of a form of tiles, from the data, and units of each tile, of rows one below the other."""
    num_rows, width = shape
    data = torch.cat([empty, *(part[0] for part in parts)])
    units = torch.cat([torch.zeros(1, dtype=torch.int64, device=empty.device), *(part[1] for part in parts)])
    if data.nbytes // 16 >= 1 << 31:
        raise ValueError(f"{num_rows} x {width} is more than the tile form can store")
    return data, units.cumsum(0).to(torch.int32), (num_rows, width), dtype, stage_of(int(units.max()))


def stage_of(units: int) -> int:
    """Bytes that a kernel sets aside for a tile of so many units, and for the word behind it."""
    return -(-(units + 1) * 16 // 128) * 128
