"""Which weights a strategy would prune: scores from weights, inputs or gradients of a trained model, and a selector."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import Weight
from ..input_statistics import check_inputs
from ..ops import bits
from ..ops.lazy import Lazy
from ..score import SCORES, Score, fisher, magnitude
from ..select import Global, PerRow, Selector
from ..statistics import score_of
from .engine import Engine
from .norms import input_norms
from .samples import Samples
from .session import Originals

ScoreLike = str | Callable[..., Tensor]
Packed = Mapping[str, Tensor]
READABLE = {"weight", "input_norm", "position"}


def path(weight: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``|w| (G0 + G1)``: a trapezoid of the change of the loss while weights shrink."""
    return weight.abs() * (before + after)


def default_select(score: ScoreLike) -> Selector:
    return PerRow() if score == "wanda" else Global()


def checked(score: ScoreLike) -> Score | None:
    """The row of a score that ``prune`` can serve; None for the two that it computes from gradients."""
    if score in ("fisher", "path"):
        return None
    row = score_of(score, {})
    if missing := [name for name in row.reads if name not in READABLE] + [n for n in row.settings if n != "name"]:
        raise ValueError(
            f"{score} reads {missing[0]}, which a trained model without its optimizer does not have; "
            "take magnitude, wanda, fisher, path or random, or a function of weight, input_norm or position"
        )
    return row


@dataclass(frozen=True)
class Work:
    """The model, its samples, and the engine of its gradients, both made when they are first asked for."""

    model: nn.Module
    device: torch.device  # where it runs
    samples: Callable[[], Samples]
    engine: Callable[[], Engine]


class Strategy:
    """Masks of one strategy at any sparsity; what it reads of the model is gathered once, until it is refreshed."""

    def __init__(self, work: Work, weights: Sequence[Weight], score: ScoreLike, select: Selector) -> None:
        self.work = work
        self.weights = weights
        self.forwards = 0  # forward passes of one sample
        self.score = score
        self.select = select
        if not hasattr(select, "packed"):
            raise ValueError(f"select is a selector such as PerRow(), got {select!r}")
        self.row = checked(score)
        if self.row and "input_norm" in self.row.reads:
            check_inputs(weights)
        self.reduction = 0.1
        self._norms: dict[str, Tensor] | None = None
        self._squares: dict[str, Tensor] | None = None

    def refresh(self) -> None:
        """Gather input norms and gradients anew at the next call."""
        self._norms = self._squares = None

    def keep(self, sparsity: float, live: Packed) -> dict[str, Tensor]:
        """Packed masks at ``sparsity`` within ``live``."""
        return self.select.packed(self.sources(sparsity, live), sparsity, live)

    def sources(self, sparsity: float, live: Packed) -> list[Lazy]:
        """Scores of every weight, of which ``path`` alone depends on the sparsity."""
        if self.score == "fisher":
            squares = self._mean_squares()
            return [_lazy(w, fisher, {"exp_avg_sq": squares[w.name]}, {"step": math.inf}) for w in self.weights]
        if self.score == "path":
            return self._path(sparsity, live)
        assert self.row is not None
        return [self._source(weight, self.row) for weight in self.weights]

    def _source(self, weight: Weight, row: Score) -> Lazy:
        reads = {"input_norm": self._norm(weight)} if "input_norm" in row.reads else {}
        constants = {"name": weight.name} if "name" in row.settings else {}
        return _lazy(weight, row.of, reads, constants, row)

    def _norm(self, weight: Weight) -> Tensor:
        if self._norms is None:
            found = input_norms(self.work.model, self.weights, self.work.samples(), self.work.device)
            self._norms = found.of
            self.forwards += found.forwards
        return self._norms[weight.name]

    def _mean_squares(self) -> dict[str, Tensor]:
        if self._squares is None:
            names = [weight.name for weight in self.weights]
            (self._squares,) = self.work.engine().records(names, [{}], "mean square")
        return self._squares

    def _path(self, sparsity: float, live: Packed) -> list[Lazy]:
        """G1 is recorded where all that magnitude would prune is reduced at once."""
        engine, names = self.work.engine(), [weight.name for weight in self.weights]
        (before,) = engine.records(names, [{}])
        plain = [_lazy(weight, magnitude, {}, {}) for weight in self.weights]
        masks = self.select.packed(plain, sparsity, live)
        with reduced_in_place(engine, {name: ~mask for name, mask in masks.items()}, self.reduction):
            (after,) = engine.records(names, [{}])
        return [_lazy(w, path, {"before": before[w.name], "after": after[w.name]}, {}) for w in self.weights]


@torch.no_grad()
def reduced_weight(weight: Tensor, where: Tensor, reduction: float) -> Tensor:
    """A copy of the weight with the elements ``where`` multiplied by ``reduction``."""
    weight = weight.detach()
    return torch.where(where, weight * reduction, weight)


@contextmanager
def reduced_in_place(engine: Engine, where: Packed, reduction: float) -> Iterator[None]:
    """The engine's model with these elements, as packed bits, reduced: there is one copy of it."""
    before = Originals()
    try:
        for name, packed in where.items():
            parameter = engine.weights[name].parameter
            here = bits.unpack(packed, parameter.shape)
            parameter.detach()[here] = before.save(parameter, here) * reduction
        engine.changed(list(where))
        yield
    finally:
        before.restore_()
        engine.changed(list(where))


def _lazy(
    weight: Weight,
    of: Callable[..., Tensor],
    reads: dict[str, Tensor],
    constants: dict[str, Any],
    row: Score | None = None,
) -> Lazy:
    values = weight.parameter.detach()
    reads_weight = row is None or "weight" in row.reads
    return Lazy(
        weight.name,
        values,
        of,
        ({"weight": values} if reads_weight else {}) | reads,
        constants=constants,
        takes_position=row is not None and "position" in row.reads,
        dtype=torch.promote_types(values.dtype, torch.float32),
        formula=row.formula if row else SCORES["magnitude"].formula if of is magnitude else None,
        outputs=weight.outputs,
    )
