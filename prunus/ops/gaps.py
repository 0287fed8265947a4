"""A sparse matrix as its values and the gaps between them: the form that products read.

A row is a list of entries in order of their columns. Four bits a entry say how many columns lie between
it and the one before, so that whoever holds a value need not count bits to know its column. A gap
longer than ``LONGEST`` is bridged by entries of value zero. Entries stand in units of ``UNIT``, one for
a lane of a warp, and tiles of ``LANES`` units, whose first column is stored. At 50 % in bfloat16 it takes
0.63 of the dense bytes, at 80 % 0.26.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bits
from .compact import check_count

LONGEST = 15  # columns between two entries
UNIT = 8  # entries; the first half is in the low four bits of its bytes of codes, the other in the high ones
LANES = 32
TILE = UNIT * LANES
WIDEST = 1 << 16  # columns: the first one of a tile is stored as 16 bits
PIECE = 1 << 22  # weights packed or unpacked at a time


@dataclass(frozen=True)
class Gaps:
    """A matrix (out, in) in gap form.

    Each row starts at a unit of its own, and at an even tile. ``rows`` holds, for each, its first unit, its first
    tile and its number of entries, and one row more for the ends.
    """

    values: Tensor  # (units * UNIT,), of the matrix's type
    codes: Tensor  # (units * UNIT / 2,), uint8
    heads: Tensor  # (tiles,), int16: the 16 bits of a tile's first column
    rows: Tensor  # (out + 1, 3), int32
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.codes.nbytes + self.heads.nbytes + self.rows.nbytes

    def clone(self) -> "Gaps":
        parts = (part.clone() for part in (self.values, self.codes, self.heads, self.rows))
        return Gaps(*parts, shape=self.shape)


def gaps_of(packed: Tensor, values: Tensor, shape: Sequence[int]) -> Gaps:
    """The matrix of ``shape`` that keeps ``values``, in row-major order, where the bits of ``packed`` are set."""
    num_rows, width = shape
    if width > WIDEST:
        raise ValueError(f"a row may have at most {WIDEST} columns, got {width}")
    if bits.num_bytes(num_rows * width) > len(packed):
        raise ValueError(f"{num_rows} x {width} elements need {bits.num_bytes(num_rows * width)} bytes of bits")
    check_count(int(bits.count(packed[: bits.num_bytes(num_rows * width)])), len(values))
    parts, used = [], 0
    for first, last in _blocks(num_rows, width):
        keep = bits.unpack(packed[first * width // 8 : bits.num_bytes(last * width)], (last - first, width))
        num_kept = int(keep.sum())
        parts.append(_packed(keep, values[used : used + num_kept]))
        used += num_kept
    counts = _joined([part[3] for part in parts], torch.int64, packed.device)
    return Gaps(
        _joined([part[0] for part in parts], values.dtype, values.device),
        _joined([part[1] for part in parts], torch.uint8, values.device),
        _joined([part[2] for part in parts], torch.int16, values.device),
        _table(counts),
        (num_rows, width),
    )


def gaps_of_dense(weight: Tensor) -> Gaps:
    """The gap form of a matrix; its zeros are left out, -0.0 too."""
    weight = weight.detach()
    keep = weight != 0
    return gaps_of(bits.pack(keep), weight[keep], (weight.shape[0], weight.shape[1]))


def columns_of(gaps: Gaps, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of each entry of the rows ``first`` to ``last``, zeros that bridge gaps included."""
    table = gaps.rows[first : last + 1].long()
    counts = table[:-1, 2]
    row, index = _numbered(counts)
    place = (table[row, 0] - table[0, 0]) * UNIT + index
    codes = _natural(gaps.codes[int(table[0, 0]) * UNIT // 2 : int(table[-1, 0]) * UNIT // 2])[place]
    heads = gaps.heads[table[row, 1] + index // TILE].long() & (WIDEST - 1)
    steps = (codes.long() + 1).cumsum(0)  # from the first entry of all; what is before a tile's head falls out
    starts = steps[torch.arange(len(index), device=index.device) - index % TILE]
    values = gaps.values[int(table[0, 0]) * UNIT : int(table[-1, 0]) * UNIT][place]
    return row + first, heads + steps - starts, values


def check_gaps(gaps: Gaps) -> None:
    """ValueError unless every place that a product would read exists: for forms that come from a file."""
    num_rows, width = gaps.shape
    table = gaps.rows
    whole = table.dtype == torch.int32 and table.shape == (num_rows + 1, 3) and bool((table >= 0).all())
    if whole:
        whole = torch.equal(table, _table(table[:-1, 2].long()))
    num_units, num_tiles = (int(table[-1, 0]), int(table[-1, 1])) if whole else (0, 0)
    whole = whole and gaps.values.shape == (num_units * UNIT,) and gaps.heads.shape == (num_tiles,)
    whole = whole and gaps.codes.shape == (num_units * UNIT // 2,)
    whole = whole and (gaps.codes.dtype, gaps.heads.dtype) == (torch.uint8, torch.int16)
    if not whole or width > WIDEST:
        raise ValueError(f"the parts of a sparse {num_rows} x {width} matrix do not fit together; save it anew")
    for first, last in _blocks(num_rows, width):
        if bool((columns_of(gaps, first, last)[1] >= width).any()):
            raise ValueError(f"a sparse {num_rows} x {width} matrix has a column beyond its last; save it anew")


def dense_reference(gaps: Gaps) -> Tensor:
    """The matrix with its zeros."""
    num_rows, width = gaps.shape
    dense = torch.zeros(gaps.shape, dtype=gaps.values.dtype, device=gaps.values.device)
    for first, last in _blocks(num_rows, width):
        row, column, value = columns_of(gaps, first, last)
        dense.view(-1)[row * width + column] = value
    return dense


def _packed(keep: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, codes, heads and number of entries of each row, for a few rows."""
    row, column, value = _entries(keep, values)
    counts = torch.bincount(row, minlength=len(keep))
    units, tiles = _units(counts), _tiles(counts)
    index = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    place = (units.cumsum(0) - units)[row] * UNIT + index
    is_head = index % TILE == 0
    gap = (column.diff(prepend=column[:1]) - 1).masked_fill(is_head, 0)
    out = values.new_zeros(int(units.sum()) * UNIT)
    out[place] = value
    codes = torch.zeros(len(out), dtype=torch.uint8, device=row.device)
    codes[place] = gap.to(torch.uint8)
    heads = torch.zeros(int(tiles.sum()), dtype=torch.int16, device=row.device)
    heads[((tiles.cumsum(0) - tiles)[row] + index // TILE)[is_head]] = column[is_head].to(torch.int16)
    return out, _ordered(codes), heads, counts


def _entries(keep: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of each entry: the kept ones, and zeros wherever a gap is too long."""
    row, column = keep.nonzero(as_tuple=True)
    before = torch.cat([column.new_full((1,), -1), column])[:-1]
    is_first = row.diff(prepend=row.new_full((1,), -1)) != 0
    extra = ((column - before - 1) // (LONGEST + 1)).masked_fill(is_first, 0)
    last = (extra + 1).cumsum(0) - 1  # where each kept value stands among the entries
    source = torch.repeat_interleave(extra + 1)
    back = last[source] - torch.arange(len(source), device=row.device)  # 0 for the kept value itself
    bridge = before[source] + (LONGEST + 1) * (extra[source] - back + 1)
    is_bridge = back > 0
    return (
        row[source],
        torch.where(is_bridge, bridge, column[source]),
        values[source].masked_fill(is_bridge, 0),
    )


def _ordered(codes: Tensor) -> Tensor:
    """Two codes to a byte, in the order that kernels take them apart."""
    unit = codes.view(-1, 2, UNIT // 2)
    return (unit[:, 0] | unit[:, 1] << 4).reshape(-1)


def _natural(packed: Tensor) -> Tensor:
    """One code for each entry, in order."""
    unit = packed.view(-1, 1, UNIT // 2)
    return torch.cat([unit & 15, unit >> 4], 1).view(-1)


def _table(counts: Tensor) -> Tensor:
    units, tiles = _units(counts), _tiles(counts)
    columns = [torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (units, tiles)]
    if columns[0][-1] * UNIT >= 1 << 31:
        raise ValueError(f"{int(columns[0][-1]) * UNIT:,} kept values are more than a matrix in gap form can have")
    return torch.stack([*columns, torch.cat([counts, counts.new_zeros(1)])], 1).to(torch.int32)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry its row, and its place in it."""
    row = torch.repeat_interleave(counts)
    return row, torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]


def _units(counts: Tensor) -> Tensor:
    return (counts + UNIT - 1) // UNIT


def _tiles(counts: Tensor) -> Tensor:
    """An even number: the heads of two tiles are read as one word."""
    return (counts + 2 * TILE - 1) // (2 * TILE) * 2


def _blocks(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Runs of rows of about ``PIECE`` weights that begin at a whole byte of bits."""
    step = max(8, PIECE // max(1, width) // 8 * 8)
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _joined(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *parts])
