"""Kept weights onto a grid of few bits, so that outputs stay: GPTQ, then coordinate descent.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) rounds column by column. With U the upper Cholesky factor
of H^-1, H = X X^T + lam, the error of column j, divided by U_jj, times row j of U is taken from the later columns. A
pruned weight stays zero: what it would take on is an error of its column too. So columns make up for each other as if
all of them were kept, and on the support of a sparse matrix something is left to gain: sweeps of coordinate descent
give each scale, then each kept weight, the value that makes (Q - W) H (Q - W)^T smallest while all others stay.
"""

import torch
from torch import Tensor

from ..ops.grid import Grid
from .resources import Clock
from .solver import inverse_of

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal
SWEEPS = 4  # of coordinate descent; more gain less than a percent of the error each


@torch.no_grad()
def gptq(weight: Tensor, mask: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Values of a matrix (out, in) on a grid, in its dtype, and scales (out, groups), by a ``factor_of`` H."""
    dtype = weight.dtype
    left = weight.to(factor.dtype, copy=True)  # what is still to be rounded
    values, scales = torch.zeros_like(left), []
    for start in range(0, left.shape[1], grid.group):
        here = slice(start, min(start + grid.group, left.shape[1]))
        scales.append(grid.fitted(left[:, here], mask[:, here], dtype))
        columns, kept, panel = _columns(left[:, here]), _columns(mask[:, here]), factor[here, here]
        errors = torch.zeros_like(columns)
        for j, column in enumerate(columns):
            rounded = grid.rounded(column, scales[-1][:, 0]).to(dtype).to(left.dtype) * kept[j]
            errors[j] = (column - rounded) / panel[j, j]
            columns[j + 1 :].addr_(panel[j, j + 1 :], errors[j], alpha=-1)
            column.copy_(rounded)
        values[:, here] = columns.T
        left[:, here.stop :].addmm_(errors.T, factor[here, here.stop :], alpha=-1)
    return values.to(dtype), _joined(scales, len(left), weight)


def _columns(matrix: Tensor) -> Tensor:
    """The columns of a matrix as rows, each in one stretch of memory."""
    return matrix.T.contiguous()


@torch.no_grad()
def descended(
    weight: Tensor, values: Tensor, scales: Tensor, gram: Tensor, grid: Grid, sweeps: int = SWEEPS
) -> tuple[Tensor, Tensor]:
    """Values and scales of smaller error than those given; ``gram`` is H, and zeros stay zeros."""
    dtype, mask = values.dtype, values != 0
    values, scales = values.to(gram.dtype, copy=True), scales.to(gram.dtype, copy=True)
    slope = (values - weight.to(gram.dtype)) @ gram  # half of the gradient
    for _ in range(sweeps):
        for group, start in enumerate(range(0, values.shape[1], grid.group)):
            here = slice(start, min(start + grid.group, values.shape[1]))
            panel, kept = gram[here, here], _columns(mask[:, here])
            columns, own_slope = _columns(values[:, here]), _columns(slope[:, here])
            scales[:, group] = _best_scale_(columns, own_slope, kept, panel, scales[:, group], grid, dtype)
            _best_codes_(columns, own_slope, kept, panel, scales[:, group], grid, dtype)
            change = columns.T - values[:, here]
            values[:, here] += change
            slope.addmm_(change, gram[here])
    return values.to(dtype), scales.to(torch.bfloat16)


def _best_scale_(
    values: Tensor, slope: Tensor, mask: Tensor, panel: Tensor, scale: Tensor, grid: Grid, dtype: torch.dtype
) -> Tensor:
    """The best scale of each row for its codes; columns of values and slope follow where it is better."""
    codes = (grid.nearest(values, scale) - grid.middle) * mask
    curvature = ((panel @ codes) * codes).sum(0)
    step = (slope * codes).sum(0) / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
    moved = grid.allowed(scale - step, dtype)
    change = (codes * moved).to(dtype).to(values.dtype) - values
    is_better = ((panel @ change + 2 * slope) * change).sum(0) < 0
    change *= is_better
    values.add_(change)
    slope.addmm_(panel, change)
    return torch.where(is_better, moved, scale)


def _best_codes_(
    values: Tensor, slope: Tensor, mask: Tensor, panel: Tensor, scale: Tensor, grid: Grid, dtype: torch.dtype
) -> None:
    """The best code of each kept weight, column by column; columns of values follow, and slopes of later ones."""
    for j, column in enumerate(values):
        rounded = grid.rounded(column - slope[j] / panel[j, j], scale).to(dtype).to(values.dtype) * mask[j]
        slope[j + 1 :].addr_(panel[j, j + 1 :], rounded - column)
        column.copy_(rounded)


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


def damped(gram: Tensor, damping: float) -> Tensor:
    """H: the Gram matrix with ``damping`` times the mean of its diagonal added there; 1 for inputs never seen."""
    gram, diagonal = gram.clone(), gram.diagonal()
    gram.diagonal().add_(damping * diagonal.mean()).masked_fill_(diagonal == 0, 1)
    return gram


def factor_of(gram: Tensor, clock: Clock) -> Tensor | None:
    """The upper Cholesky factor of the inverse of H, or None where that fails."""
    inverse = inverse_of(gram, 0.0, clock)
    if inverse is None:
        return None
    factor, info = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if info.item() or not bool(factor.isfinite().all()) else factor
