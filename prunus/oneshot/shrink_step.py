"""Which units of a layer go, by structured OBS or a score, and the step of the loop that refits the columns that stay.

W (out, in) are the dense weights of the layer that reads the units, S the columns of one unit, and I the inverse of the
damped Gram matrix of its inputs. Removing a unit and refitting all other columns costs

    sum_i W_iS (I_SS)^-1 W_iS^T,    and then W -= W_S (I_SS)^-1 I_S:,    I -= I_:S (I_SS)^-1 I_S:

The cheapest unit goes, one after another; of equal ones the first (Hassibi and Stork 1993; ZipLM, Kurtic et al. 2023,
https://arxiv.org/abs/2302.04089). Costs do not change with the scale of a column, so scaled weights will do. The refit
is least squares on the kept columns K, with H the Gram matrix of the inputs:

    W_K = (W H_:K + lam W_K) (H_KK + lam)^-1,    lam = damping * mean(diag H)

With own targets these are the values that OBS ends with; dense targets put X_d X^T in the place of H_:K.
"""

import math
from collections.abc import Callable, Mapping
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

BLOCK = 256  # columns that go between two updates of the matrices
UnitScore = Callable[[Tensor, Moments], Tensor]  # (weight (out, in), moments) -> scores of the columns (in,)


def cheapest(weight: Tensor, inverse: Tensor, places: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The ``num`` units that go, in order, and what each costs; a cost is NaN or inf where rounding spoils the rest.

    A = W^T W is all that costs need of the weights. With R I_SS R^T = 1, the rows u = R I_S: and
    v = R A_S: - R A_SS R^T u / 2 make I -= u^T u, A -= u^T v + v^T u, and the cost is tr(R A_SS R^T).
    """
    columns = places.flatten()
    weight = weight[:, columns]
    pair = torch.stack([inverse[columns][:, columns], weight.T @ weight], 1)  # (in, 2, in): rows of I and A
    return _cheapest_columns(pair, num) if places.shape[1] == 1 else _cheapest_wide(pair, places.shape[1], num)


def _cheapest_wide(pair: Tensor, width: int, num: int) -> tuple[Tensor, Tensor]:
    """Units of ``width`` columns; the matrices are brought up to date after each removal."""
    eye = torch.eye(width, dtype=pair.dtype, device=pair.device)
    rows = pair.unflatten(0, (-1, width))  # (units, width, 2, in)
    blocks = rows.unflatten(3, (-1, width)).diagonal(dim1=0, dim2=3).permute(1, 3, 0, 2)  # (2, units, width, width)
    is_gone = torch.zeros(len(rows), dtype=torch.bool, device=pair.device)
    units, costs = [], []
    for _ in range(num):
        own = torch.where(is_gone.view(-1, 1, 1), eye, blocks[0])
        root = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(own).L, eye, upper=False)
        whitened = root @ blocks[1]
        cost, unit = (whitened * root).sum((1, 2)).masked_fill_(is_gone, math.inf).min(0, keepdim=True)
        one = root.index_select(0, unit)[0]
        u, v = (one @ row for row in rows.index_select(0, unit)[0].unbind(1))
        v = torch.addmm(v, whitened.index_select(0, unit)[0] @ one.T, u, alpha=-0.5)
        _update_(pair, u, v)
        is_gone.index_fill_(0, unit, True)
        units.append(unit)
        costs.append(cost)
    return torch.cat(units), torch.cat(costs)


def _cheapest_columns(pair: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Units of one column: the matrices are brought up to date, and smaller, after each ``BLOCK`` of removals.

    Here A and v are twice as large, so that one product of u with both rows changes both diagonals.
    """
    pair[:, 1].mul_(2)
    left = torch.arange(len(pair), device=pair.device)
    units, costs = [], []
    for start in range(0, num, BLOCK):
        unit, cost, rows = _next_columns(pair, min(BLOCK, num - start))
        units.append(left[unit])
        costs.append(cost)
        if start + BLOCK < num:
            stay = torch.ones_like(left).index_fill_(0, unit, 0).nonzero().squeeze(1)
            left, pair = left[stay], pair.index_select(0, stay).index_select(2, stay)
            _update_(pair, *rows.index_select(2, stay))
    return torch.cat(units), torch.cat(costs)


def _next_columns(pair: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns to remove, what each costs, and the rows u and v of all: (2, num, in). The host waits for nothing."""
    rows = pair.new_empty(2, num, len(pair))
    diagonals = pair.diagonal(dim1=0, dim2=2).contiguous()  # (2, in): of I, and of W^T W
    diagonals[1] /= 2
    never = pair.new_tensor([[1.0], [math.inf]])
    units, costs = [], []
    for k in range(num):
        cost, unit = (diagonals[1] / diagonals[0]).min(0, keepdim=True)
        before = rows[:, :k]
        here = before.index_select(2, unit).squeeze(2)
        row = torch.addmm(pair.index_select(0, unit)[0], here, before[0], alpha=-1)  # of I, and of A
        row[1:].addmm_(here[:1], before[1], alpha=-1)
        row[1].addcmul_(row[0], cost, value=-1)
        new = torch.mul(row, row[0].index_select(0, unit).rsqrt(), out=rows[:, k])
        diagonals.addcmul_(new[0], new, value=-1)
        diagonals.index_copy_(1, unit, never)
        units.append(unit)
        costs.append(cost)
    return torch.cat(units), torch.cat(costs), rows


def _update_(pair: Tensor, u: Tensor, v: Tensor) -> None:
    pair[:, 0].addmm_(u.T, u, alpha=-1)
    pair[:, 1].addmm_(u.T, v, alpha=-1).addmm_(v.T, u, alpha=-1)


@dataclass(frozen=True)
class RandomScore:
    """The same columns for layers of the same width."""

    seed: int = 0

    def __call__(self, weight: Tensor, moments: Moments) -> Tensor:
        return torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(self.seed)).to(weight.device)


def norm(weight: Tensor, moments: Moments) -> Tensor:
    return weight.square().sum(0)


def summed_wanda(weight: Tensor, moments: Moments) -> Tensor:
    """WANDA's scores, summed over outputs."""
    return weight.abs().sum(0) * moments.gram.diagonal().sqrt()


def flap(weight: Tensor, moments: Moments) -> Tensor:
    """Squared norm times the variance of the input (An et al. 2024, https://arxiv.org/abs/2312.11983)."""
    assert moments.mean is not None
    variance = moments.gram.diagonal() / moments.num_tokens - moments.mean.square()
    return norm(weight, moments) * variance.clamp_(min=0)


# scores that comparisons give to Shrink in place of OBS
UNIT_SCORES: dict[str, UnitScore] = {"random": RandomScore(), "norm": norm, "wanda": summed_wanda, "flap": flap}


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
