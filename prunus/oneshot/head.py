"""The distance of two models from the hidden states below their heads: no logits of a whole batch exist.

Logits and their gradients are made and dropped for a part of the tokens at a time. The gradients of the hidden states
and of the head exist after the forward pass; the backward pass only scales them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..ops.divergence import IGNORED, RowLosses, divergence, divergence_
from ..ops.wide_products import add_product_, wide_products

LOGITS = 512 << 20  # bytes of logits at a time: three fourths are the student's, since fewer parts are faster for it
ROWS = 128  # tokens of a part are a multiple of it
ALIGNED = 64  # classes: GPUs multiply faster where their number is a multiple


@dataclass(frozen=True)
class Head:
    """A plain linear head: ``logits = hidden @ weight.T + bias`` with a weight (class, width)."""

    weight: Tensor
    bias: Tensor | None = None


class Qualities(NamedTuple):
    """Sums in float64: ``divergence`` over ``num_tokens``, the others over ``num_labels``."""

    divergence: Tensor
    cross_entropy: Tensor
    expected_cross_entropy: Tensor  # of the teacher
    num_tokens: Tensor
    num_labels: Tensor


def head_divergence(
    hidden: Tensor,
    head: Head,
    expected: Tensor,
    expected_head: Head,
    *,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    hard: float = 0.0,
    soft: float = 1.0,
    total: float | Tensor | None = None,
) -> Tensor:
    """``(soft * sum of KL(teacher || student) + hard * sum of cross-entropy) / total`` over the tokens that count.

    ``hidden`` (..., width) is the student's and ``expected`` (..., its own width) the teacher's. ``mask`` (...) is true
    where a token counts; nothing else is read. ``labels`` (...) are classes, or -100 for none. Without ``total`` the
    divergence is divided by the number of tokens that count, the cross-entropy by the number of those with a label, and
    the loss of no tokens is 0. Logits have the dtype of autocast, else that of the hidden states. The student's hidden
    states and head can be differentiated, once; the teacher cannot.
    """
    if hard and labels is None:
        raise ValueError(f"hard is {hard}, but no labels were given; pass labels, or hard=0")
    pair = _pair(hidden, head, expected, expected_head, mask, labels if hard else None)
    weights: tuple[float, float | Tensor] = soft, hard
    if total is None:
        total, dtype = max(1, pair.num_tokens), torch.promote_types(hidden.dtype, torch.float32)
        weights = soft, hard and hard * total / pair.num_labels.clamp(min=1).to(dtype)
    trained = hidden, head.weight, head.bias
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in trained):
        return _Loss.apply(*trained, pair, *weights) / total
    return _summed(pair.losses(), *weights) / total


def head_qualities(
    hidden: Tensor,
    head: Head,
    expected: Tensor,
    expected_head: Head,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
) -> Qualities:
    """Both terms of ``head_divergence`` and the teacher's cross-entropy as sums, without gradients."""
    pair = _pair(hidden, head, expected, expected_head, mask, labels)
    losses = RowLosses(*(each.sum(dtype=torch.float64) for each in pair.losses()))
    return Qualities(*losses, torch.full_like(losses.divergence, pair.num_tokens), pair.num_labels.double())


class _Tokens:
    """Hidden states at ``places``, None for all of them, and the head above them."""

    def __init__(self, hidden: Tensor, head: Head, places: Tensor | None) -> None:
        dtype, device = hidden.dtype, hidden.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        self.hidden, self.places = hidden.detach().reshape(-1, hidden.shape[-1]), places
        self.num_classes = len(head.weight)
        self.weight = self._padded(head.weight.detach().to(dtype))
        self.bias = None if head.bias is None else self._padded(head.bias.detach().to(dtype))

    def at(self, part: slice) -> slice | Tensor:
        return part if self.places is None else self.places[part]

    def states(self, part: slice) -> Tensor:
        return self.hidden[self.at(part)].to(self.weight.dtype)

    def _padded(self, values: Tensor) -> Tensor:
        """Zeros for classes that there are not, on a GPU; their logits stay zero, and so do their gradients."""
        missing = -self.num_classes % ALIGNED if values.is_cuda else 0
        return F.pad(values, (0,) * (2 * values.ndim - 1) + (missing,)) if missing else values

    def logits(self, states: Tensor) -> Tensor:
        """Of all classes, and of those that ``_padded`` added."""
        return F.linear(states, self.weight, self.bias)


@dataclass(frozen=True)
class _Pair:
    """Student and teacher at the tokens that count, and their labels."""

    student: _Tokens
    teacher: _Tokens
    labels: Tensor | None
    num_tokens: int

    @property
    def num_labels(self) -> Tensor:
        """On the device, so that the host does not wait for it."""
        labels = self.student.hidden.new_empty(0) if self.labels is None else self.labels
        return (labels != IGNORED).sum()

    def labels_of(self, part: slice) -> Tensor | None:
        return None if self.labels is None else self.labels[part]

    def parts(self, times: int, within: slice | None = None) -> Iterator[slice]:
        """Tokens that follow each other, ``times`` as many as have a fourth of ``LOGITS``."""
        itemsize = max(each.weight.itemsize for each in (self.student, self.teacher))
        size = max(1, LOGITS // 4 // (ROWS * itemsize * len(self.student.weight))) * ROWS * times
        within = within or slice(0, self.num_tokens)
        return (slice(i, min(i + size, within.stop)) for i in range(within.start, within.stop, size))

    @contextmanager
    def products(self) -> Iterator[None]:
        """Products in the dtypes of the heads, whatever autocast says."""
        device = self.student.weight.device
        wide = (wide_products(device, each.weight) for each in (self.student, self.teacher))
        with torch.no_grad(), torch.autocast(device.type, enabled=False), next(wide), next(wide):
            yield

    def losses(self) -> RowLosses:
        with self.products():
            parts = [self._losses_of(part) for part in self.parts(2)] or [self._losses_of(slice(0, 0))]
        return RowLosses(*map(torch.cat, zip(*parts, strict=True)))

    def _losses_of(self, part: slice) -> RowLosses:
        student, teacher = (e.logits(e.states(part))[:, : e.num_classes] for e in (self.student, self.teacher))
        return divergence(student, teacher, self.labels_of(part))

    def learn_(self, grads: Sequence[Tensor | None], part: slice, soft: float, hard: float | Tensor) -> Tensor:
        """The summed loss of some tokens; its gradients are added to those of hidden states, weight and bias."""
        (to_hidden, to_weight, to_bias), states = grads, self.student.states(part)
        logits, losses = self.student.logits(states), []
        for piece in self.parts(1, part):  # by which the logits become their gradient
            own = logits[piece.start - part.start : piece.stop - part.start, : self.student.num_classes]
            expected = self.teacher.logits(self.teacher.states(piece))[:, : self.teacher.num_classes]
            losses.append(_summed(divergence_(own, expected, self.labels_of(piece), soft=soft, hard=hard), soft, hard))
            del expected  # before the next are made
        if to_hidden is not None:
            to_hidden[self.student.at(part)] = (logits @ self.student.weight).to(to_hidden.dtype)
        if to_weight is not None:
            add_product_(to_weight, logits, states)
        if to_bias is not None:
            to_bias += logits.sum(0, dtype=to_bias.dtype)
        return torch.stack(losses).sum()


def _pair(
    hidden: Tensor, head: Head, expected: Tensor, expected_head: Head, mask: Tensor | None, labels: Tensor | None
) -> _Pair:
    """A ValueError where student and teacher differ in their tokens or classes."""
    shape, num_classes = hidden.shape[:-1], len(head.weight)
    for name, each in {"expected": expected[..., 0], "mask": mask, "labels": labels}.items():
        if each is not None and each.shape != shape:
            raise ValueError(f"{name} must have one value for each token {tuple(shape)}, got {tuple(each.shape)}")
    if len(expected_head.weight) != num_classes:
        problem = f"student and teacher must have the same classes, got {num_classes} and {len(expected_head.weight)}"
        raise ValueError(f"{problem}; distil from a teacher with the same vocabulary")
    places = None if mask is None else mask.reshape(-1).nonzero()[:, 0]
    if places is not None and len(places) == shape.numel():
        places = None
    if labels is not None:
        labels = labels.reshape(-1) if places is None else labels.reshape(-1)[places]
    num_tokens = shape.numel() if places is None else len(places)
    return _Pair(_Tokens(hidden, head, places), _Tokens(expected, expected_head, places), labels, num_tokens)


def _summed(losses: RowLosses, soft: float, hard: float | Tensor) -> Tensor:
    """Of all rows; a divergence that does not count may be infinite."""
    hard_loss = (hard * losses.cross_entropy).sum()
    return hard_loss + (soft * losses.divergence).sum() if soft else hard_loss


class _Loss(torch.autograd.Function):
    """The summed loss. Its gradients are divided in the backward pass, since float16 would lose smaller ones."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, pair: _Pair, soft: float, hard: float | Tensor
    ) -> Tensor:
        trained, wide = (hidden, weight, bias), torch.promote_types(weight.dtype, torch.float32)
        ctx.kinds = [None if each is None else (each.shape, each.dtype) for each in trained]
        grads = [
            torch.zeros_like(each, dtype=dtype) if each is not None and is_needed else None
            for each, dtype, is_needed in zip(
                (pair.student.hidden, pair.student.weight, pair.student.bias),
                (hidden.dtype, wide, wide),
                ctx.needs_input_grad[:3],
                strict=True,
            )
        ]
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        with pair.products():
            for part in pair.parts(3):
                loss += pair.learn_(grads, part, soft, hard)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        factor = gradients[0].view(1)  # one without a dimension would be rounded to the dtype of the gradient
        grads: list[Tensor | None] = []
        for summed, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True):
            if summed is not None:
                shape, dtype = kind
                if len(shape) == summed.ndim:  # the head's, without the classes that were added
                    summed = summed[: shape[0]]
                summed = torch.mul(summed, factor, out=torch.empty_like(summed, dtype=dtype)).view(shape)
            grads.append(summed)
        return *grads, None, None, None
