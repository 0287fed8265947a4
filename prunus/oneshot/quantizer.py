"""Kept weights onto a grid of few bits, so that outputs stay: GPTQ, then coordinate descent; and the step that does it.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) rounds column by column. With U the upper Cholesky factor
of H^-1, H = X X^T + lam, the error of column j, divided by U_jj, times row j of U is taken from the later columns. A
pruned weight stays zero: what it would take on is an error of its column too. So columns make up for each other as if
all of them were kept, and on the support of a sparse matrix something is left to gain: sweeps of coordinate descent
give each scale, then each kept weight, the value that makes (Q - W) H (Q - W)^T smallest while all others stay.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..grids import OnGrid
from ..ops.grid import Grid
from ..ranks import Ranks
from .gram import Moments
from .problem import Problem
from .resources import Clock
from .row_share import RowShare
from .shared_work import divided
from .solver import damped_enough, inverse_of
from .step import Change, LayerRepair, Layers, Step, mean_error

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


@dataclass(frozen=True)
class Quantize:
    """Puts weights that ``first`` leaves, or all that are not zero, onto a grid, except those that are ``skipped``."""

    grid: Grid
    first: Step | None = None
    skipped: Collection[str] = ()
    clock: Clock = field(default_factory=Clock)
    ranks: Ranks | None = None  # that divide the work, as those of ``Solve``

    @property
    def targets(self) -> Literal["dense", "own"]:
        return "own" if self.first is None else self.first.targets

    def __call__(self, layers: Layers) -> dict[str, Change]:
        if not any(layers.moments):
            return {}
        changes = {name: Change(weight != 0) for name, weight in layers.weights.items()}
        if self.first is not None:
            changes = self.first(layers)
        own = {name: change for name, change in changes.items() if name not in self.skipped}
        before = {name: _values(layers.weights[name], change) for name, change in own.items()}
        num_parts, device = len(layers.moments), next(iter(layers.weights.values())).device

        def part(i: int) -> dict[str, Change]:
            return self._part(before, layers.weights, i, num_parts, layers.moments[i])

        parts = divided(self.ranks if num_parts > 1 else None, num_parts, part, device)
        return changes | {
            name: _quantised(change, [part[name] for part in parts], self.grid) for name, change in own.items()
        }

    def _part(
        self, before: Mapping[str, Tensor], dense: Mapping[str, Tensor], i: int, num_parts: int, moments: Moments | None
    ) -> dict[str, Change]:
        """Part ``i`` of the rows of every layer, all of which read the same inputs."""
        if not before:
            return {}
        before, dense = ({name: own[name].chunk(num_parts)[i] for name in before} for own in (before, dense))
        if moments is None:
            return {name: _change(*nearest(rows, rows != 0, self.grid), self.grid) for name, rows in before.items()}
        gram, ranks = moments.gram, self.ranks if num_parts == 1 else None
        share = RowShare(before, ranks)
        before, dense = share.own(before), share.own(dense)

        def attempt(damping: float) -> dict[str, Change] | None:
            with self.clock.part("bits"):
                shifted = damped(gram, damping)
                factor = factor_of(shifted, self.clock)
                return None if factor is None else _solved(before, shifted, factor, self.grid)

        changes = damped_enough(attempt, DAMPING, before, moments)
        problem = Problem.of(dense, moments, self.targets == "dense", DAMPING, ranks=ranks)
        rows = torch.cat([_values(dense[name], change).to(problem.weight.dtype) for name, change in changes.items()])
        errors = problem.relative_errors(problem.costs(rows, rows != 0))
        energies = (problem.layer_sums(problem.energy) * problem.unit).tolist()
        changes = share.whole_changes(changes)
        return {
            name: replace(changes[name], energy=energy, repair=LayerRepair(bits_error=error))
            for name, energy, error in zip(changes, energies, errors, strict=True)
        }


@dataclass(frozen=True)
class Nearest:
    """Rounds every weight that ``first`` leaves to the nearest value of its grid, where no inputs are known."""

    grid: Grid
    skipped: Collection[str] = ()
    first: Callable[[Layers], dict[str, Change]] | None = None

    def __call__(self, layers: Layers) -> dict[str, Change]:
        changes = {name: Change(weight != 0) for name, weight in layers.weights.items()}
        if self.first is not None:
            changes = self.first(layers)
        for name in changes.keys() - set(self.skipped):
            weight = _values(layers.weights[name], changes[name])
            changes[name] = _change(*nearest(weight, weight != 0, self.grid), self.grid)
        return changes


def _values(weight: Tensor, change: Change) -> Tensor:
    return weight * change.mask if change.weight is None else change.weight


def _change(values: Tensor, scales: Tensor, grid: Grid) -> Change:
    return Change(values != 0, values, on_grid=OnGrid(grid, scales))


def _solved(weights: Mapping[str, Tensor], gram: Tensor, factor: Tensor, grid: Grid) -> dict[str, Change]:
    """Layers of one dtype are one matrix: rows do not depend on each other, and columns are gone through once."""

    def solved(rows: Tensor) -> tuple[Tensor, Tensor]:
        return descended(rows, *gptq(rows, rows != 0, factor, grid), gram, grid)

    if len({weight.dtype for weight in weights.values()}) > 1:
        return {name: _change(*solved(weight), grid) for name, weight in weights.items()}
    sizes = [len(weight) for weight in weights.values()]
    values, scales = (matrix.split(sizes) for matrix in solved(torch.cat([*weights.values()])))
    return {name: _change(value, scale, grid) for name, value, scale in zip(weights, values, scales, strict=True)}


def _quantised(before: Change, parts: Sequence[Change], grid: Grid) -> Change:
    error = mean_error([part.repair.bits_error for part in parts], parts)
    return replace(
        before,
        weight=torch.cat([part.weight for part in parts if part.weight is not None]),
        on_grid=OnGrid(grid, torch.cat([part.on_grid.scales for part in parts if part.on_grid is not None])),
        repair=replace(before.repair, bits_error=error),
    )
