"""Kept weights onto a grid of few bits: rounded column by column, each error passed on to the columns still to come.

The rounding is that of GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) on the support of a sparse matrix.
With U the upper Cholesky factor of (X X^T + lam)^-1, the error of column j, divided by U_jj, times row j of U is taken
from the later columns. A pruned weight stays zero: what it would take on is an error of its column too.
"""

import torch
from torch import Tensor

from ..ops.grid import Grid
from .resources import Clock
from .solver import inverse_of

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal


@torch.no_grad()
def gptq(
    weight: Tensor, mask: Tensor, factor: Tensor, grid: Grid, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Values of a matrix (out, in) on a grid, as ``dtype`` holds them, and scales (out, groups).

    ``factor`` is that of ``factor_of``. Scales are chosen from the kept values alone, after earlier errors came in.
    """
    dtype = dtype or weight.dtype
    left = weight.to(factor.dtype, copy=True)  # what is still to be rounded
    values, scales = torch.zeros_like(left), []
    for start in range(0, left.shape[1], grid.group):
        here = slice(start, min(start + grid.group, left.shape[1]))
        scale = grid.fitted(left[:, here], mask[:, here], dtype)
        errors = torch.zeros_like(left[:, here])
        for j in range(here.start, here.stop):
            rounded = grid.rounded(left[:, j], scale[:, 0]).to(dtype).to(left.dtype)
            values[:, j] = torch.where(mask[:, j], rounded, 0.0)
            error = (left[:, j] - values[:, j]) / factor[j, j]
            left[:, j : here.stop].addr_(error, factor[j, j : here.stop], alpha=-1)
            errors[:, j - start] = error
        left[:, here.stop :].addmm_(errors, factor[here, here.stop :], alpha=-1)
        scales.append(scale)
    return values.to(dtype), _joined(scales, len(left), weight)


@torch.no_grad()
def nearest(weight: Tensor, mask: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The same by rounding each weight to the nearest value."""
    values, scales = [], []
    for start in range(0, weight.shape[1], grid.group):
        part, kept = weight[:, start : start + grid.group], mask[:, start : start + grid.group]
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        scales.append(grid.fitted(wide, kept, weight.dtype))
        values.append(grid.rounded(wide, scales[-1]).to(weight.dtype) * kept)
    return torch.cat(values, 1) if values else weight.clone(), _joined(scales, len(weight), weight)


def _joined(scales: list[Tensor], num_rows: int, like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(num_rows, 0, dtype=torch.bfloat16), *(s.to(torch.bfloat16) for s in scales)], 1)


def factor_of(gram: Tensor, damping: float, clock: Clock) -> Tensor | None:
    """The upper Cholesky factor of the inverse of the damped Gram matrix, or None where that fails."""
    diagonal = gram.diagonal()
    unseen = diagonal == 0
    if bool(unseen.any()):
        gram = gram.clone()
        gram.diagonal().masked_fill_(unseen, 1)
    inverse = inverse_of(gram, damping * float(diagonal.mean()), clock)
    if inverse is None:
        return None
    factor, info = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if info.item() or not bool(factor.isfinite().all()) else factor
