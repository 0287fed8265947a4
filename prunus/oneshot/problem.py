"""Layers that read the same input, as one least-squares problem in scaled weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from ..ranks import Ranks
from .gram import Moments

SUMMED = 256  # rows


@dataclass(frozen=True)
class Candidate:
    """Weights of a group on a support, as the layers' dtypes hold them, and what each row costs."""

    weight: Tensor  # (rows, in)
    support: Tensor
    damped: Tensor  # (rows,): damped errors, less those of the dense weights
    errors: Tensor  # (rows,): |W' X - W X_d|^2


@dataclass(frozen=True)
class Problem:
    """The rows of all layers, one under another, with inputs scaled so that the damped Gram matrix has diagonal 1.

    Where ``ranks`` divide the rows, these are the ones of this rank, and what is summed by layer is so over all ranks.

    The size of a scaled dense weight is WANDA's score. With d the change of a row of scaled weights from the dense
    ones, its damped error changes by ``d G d^T - 2 d t^T``. Errors are in units of ``mean(diag X X^T)``.
    """

    weights: Mapping[str, Tensor]
    damping: float
    weight: Tensor  # (rows, in): dense, in float32 or better
    gram: Tensor  # G, (in, in): scaled and damped
    scale: Tensor  # (in,)
    drift: Tensor | None  # t, (rows, in): W (X_d - X) X^T, scaled; None where X_d = X or targets are the layer's own
    targets: Tensor  # (rows, in): scaled dense weights times G, plus t
    live: Tensor  # (rows, in): weights that may stay
    unseen: Tensor | None  # (in,): inputs that were zero at every token
    unit: Tensor  # mean(diag X X^T)
    energy: Tensor  # (rows,): |W X_d|^2
    floor: Tensor  # (rows,): |W X - W X_d|^2, what the dense weights leave
    ranks: Ranks | None = None

    @staticmethod
    def of(
        weights: Mapping[str, Tensor],
        moments: Moments,
        dense_targets: bool,
        damping: float,
        live: Mapping[str, Tensor] = MappingProxyType({}),
        ranks: Ranks | None = None,
    ) -> "Problem":
        """Set up the problem; ``moments`` are not changed. ``live`` masks tell what may stay of some layers."""
        _check(weights, moments)
        dtype = moments.gram.dtype
        for dense in weights.values():
            dtype = torch.promote_types(dtype, dense.dtype)
        weight = torch.cat([dense.to(dtype) for dense in weights.values()])

        def energies(matrix: Tensor) -> Tensor:
            return _sums((weight @ matrix).mul_(weight))

        diagonal = moments.gram.diagonal().to(dtype)
        unit = diagonal.mean(dtype=torch.float64).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        unseen = diagonal == 0
        scale = (diagonal / unit + damping).masked_fill(unseen, 1).sqrt()
        gram = moments.gram.to(dtype) / unit
        energy, drift = energies(gram), None
        floor = torch.zeros_like(energy)
        if dense_targets and moments.cross is not None and moments.dense is not None:
            cross = moments.cross.to(dtype) / unit
            own, energy = energy, energies(moments.dense.to(dtype) / unit)
            floor = (own + energy - 2 * energies(cross)).clamp_(min=0)
            drift = (weight @ cross.sub_(gram)).div_(scale)
        gram.div_(scale).div_(scale.unsqueeze(1)).fill_diagonal_(1)
        targets = (weight * scale) @ gram
        alive = weight != 0
        if live:
            alive &= torch.cat([live.get(name, torch.ones_like(dense).bool()) for name, dense in weights.items()])
        targets = targets if drift is None else targets.add_(drift)
        never = unseen if bool(unseen.any()) else None
        matrices = weights, damping, weight, gram, scale, drift, targets, alive
        return Problem(*matrices, never, unit, energy, floor, ranks)

    @cached_property
    def live_by_layer(self) -> dict[str, Tensor]:
        """Weights that may stay; empty where all are live."""
        return {} if bool(self.live.all()) else self.split(self.live)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.weights, rows.split([len(weight) for weight in self.weights.values()]), strict=True))

    def scaled(self) -> Tensor:
        return self.weight * self.scale

    def masked(self, support: Tensor) -> Candidate:
        return self.costs(self.weight * support, support)

    def candidate(self, values: Tensor, support: Tensor) -> Candidate:
        """Scaled values on a support, rounded to the layers' dtypes.

        A row keeps its dense weights where rounding makes them the better ones, and a layer that loses nothing
        keeps all of them.
        """
        weight = torch.sub(values, scaled := self.scaled(), out=scaled).div_(self.scale).add_(self.weight)
        for name, rows in self.split(weight).items():
            _round_(rows, self.weights[name].dtype)
        solved, mask = self.costs(weight.mul_(support), support), self.masked(support)
        is_pruned = self._sum_by_layer((support ^ self.live).sum(1)) > 0
        return _choose_rows(is_pruned & (solved.damped <= mask.damped), solved, mask)

    def better(self, first: Candidate, second: Candidate, mask: Candidate) -> Candidate:
        """The one of smaller damped error, by layer if counts are equal; the second must not lose to ``mask``."""
        same_counts = torch.equal(*(self.layer_sums(one.support.sum(1)) for one in (first, second)))
        total = self._sum_by_layer if same_counts else lambda rows: self.total(rows.sum()).expand_as(rows)
        wins = (total(second.damped) < total(first.damped)) & (total(second.errors) <= total(mask.errors))
        return _choose_rows(wins, second, first)

    def relative_errors(self, found: Candidate) -> list[float]:
        """``|W' X - W X_d|^2 / |W X_d|^2`` of each layer."""
        errors, energies = (self.layer_sums(rows).tolist() for rows in (found.errors, self.energy))
        return [e / of if of > 0 else math.inf if e > 0 else 0.0 for e, of in zip(errors, energies, strict=True)]

    def costs(self, weight: Tensor, support: Tensor) -> Candidate:
        """Weights (rows, in) on a support, and what they cost."""
        change = weight - self.weight
        ridge = torch.full_like(self.scale, self.damping)
        if self.unseen is not None:
            ridge.masked_fill_(self.unseen, 1)
        damping = _sums(change.square().mul_(ridge))
        change.mul_(self.scale)
        gradient = change @ self.gram
        if self.drift is not None:
            gradient.sub_(self.drift, alpha=2)
        damped = _sums(gradient.mul_(change))
        return Candidate(weight, support, damped, (damped - damping + self.floor).clamp_(min=0))

    def total(self, values: Tensor) -> Tensor:
        return values if self.ranks is None else self.ranks.sum(values)

    def layer_sums(self, rows: Tensor) -> Tensor:
        """The sum over all rows of each layer: (layers,)."""
        return self.total(torch.stack([part.sum() for part in self.split(rows).values()]))

    def _sum_by_layer(self, rows: Tensor) -> Tensor:
        """For each row the sum over all rows of its layer."""
        sums = self.layer_sums(rows)
        return torch.cat([total.expand_as(part) for total, part in zip(sums, self.split(rows).values(), strict=True)])


def _round_(weight: Tensor, dtype: torch.dtype) -> None:
    """Make ``weight`` what ``dtype`` holds of it, but never zero: a weight that stays is not to count as pruned."""
    weight.copy_(weight.to(dtype))
    weight.masked_fill_(weight == 0, torch.finfo(dtype).tiny)


def _sums(matrix: Tensor) -> Tensor:
    """Sums of rows in float64, some rows at a time on the CPU: torch copies there what it sums in another type."""
    parts = matrix.split(SUMMED) if matrix.is_cpu else [matrix]
    return torch.cat([part.sum(1, dtype=torch.float64) for part in parts])


def _choose_rows(where: Tensor, first: Candidate, second: Candidate) -> Candidate:
    return Candidate(
        torch.where(where.unsqueeze(1), first.weight, second.weight),
        torch.where(where.unsqueeze(1), first.support, second.support),
        torch.where(where, first.damped, second.damped),
        torch.where(where, first.errors, second.errors),
    )


def _check(weights: Mapping[str, Tensor], moments: Moments) -> None:
    names = ", ".join(weights)
    for matrix in (moments.gram, moments.cross, moments.dense):
        if matrix is not None and not bool(matrix.isfinite().all()):
            raise ValueError(f"the inputs of {names} have a Gram matrix that is not finite: a sample gives NaN or inf")
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape[1] != len(moments.gram):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, but its Gram matrix {tuple(moments.gram.shape)}")
