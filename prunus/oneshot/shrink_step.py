"""The step of the loop that removes units from what a layer reads, and refits the columns that stay.

The refit is least squares on the kept columns K from the dense weights W, with H the Gram matrix of the inputs:

    W_K = (W H_:K + lam W_K) (H_KK + lam)^-1,    lam = damping * mean(diag H)

With own targets these are the values that OBS ends with; dense targets put X_d X^T in the place of H_:K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..ranks import Ranks
from .gram import Moments
from .problem import Problem
from .resources import Clock
from .shared_work import of_first
from .solver import changes_of, damped_enough, descended, inverse_of
from .step import Change, LayerRepair, Layers
from .structured import UnitScore, cheapest

DAMPING = 0.01
STEPS = 30  # of conjugate gradients, in rows of weights of which some are zero already


@dataclass(frozen=True)
class Shrink:
    """Removes the units that cost least, the same from all layers of a group; other layers, and zeros, stay."""

    places: Mapping[str, Tensor]  # by name of a weight: (units, columns) of its matrix (out, in) that belong to each
    num_removed: Mapping[str, int]
    score: UnitScore | None = None  # smallest go; None: structured OBS
    refit: bool = True
    targets: Literal["own", "dense"] = "own"
    clock: Clock = field(default_factory=Clock)
    ranks: Ranks | None = None  # of which the first does the work

    def __call__(self, layers: Layers) -> dict[str, Change]:
        device = next(iter(layers.weights.values())).device
        return of_first(self.ranks, lambda: self._solved(layers), device)

    @torch.no_grad()
    def _solved(self, layers: Layers) -> dict[str, Change]:
        weights = {name: weight for name, weight in layers.weights.items() if name in self.places}
        if not weights:
            return {}
        (some, weight), moments = next(iter(weights.items())), next(iter(layers.moments), None)
        self._check(weights, layers)
        places = self.places[some].to(weight.device)
        if moments is None:
            return self._by_norm(weights, places, self.num_removed[some])

        def attempt(damping: float) -> dict[str, Change] | None:
            problem = Problem.of(weights, moments, self.targets == "dense", damping, layers.live)
            gone = self._gone(problem, moments, places, self.num_removed[some])
            return None if gone is None else self._changes(problem, moments, places, gone)

        return damped_enough(attempt, DAMPING, weights, moments)

    def _check(self, weights: Mapping[str, Tensor], layers: Layers) -> None:
        (some, *others), num_moments = weights, len(layers.moments)
        if num_moments > 1:
            problem = f"units can be removed only from layers with one input, but {some} reads {num_moments}"
            raise ValueError(f"{problem} (a grouped convolution, an attention or a stack of experts); leave it out")
        num, units = self.num_removed[some], len(self.places[some])
        if not 0 <= num < units:
            raise ValueError(f"cannot remove {num} of the {units} units that {some} reads: at least one must stay")
        for name in others:
            if self.num_removed[name] != num or not torch.equal(self.places[name], self.places[some]):
                raise ValueError(f"{some} and {name} read the same inputs, so the same units must go from both")
        for name, weight in weights.items():
            if not bool(weight.isfinite().all()):
                raise ValueError(f"weights of {name} are NaN or inf; repair or reload the model first")

    def _gone(self, problem: Problem, moments: Moments, places: Tensor, num: int) -> Tensor | None:
        """The units that go; None where the Gram matrix needs more damping."""
        with self.clock.part("selection"):
            if self.score is not None:
                return _smallest(self.score(problem.weight, moments), places, num)
            if not num:
                return places.new_empty(0)
            if (inverse := inverse_of(problem.gram, 0.0, self.clock)) is None:
                return None
            scaled = problem.scaled()
            if problem.unseen is not None:
                scaled.masked_fill_(problem.unseen, 0)  # removing an input that is always zero costs nothing
            units, costs = cheapest(scaled, inverse, places, num)
            return units if bool(costs.isfinite().all()) else None

    def _changes(self, problem: Problem, moments: Moments, places: Tensor, gone: Tensor) -> dict[str, Change] | None:
        """The layers without some units; None where the Gram matrix needs more damping."""
        keep = _all_but(places[gone].flatten(), len(problem.scale))
        support = problem.live & keep
        best = mask = problem.masked(support)
        if self.refit and len(gone):
            with self.clock.part("refine"):
                if (values := _refit(problem, keep)) is None:
                    return None
                best = problem.candidate(_without_zeros(problem, support, values, values), support)
                if problem.live_by_layer:  # weights of a pruned model are nearer than a refit without its zeros
                    dense = _without_zeros(problem, support, values, problem.scaled())
                    best = problem.better(best, problem.candidate(dense, support), mask)
        shifts, units = problem.split(self._shift(problem, best.weight, moments)), _all_but(gone, len(places))
        return {
            name: replace(change, bias=shifts[name], units=units)
            for name, change in changes_of(problem, mask, best).items()
        }

    def _shift(self, problem: Problem, weight: Tensor, moments: Moments) -> Tensor:
        """``W mean(x_d) - W' mean(x)``: biases that rise by it keep the mean outputs as they were."""
        dtype, wanted = problem.weight.dtype, moments.mean
        if self.targets == "dense" and moments.dense_mean is not None:
            wanted = moments.dense_mean
        assert moments.mean is not None and wanted is not None
        return problem.weight @ wanted.to(dtype) - weight @ moments.mean.to(dtype)

    def _by_norm(self, weights: Mapping[str, Tensor], places: Tensor, num: int) -> dict[str, Change]:
        """For layers that no token reached: the columns of smallest norm go, and nothing is refitted."""
        weight = torch.cat([weight.float() for weight in weights.values()])
        gone = _smallest(weight.square().sum(0), places, num)
        keep, units = _all_but(places[gone].flatten(), weight.shape[1]), _all_but(gone, len(places))
        repair = LayerRepair(not_repaired="no sample reached it")
        return {name: Change((weight != 0) & keep, repair=repair, units=units) for name, weight in weights.items()}


def _all_but(gone: Tensor, num: int) -> Tensor:
    return torch.ones(num, dtype=torch.bool, device=gone.device).index_fill_(0, gone, False)


def _smallest(scores: Tensor, places: Tensor, num: int) -> Tensor:
    """The ``num`` units whose columns' scores have the smallest sums; of equal ones the first."""
    return scores[places].sum(1).argsort(stable=True)[:num]


def _without_zeros(problem: Problem, support: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """``values`` with least squares on the support, from ``start``, in the rows that have zeros already."""
    rows = (~problem.live).any(1).nonzero().squeeze(1)
    solved = descended(problem.gram, problem.targets[rows], support[rows], start[rows], STEPS)
    return values.index_copy(0, rows, solved)


def _refit(problem: Problem, keep: Tensor) -> Tensor | None:
    """Scaled weights on the kept columns by least squares; None where their Gram matrix has no Cholesky factor."""
    columns = keep.nonzero().squeeze(1)
    factor, info = torch.linalg.cholesky_ex(problem.gram[columns][:, columns])
    if info.item():
        return None
    solution = torch.cholesky_solve(problem.targets[:, columns].T, factor).T
    return torch.zeros_like(problem.weight).index_copy_(1, columns, solution)
