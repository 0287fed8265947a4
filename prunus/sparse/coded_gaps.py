"""A sparse matrix with 4-bit codes as lists of steps and codes, a byte an entry, for products with one vector.

A tile is 16 rows by 256 columns. Each of the 32 lanes of a warp has one row's 128 columns of it, which share a scale:
lane 16 q + r those of row r and half q. Its entries are in order of their columns, all lists of a tile as long as the
longest, and words of four entries are stored lane after lane. So the lanes advance together: what they read of a vector
is close together, and a list needs no start but that of its tile. A product costs as many steps as the longest list has
entries, so it is faster where more is pruned.

The low three bits of an entry say how many columns it is after the one before, 1 to ``LONGEST``; the others are twice
the code, or ``NOTHING``, 15, of an entry that bridges a longer step or fills up a list: ``scale * (v - 15) / 2`` is its
weight. A tile begins with a word for each lane, the bfloat16 scale and below it the number of words of a list.
At 50 % it takes 0.32 of the bytes in bfloat16, at 80 % 0.17.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.grid import GROUP, Coded, Grid, coded
from .coded_tiles import BITS, can_code
from .gaps import LANES, entries_of
from .tiles import ROWS, TileForm, are_places, joined_parts, misfit, row_parts

LONGEST = 8  # columns from one entry to the next
NOTHING = 15
IN_WORD = 4  # entries
UNITS = LANES // 4  # of 16 bytes, in a word of every lane
HALVES = LANES // ROWS
CHUNK = 1 << 10  # tiles packed or unpacked at a time


@dataclass(frozen=True)
class CodedGaps(TileForm):
    """Tiles of lists of entries; ``data`` is (units * 4,), int32, and ``dtype`` that of the values."""

    TILE_COLUMNS = HALVES * GROUP

    def dense(self) -> Tensor:
        parts = [_codes(self, first) for first in range(0, len(self.starts) - 1, CHUNK)]
        if not parts:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        codes, keep = (_matrix(torch.cat(part), self)[:, : self.shape[1]] for part in zip(*parts, strict=True))
        return Grid(BITS).values(codes, self.scales(), self.dtype) * keep

    def scales(self) -> Tensor:
        """The scales (out, groups); those of rows and groups without a weight are the smallest one."""
        upper = (_heads(self) >> 16).to(torch.int16).view(torch.bfloat16)
        scales = _matrix(upper[:, :, None], self)[:, : -(-self.shape[1] // GROUP)]
        return scales.masked_fill(scales == 0, torch.finfo(torch.bfloat16).tiny)

    def check(self) -> None:
        width, starts = self.shape[1], self.starts
        whole, sizes = are_places(self, torch.int32, UNITS, UNITS * (1 + GROUP // IN_WORD)), starts.diff()
        whole = whole and bool((UNITS * (1 + (_heads(self) & 0xFFFF)) == sizes[:, None]).all())
        for first in range(0, len(starts) - 1 if whole else 0, CHUNK):
            column, value = _entries(self, first)
            tile = torch.arange(first, first + len(column), device=starts.device)[:, None]
            group = tile % self.across * HALVES + torch.arange(LANES, device=starts.device) // ROWS
            is_inside = column < (width - group * GROUP).clamp(0, GROUP)[:, :, None]
            is_entry = (value == NOTHING) | ((value % 2 == 0) & is_inside)
            whole = whole and bool((is_entry & (column < 2 * GROUP)).all())
        if not whole:
            raise misfit(self)


def coded_gaps_of(weight: Coded, dtype: torch.dtype) -> CodedGaps:
    """The lists of a matrix (out, in) by its codes, whose values are of ``dtype``."""
    assert can_code(weight.grid) and weight.grid.outputs == (0,)
    parts = [
        _packed(codes, keep, weight.scales[first : first + len(keep)])
        for first, codes, keep in row_parts(weight.packed, weight.codes, weight.shape, CHUNK * LANES * GROUP)
    ]
    return CodedGaps(*joined_parts(parts, weight.codes.new_empty(0, dtype=torch.int32), weight.shape, dtype))


def coded_gaps_of_dense(weight: Tensor, scales: Tensor) -> CodedGaps:
    """The lists of a matrix that is on the grid of these scales, (out, groups)."""
    return coded_gaps_of(coded(weight.contiguous(), scales, Grid(BITS)), weight.dtype)


def _packed(codes: Tensor, keep: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    keep, codes, scales = (_lists(part, size) for part, size in ((keep, GROUP), (codes, GROUP), (scales, 1)))
    num_tiles = len(keep)
    which, column, value = entries_of(keep.view(-1, GROUP), 2 * codes[keep], LONGEST, NOTHING)
    counts = torch.bincount(which, minlength=num_tiles * LANES)
    index = torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[which]
    words = -(-counts.view(num_tiles, LANES).amax(1) // IN_WORD)
    units = UNITS * (1 + words)
    start = (units.cumsum(0) - units) * 4
    data = torch.full((int(units.sum()) * 16,), NOTHING << 3, dtype=torch.uint8, device=which.device)
    step = column.diff(prepend=column[:1]).where(index > 0, column + 1)
    place = start[which // LANES] + LANES * (1 + index // IN_WORD) + which % LANES
    data[place * IN_WORD + index % IN_WORD] = (step - 1).to(torch.uint8) | value << 3
    upper = scales.to(torch.bfloat16).view(num_tiles, LANES).masked_fill(~keep.any(2), 0).view(torch.int16).int() << 16
    data = data.view(torch.int32)
    data[start[:, None] + torch.arange(LANES, device=start.device)] = upper | words[:, None].int()
    return data, units


def _lists(matrix: Tensor, size: int) -> Tensor:
    """From rows and columns to (tile, lane, size); a group has ``size`` of these columns."""
    down, across = -(-len(matrix) // ROWS), -(-matrix.shape[1] // (HALVES * size))
    full = pad(matrix, (0, across * HALVES * size - matrix.shape[1], 0, down * ROWS - len(matrix)))
    return full.view(down, ROWS, across, HALVES, size).permute(0, 2, 3, 1, 4).reshape(-1, LANES, size)


def _matrix(lists: Tensor, form: CodedGaps) -> Tensor:
    """From (tile, lane, size) back to rows and columns, of whole tiles."""
    down, size = -(-form.shape[0] // ROWS), lists.shape[2]
    axes = lists.view(down, form.across, HALVES, ROWS, size).permute(0, 3, 1, 2, 4)
    return axes.reshape(down * ROWS, form.across * HALVES * size)[: form.shape[0]]


def _heads(form: CodedGaps) -> Tensor:
    """The first word of every lane, (tile, lane)."""
    return form.data[form.starts[:-1].long()[:, None] * 4 + torch.arange(LANES, device=form.device)]


def _entries(form: CodedGaps, first: int) -> tuple[Tensor, Tensor]:
    """Columns in their group, and values, of all entries of the tiles from ``first`` on, (tile, lane, entry)."""
    start = form.starts[first : first + CHUNK + 1].long()
    num_words = start.diff() // UNITS - 1
    index = torch.arange(int(num_words.max()), device=start.device)
    is_word = index < num_words[:, None]
    place = (start[:-1, None] * 4 + LANES * (1 + index)).masked_fill(~is_word, 0)
    words = form.data[place[:, :, None] + torch.arange(LANES, device=start.device)].contiguous()
    filled = words.view(torch.uint8).view(*words.shape, IN_WORD).masked_fill(~is_word[:, :, None, None], NOTHING << 3)
    entries = filled.transpose(1, 2).reshape(len(words), LANES, -1)
    return ((entries & LONGEST - 1) + 1).cumsum(2, dtype=torch.int32) - 1, entries >> 3


def _codes(form: CodedGaps, first: int) -> tuple[Tensor, Tensor]:
    """Codes, and which are kept, of the tiles from ``first`` on, (tile, lane, column)."""
    column, value = _entries(form, first)
    column = column.long().masked_fill(value == NOTHING, GROUP)  # behind the group
    codes = value.new_zeros(len(value), LANES, GROUP + 1).scatter_(2, column, value >> 1)
    keep = torch.zeros_like(codes, dtype=torch.bool).scatter_(2, column, True)
    return codes[:, :, :GROUP], keep[:, :, :GROUP]
