"""The step of the loop that puts the kept weights of a group onto grids of few bits."""

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
from .quantizer import DAMPING, damped, descended, factor_of, gptq, nearest
from .resources import Clock
from .row_share import RowShare
from .shared_work import divided
from .solver import damped_enough
from .step import Change, LayerRepair, Layers, Step, mean_error


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
