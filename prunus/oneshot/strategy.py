"""Which weights a strategy would prune: a score of weights, inputs or gradients of a trained model, and a selector."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..eligible import Weight
from ..input_statistics import check_inputs
from ..ops.lazy import Lazy
from ..score import SCORES, Score, fisher, magnitude
from ..select import Global, PerRow, Selector, Shape
from ..statistics import score_of
from .norms import input_norms
from .probe.engine import Engine
from .walk import Walk

ScoreLike = str | Callable[..., Tensor]
Packed = Mapping[str, Tensor]
READABLE = {"weight", "input_norm", "position"}


def path(weight: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``|w| (G0 + G1)``: a trapezoid of the change of the loss while the weight shrinks."""
    return weight.abs() * (before + after)


def default_select(score: ScoreLike) -> Selector:
    return PerRow() if score == "wanda" else Global()


def checked(score: ScoreLike) -> Score | None:
    """The row of a score that ``prune`` supports; None for the two that are computed from gradients here."""
    if score in ("fisher", "path"):
        return None
    row = score_of(score, {})
    if missing := [name for name in row.reads if name not in READABLE] + [n for n in row.settings if n != "name"]:
        raise ValueError(
            f"{score} reads {missing[0]}, which a trained model without its optimizer does not have; "
            "take magnitude, wanda, fisher, path or random, or a function of weight, input_norm or position"
        )
    return row


def moment_sources(weights: Sequence[Weight], moments: Mapping[str, Tensor]) -> list[Lazy]:
    """Scores ``|w| v^(1/4)``, v being Adam's second moments by name."""
    row = SCORES["bitter7"]
    for weight in weights:
        if (v := moments.get(weight.name)) is None or v.shape != weight.parameter.shape:
            raise ValueError(
                "allocate='moments' reads Adam's second moments (exp_avg_sq) of the weights, by name: "
                f"there are none of {weight.name}; take allocate='fisher', which needs none"
            )
    reads = [{"exp_avg_sq": moments[w.name].to(w.parameter.device, torch.float32)} for w in weights]
    return [_lazy(weight, row.of, read, {}, row) for weight, read in zip(weights, reads, strict=True)]


class Strategy:
    """Masks of one strategy at any sparsity; what it reads of the model is gathered once, until it is refreshed."""

    def __init__(self, walk: Walk, engine: Callable[[], Engine], score: ScoreLike, select: Selector) -> None:
        self.walk = walk
        self.engine = engine  # made when it is first asked for
        self.weights = walk.weights
        self.forwards = 0  # forward passes of one sample
        self.score = score
        self.select = select
        if not hasattr(select, "packed"):
            raise ValueError(f"select is a selector such as PerRow(), got {select!r}")
        self.row = checked(score)
        if self.row and "input_norm" in self.row.reads:
            check_inputs(self.weights)
        self._norms: dict[str, Tensor] | None = None
        self._squares: dict[str, Tensor] | None = None

    @property
    def num_passes(self) -> int:
        """How often a choice reads the samples."""
        if self.row is not None:
            return int("input_norm" in self.row.reads)
        return 2 if self.score == "path" else 1

    def refresh(self) -> None:
        """Gather input norms and gradients anew at the next call."""
        self._norms = self._squares = None

    def keep(self, sparsity: float, live: Packed) -> dict[str, Tensor]:
        """Packed masks at ``sparsity`` within ``live``."""
        if self.select.group in ("row", "neighbours"):  # refuses weights without such rows before any pass
            shapes = [Shape(weight.name, tuple(weight.parameter.shape), weight.outputs) for weight in self.weights]
            self.select.quota(shapes, sparsity)
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
        reads = {"input_norm": self._input_norms()[weight.name]} if "input_norm" in row.reads else {}
        constants = {"name": weight.name} if "name" in row.settings else {}
        return _lazy(weight, row.of, reads, constants, row)

    def _input_norms(self) -> dict[str, Tensor]:
        if self._norms is None:
            with self.walk.reading("input norms"):
                self._norms, forwards = input_norms(self.walk)
            self.forwards += forwards
        return self._norms

    def _mean_squares(self) -> dict[str, Tensor]:
        if self._squares is None:
            engine, names = self.engine(), [weight.name for weight in self.weights]
            with self.walk.reading("gradients"):
                (self._squares,) = engine.records(names, [{}], "mean square")
        return self._squares

    def _path(self, sparsity: float, live: Packed) -> list[Lazy]:
        """G1 is recorded with all that magnitude would prune reduced to a tenth at once."""
        engine, names = self.engine(), [weight.name for weight in self.weights]
        with self.walk.reading("gradients"):
            (before,) = engine.records(names, [{}])
        plain = [_lazy(weight, magnitude, {}, {}) for weight in self.weights]
        masks = self.select.packed(plain, sparsity, live)
        reduced = engine.reduced({name: ~mask for name, mask in masks.items()}, 0.1)
        with reduced, self.walk.reading("gradients with weights reduced"):
            (after,) = engine.records(names, [{}])
        return [_lazy(w, path, {"before": before[w.name], "after": after[w.name]}, {}) for w in self.weights]


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
