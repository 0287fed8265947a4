"""A sparse matrix as its values and the steps between them: the form that products read.

A row is a list of entries in order of their columns. Four bits an entry say how many columns it is from the one
before, so that finding a column takes no counting of bits. A step longer than ``LONGEST`` is split by entries of value
zero. At 50 % in bfloat16 it takes 0.63 of the dense bytes, at 80 % 0.26.

A block is 256 entries, for the 32 lanes of a warp a unit of eight each. It has two runs of neighbouring
entries: the first four of every unit, lane after lane, then the other four. So lanes are never far
from one another in the row, and what they read of a vector is close together. The first column of a run is stored.
The last block of a row has as many lanes as it needs; its last units are filled up with zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops import bits

LONGEST = 15  # columns from one entry to the next
RUN = 4  # neighbouring entries of a lane; a byte of codes has the first run's in its low four bits
RUNS = 2
UNIT = RUN * RUNS
LANES = 32
BLOCK = UNIT * LANES
WIDEST = 1 << 16  # columns: the first one of a run is stored as 16 bits
CHUNK = 1 << 22  # weights packed or unpacked at a time


class Launches(dict[Any, Any]):
    """What kernels keep of earlier calls, addresses too, so that a copy of a form begins without."""

    def __deepcopy__(self, memo: dict) -> "Launches":
        return Launches()

    def __reduce__(self) -> tuple:
        return Launches, ()


@dataclass(frozen=True)
class Gaps:
    """A matrix (out, in); a row of ``rows`` has a row's first unit, first block and number of entries."""

    values: Tensor  # (units * UNIT,), of the matrix's type
    codes: Tensor  # (units * UNIT / 2,), uint8
    heads: Tensor  # (blocks * RUNS,), int16: the 16 bits of a run's first column
    rows: Tensor  # (out + 1, 3), int32
    shape: tuple[int, int]
    launches: Launches = field(default_factory=Launches, repr=False, compare=False)

    PARTS = ("values", "codes", "heads", "rows")

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.PARTS)

    def clone(self) -> "Gaps":
        return Gaps(*(getattr(self, name).clone() for name in self.PARTS), shape=self.shape)

    def dense(self) -> Tensor:
        num_rows, width = self.shape
        flat = torch.zeros(num_rows * width + 1, dtype=self.values.dtype, device=self.values.device)
        for first, last in row_blocks(num_rows, width) if len(self.values) else ():
            slots = slots_of(self, first, last)
            place = slots.column + (slots.row * width)[:, None, None, None]
            place.masked_fill_(~slots.is_entry, num_rows * width)  # what is no entry goes behind the matrix
            flat.scatter_(0, place.view(-1), slots.value.reshape(-1))
        return flat[:-1].view(num_rows, width)

    def check(self) -> None:
        """ValueError unless every place that a product would read exists: for forms that come from a file."""
        num_rows, width = self.shape
        table = self.rows
        whole = table.dtype == torch.int32 and table.shape == (num_rows + 1, 3) and bool((table >= 0).all())
        whole = whole and torch.equal(table, _table(table[:-1, 2].long()))
        num_units, num_blocks = (int(table[-1, 0]), int(table[-1, 1])) if whole else (0, 0)
        whole = whole and self.values.shape == (num_units * UNIT,) and self.heads.shape == (num_blocks * RUNS,)
        whole = whole and self.codes.shape == (num_units * UNIT // 2,)
        whole = whole and (self.codes.dtype, self.heads.dtype) == (torch.uint8, torch.int16)
        if not whole or width > WIDEST:
            raise ValueError(f"the parts of a sparse {num_rows} x {width} matrix do not fit together; save it again")
        for first, last in row_blocks(num_rows, width) if num_units else ():
            if bool((slots_of(self, first, last).column >= width).any()):
                raise ValueError(f"a sparse {num_rows} x {width} matrix has a column beyond its last; save it again")


def gaps_of(packed: Tensor, values: Tensor, shape: Sequence[int]) -> Gaps:
    """The matrix of ``shape`` that keeps ``values``, in row-major order, where the bits of ``packed`` are set."""
    num_rows, width = shape
    if width > WIDEST:
        raise ValueError(f"a row may have at most {WIDEST} columns, got {width}")
    if bits.num_bytes(num_rows * width) > len(packed):
        raise ValueError(f"{num_rows} x {width} elements need {bits.num_bytes(num_rows * width)} bytes of mask bits")
    bits.check_count(int(bits.count(packed[: bits.num_bytes(num_rows * width)])), len(values))
    kinds, used = (values.dtype, torch.uint8, torch.int16, torch.int64), 0
    parts = [tuple(torch.empty(0, dtype=kind, device=values.device) for kind in kinds)]
    for first, last in row_blocks(num_rows, width):
        keep = bits.unpack(packed[first * width // 8 : bits.num_bytes(last * width)], (last - first, width))
        num_kept = int(keep.sum())
        parts.append(_packed(keep, values[used : used + num_kept]))
        used += num_kept
    values, codes, heads, counts = (torch.cat(each) for each in zip(*parts, strict=True))
    return Gaps(values, codes, heads, _table(counts), (num_rows, width))


def gaps_of_dense(weight: Tensor) -> Gaps:
    """The gap form of a matrix; its zeros are left out, -0.0 too."""
    weight = weight.detach()
    keep = weight != 0
    return gaps_of(bits.pack(keep), weight[keep], (weight.shape[0], weight.shape[1]))


def joined_gaps(parts: Sequence[Gaps]) -> tuple[Gaps, list[Gaps]]:
    """Matrices one below the other, and each again, of which values, codes and heads are views of the whole."""
    tables, start = [], torch.zeros(3, dtype=torch.int32, device=parts[0].rows.device)
    for part in parts:
        tables.append(part.rows[:-1] + start)
        start = start + part.rows[-1]
    cuts = []
    for name in ("values", "codes", "heads"):
        own = [getattr(part, name) for part in parts]
        cuts.append((whole := torch.cat(own), whole.split([len(each) for each in own])))
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    (values, *_), (codes, *_), (heads, *_) = cuts
    whole = Gaps(values, codes, heads, torch.cat([*tables, start[None]]), shape)
    views = zip(*(cut[1] for cut in cuts), parts, strict=True)
    return whole, [Gaps(v, c, h, part.rows, part.shape) for v, c, h, part in views]


@dataclass(frozen=True)
class Slots:
    """Every place of a run of blocks, (blocks, RUNS, LANES, RUN), which is the order of columns; some hold nothing."""

    row: Tensor  # (blocks,)
    column: Tensor
    value: Tensor
    is_entry: Tensor


def slots_of(gaps: Gaps, first: int, last: int) -> Slots:
    table = gaps.rows[first : last + 1].long()
    num_blocks = table[1:, 1] - table[:-1, 1]
    row = torch.repeat_interleave(num_blocks)
    first_block = (num_blocks.cumsum(0) - num_blocks)[row]
    block = torch.arange(len(row), device=row.device) - first_block  # its number in the row
    left = table[row, 2] - block * BLOCK  # entries from here to the end of the row
    lanes = (-(-left // UNIT)).clamp(max=LANES)
    run, lane, place = (torch.arange(num, device=row.device) for num in (RUNS, LANES, RUN))
    is_unit = lane < lanes[:, None]
    unit = torch.where(is_unit, (table[row, 0] + block * LANES)[:, None] + lane, 0)
    codes = gaps.codes.view(-1, RUN)[unit].masked_fill_(~is_unit[:, :, None], 0)
    steps = torch.stack([codes & 15, codes >> 4], 1).view(-1, RUNS, LANES * RUN)
    heads = gaps.heads.view(-1, RUNS)[int(table[0, 1]) : int(table[-1, 1])].int() & (WIDEST - 1)
    column = (steps.cumsum(2, dtype=torch.int32) + heads[:, :, None]).view(-1, RUNS, LANES, RUN)
    value = gaps.values.view(-1, RUNS, RUN)[unit].transpose(1, 2)
    index = run[:, None, None] * RUN * lanes[:, None, None, None] + lane[:, None] * RUN + place  # among the entries
    return Slots(row + first, column, value, (index < left[:, None, None, None]) & is_unit[:, None, :, None])


def _packed(keep: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, codes, heads and number of entries of each row, for a few rows."""
    row, column, value = entries_of(keep, values, LONGEST)
    counts = torch.bincount(row, minlength=len(keep))
    units, blocks = -(-counts // UNIT), -(-counts // BLOCK)
    index = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    block, index = index // BLOCK, index % BLOCK
    length = RUN * (-((block * BLOCK - counts[row]) // UNIT)).clamp(max=LANES)  # entries of a run
    run, index = index // length, index % length
    unit = (units.cumsum(0) - units)[row] + block * LANES + index // RUN
    place = unit * UNIT + run * RUN + index % RUN
    is_head = index == 0
    out = values.new_zeros(int(units.sum()) * UNIT)
    out[place] = value
    codes = torch.zeros(len(out), dtype=torch.uint8, device=row.device)
    codes[place] = column.diff(prepend=column[:1]).masked_fill(is_head, 0).to(torch.uint8)
    heads = torch.zeros(int(blocks.sum()) * RUNS, dtype=torch.int16, device=row.device)
    heads[(((blocks.cumsum(0) - blocks)[row] + block) * RUNS + run)[is_head]] = column[is_head].to(torch.int16)
    pairs = codes.view(-1, RUNS, RUN)
    return out, (pairs[:, 0] | pairs[:, 1] << 4).reshape(-1), heads, counts


def entries_of(keep: Tensor, values: Tensor, longest: int, nothing: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of each entry: the kept ones, and others wherever a step is longer than ``longest``.

    Those have the value ``nothing``, and stand before the first kept one too; without it, zero, and not there.
    """
    row, column = keep.nonzero(as_tuple=True)
    before = torch.cat([column.new_full((1,), -1), column])[:-1]
    is_first = row.diff(prepend=row.new_full((1,), -1)) != 0
    before = before.masked_fill(is_first, -1)
    extra = (column - before - 1) // longest
    if nothing is None:
        extra = extra.masked_fill(is_first, 0)
    last = (extra + 1).cumsum(0) - 1  # where each kept value stands among the entries
    source = torch.repeat_interleave(extra + 1)
    back = last[source] - torch.arange(len(source), device=row.device)  # 0 for the kept value itself
    between = before[source] + longest * (extra[source] - back + 1)
    is_between = back > 0
    columns = torch.where(is_between, between, column[source])
    return row[source], columns, values[source].masked_fill(is_between, nothing or 0)


def _table(counts: Tensor) -> Tensor:
    columns = [torch.cat([counts.new_zeros(1), (-(-counts // size)).cumsum(0)]) for size in (UNIT, BLOCK)]
    if columns[0][-1] * UNIT >= 1 << 31:
        raise ValueError(f"{int(columns[0][-1]) * UNIT:,} kept values are more than the gap form can store")
    return torch.stack([*columns, torch.cat([counts, counts.new_zeros(1)])], 1).to(torch.int32)


def row_blocks(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Neighbouring rows of about ``CHUNK`` weights that begin at a whole byte of bits."""
    step = max(8, CHUNK // max(1, width) // 8 * 8)
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)
