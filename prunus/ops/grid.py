"""Kept weights in few bits: a code for each, and a scale for each row and group of columns.

A kept weight is ``scale * (c - (2^b - 1) / 2)`` with a code c from 0 to 2^b - 1. No code is zero, so the zeros of a
matrix on its grid are exactly its pruned weights. Scales are bfloat16 numbers. A weight is on its grid if it is the
value of its code, rounded to the dtype of the weight: codes follow from weights and scales.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bits
from .compact import compact, expand
from .lazy import as_rows, from_rows

GROUP = 128  # columns that share a scale
FEWEST, MOST = 2, 8  # bits that a grid may have
CLIPPINGS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the largest value: those that are tried for a scale


@dataclass(frozen=True)
class Grid:
    """Codes of ``bits`` bits; ``group`` columns of a row share a scale, and the last group may be shorter.

    ``outputs`` are the dimensions of the weight that count rows, as (0,) of a linear layer or a convolution.
    """

    bits: int = 4
    group: int = GROUP
    outputs: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not FEWEST <= self.bits <= MOST:
            raise ValueError(f"a grid has {FEWEST} to {MOST} bits, got {self.bits!r}")
        if self.group < 1:
            raise ValueError(f"a group has at least one column, got {self.group!r}")

    @property
    def middle(self) -> float:
        """What is subtracted from a code, before the scale multiplies it."""
        return (2**self.bits - 1) / 2

    def num_groups(self, num_columns: int) -> int:
        return -(-num_columns // self.group)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows, groups) of the scales of a weight of this shape."""
        num_rows = math.prod(shape[dim] for dim in self.outputs)
        return num_rows, self.num_groups(math.prod(size for dim, size in enumerate(shape) if dim not in self.outputs))

    def allowed(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The nearest bfloat16 number with which no value of a code is zero or infinite in ``dtype``."""
        scales, values = torch.finfo(torch.bfloat16), torch.finfo(dtype)
        least = 4 * max(scales.tiny, values.smallest_normal * values.eps)
        return scale.clamp(least, self.most(dtype)).to(torch.bfloat16).to(scale.dtype)

    def most(self, dtype: torch.dtype) -> float:
        """The largest scale with which no value is infinite in ``dtype``, however it is rounded."""
        scales = torch.finfo(torch.bfloat16)
        return min(scales.max, torch.finfo(dtype).max) / self.middle * (1 - scales.eps)

    def fitted(self, weight: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The scale (row, 1) of least squared error for rows of one group; no kept weight is 0 or infinite by it."""
        kept, dtype = weight * mask, dtype or weight.dtype
        largest = kept.abs().amax(1, keepdim=True)
        best = self.allowed(largest / self.middle, dtype)  # stays where the squares of errors overflow
        least = torch.full_like(largest, torch.inf)
        for clipping in CLIPPINGS:
            scale = self.allowed(largest * (clipping / self.middle), dtype)
            error = ((self.rounded(kept, scale) - kept) * mask).square().sum(1, keepdim=True)
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        return best

    def nearest(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The nearest code of each weight; of two that are as near, the even one."""
        return (weight / scale + self.middle).round().clamp(0, 2**self.bits - 1)

    def rounded(self, weight: Tensor, scale: Tensor) -> Tensor:
        return (self.nearest(weight, scale) - self.middle) * scale

    def codes(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Codes of a weight of any shape, uint8 in that shape; those of zeros mean nothing."""
        rows = as_rows(weight.detach(), self.outputs)
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        for part, by_column in self._parts(scales, rows):
            codes[part] = self.nearest(rows[part].float(), by_column).byte()
        return from_rows(codes, self.outputs, weight.shape)

    def values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of codes in the shape of a weight; for every code, so that a mask must be applied to them."""
        rows = as_rows(codes, self.outputs)
        values = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for part, by_column in self._parts(scales, rows):
            values[part] = ((rows[part].float() - self.middle) * by_column).to(dtype)
        return from_rows(values, self.outputs, codes.shape)

    def holds(self, weight: Tensor, scales: Tensor) -> Tensor:
        """True where a weight is zero or on its grid, in the shape of the weight."""
        weight = weight.detach()
        return (weight == 0) | (self.values(self.codes(weight, scales), scales, weight.dtype) == weight)

    def _parts(self, scales: Tensor, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time, so that float32 copies of a weight stay small, with the scale of each element."""
        num_rows, num_columns = rows.shape
        step = max(1, (bits.CHUNK if rows.is_cpu else 1 << 24) // max(1, num_columns))
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            by_column = scales[part].to(rows.device, torch.float32).repeat_interleave(min(self.group, num_columns), 1)
            yield part, by_column[:, :num_columns]


@dataclass(frozen=True)
class Coded:
    packed: Tensor  # one bit an element, in the order of the flattened weight: whether it is kept
    codes: Tensor  # uint8, one for each kept element, in that order
    scales: Tensor  # (rows, groups), bfloat16
    grid: Grid
    shape: tuple[int, ...]


def coded(weight: Tensor, scales: Tensor, grid: Grid) -> Coded:
    """A weight that is on its grid by its codes; a zero of either sign is pruned."""
    weight, scales = weight.detach(), scales.to(weight.device, torch.bfloat16)
    packed = bits.pack(weight != 0)
    return Coded(packed, compact(grid.codes(weight, scales), packed), scales, grid, tuple(weight.shape))


def decoded(coded: Coded, dtype: torch.dtype) -> Tensor:
    """The weight of codes: kept elements have the values of their codes, all others are +0.0."""
    codes = expand(coded.codes, coded.packed, coded.shape)
    weight = coded.grid.values(codes, coded.scales, dtype).contiguous()
    bits.zero_(weight, coded.packed)
    return weight
