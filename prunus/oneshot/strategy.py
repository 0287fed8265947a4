"""Which weights a strategy would prune: scores from weights, inputs or gradients of a trained model, and a selector."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import CONVOLUTIONS, Weight
from ..ops import bits
from ..ops.source import Lazy
from ..score import Score, fisher, magnitude
from ..select import Global, PerRow, Selector
from ..stats import input_squares, score_of
from .engine import Engine
from .objective import mask_of

ScoreLike = str | Callable[..., Tensor]
Packed = Mapping[str, Tensor]
READABLE = {"weight", "input_norm", "position"}
ROWS = 1024  # that are summed one by one; more are tokens of no known sample


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


class Strategy:
    """Masks of one strategy at any sparsity; what it reads of the model is gathered once, until it is refreshed."""

    def __init__(
        self, engine: Callable[[], Engine], weights: Sequence[Weight], score: ScoreLike, select: Selector
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.score = score
        self.select = select
        self.row = checked(score)
        self.reduction = 0.1
        self._norms: dict[str, Tensor] | None = None

    def refresh(self) -> None:
        """Gather input norms anew at the next call."""
        self._norms = None

    def keep(self, sparsity: float, live: Packed) -> dict[str, Tensor]:
        """Packed masks at ``sparsity`` within ``live``."""
        return self.select.packed(self._sources(sparsity, live), sparsity, live)

    def _sources(self, sparsity: float, live: Packed) -> list[Lazy]:
        if self.score == "fisher":
            names = [weight.name for weight in self.weights]
            (squares,) = self.engine().records(names, [{}], "mean square")
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
            self._norms = input_norms(self.engine(), self.weights)
        return self._norms[weight.name]

    def _path(self, sparsity: float, live: Packed) -> list[Lazy]:
        """G1 is recorded where all that magnitude would prune is reduced at once."""
        engine, names = self.engine(), [weight.name for weight in self.weights]
        (before,) = engine.records(names, [{}])
        plain = [_lazy(weight, magnitude, {}, {}) for weight in self.weights]
        masks = self.select.packed(plain, sparsity, live)
        kept = {weight: bits.unpack(masks[weight.name], weight.parameter.shape) for weight in self.weights}
        reduced = {w.name: reduced_weight(w.parameter, ~keep, self.reduction) for w, keep in kept.items()}
        (after,) = engine.records(names, [reduced])
        return [_lazy(w, path, {"before": before[w.name], "after": after[w.name]}, {}) for w in self.weights]


@torch.no_grad()
def reduced_weight(weight: Tensor, where: Tensor, reduction: float) -> Tensor:
    """A copy of the weight with the elements ``where`` multiplied by ``reduction``."""
    weight = weight.detach()
    return torch.where(where, weight * reduction, weight)


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
        formula=row.formula if row else "magnitude" if of is magnitude else None,
        outputs=weight.outputs,
    )


def input_norms(engine: Engine, weights: Sequence[Weight]) -> dict[str, Tensor]:
    """L2 norm of every input feature of each weight's module over all tokens that the attention masks admit."""
    sums: dict[str, Tensor] = {}
    masks: list[Tensor | None] = [None]
    with _listening(weights, sums, masks):
        engine.sweep(lambda tree: masks.__setitem__(0, mask_of(tree)))
    for weight in weights:
        if weight.name not in sums:
            raise ValueError(
                f"wanda reads input norms, but no sample reached {weight.name}: its module was not called; "
                "exclude it, give samples that use it, or take magnitude"
            )
    return {name: squares.sqrt().to(torch.float32) for name, squares in sums.items()}


@contextmanager
def _listening(weights: Sequence[Weight], sums: dict[str, Tensor], masks: list[Tensor | None]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            (x,) = args or kwargs.values()
            for part in _parts(module, x.detach(), masks[0]):
                squares = input_squares(module, part).double()
                sums[name] = sums[name].add_(squares) if name in sums else squares

        return add

    handles = [w.module.register_forward_pre_hook(hook(w.name), with_kwargs=True) for w in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(module: nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The input sample by sample, so that the sums do not depend on the size of a batch; without what is masked."""
    if isinstance(module, CONVOLUTIONS):
        return list(x) if x.ndim == module.weight.ndim else [x]
    if x.ndim < 3:
        return list(x) if x.ndim == 2 and len(x) <= ROWS else [x]
    if mask is None or mask.shape != x.shape[:2]:
        return list(x)
    return [one[admitted.bool()] for one, admitted in zip(x, mask, strict=True)]
