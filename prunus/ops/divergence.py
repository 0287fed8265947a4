"""Row by row: how far logits are from those that are expected, how well they predict labels, and the gradient of both.

    divergence            KL(p || q),   p, q = softmax(expected), softmax(logits)
    cross-entropy         -log q[label], 0 where there is no label
    loss                  soft * divergence + hard * cross-entropy
    d loss / d logits     soft * (q - p) + hard * (q - onehot(label))

The gradient overwrites the logits: 1,000 rows of 128 k classes take 256 MiB in bfloat16. Arithmetic is in float32, in
float64 for float64. A logit of -inf is a probability of 0; if that class is expected all the same, the divergence is
infinite, but not the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the label of a row without one, as in torch
ELEMENTS = 1 << 22  # that plain torch works on at a time: it makes several copies of them in float32


class RowLosses(NamedTuple):
    """A number for each row, in float32 or float64."""

    divergence: Tensor
    cross_entropy: Tensor
    expected_cross_entropy: Tensor  # of the expected logits


def divergence_reference(logits: Tensor, expected: Tensor, labels: Tensor) -> RowLosses:
    """The losses of logits (row, class) beside expected ones, with a label for each row."""
    log_q, log_p = _log_probabilities(logits, expected)
    return _losses(log_q, log_p, log_p.exp(), labels)


def divergence_reference_(logits: Tensor, expected: Tensor, labels: Tensor, soft: Tensor, hard: Tensor) -> RowLosses:
    """The losses; ``logits`` becomes the gradient. ``soft`` and ``hard`` have a number for each row."""
    log_q, log_p = _log_probabilities(logits, expected)
    q, p = log_q.exp(), log_p.exp()
    losses = _losses(log_q, log_p, p, labels)
    hard = hard.where(labels != IGNORED, 0)
    gradient = (q * (soft + hard)[:, None]).sub_(p * soft[:, None])
    gradient.scatter_add_(1, _index(labels), -hard[:, None])
    counts = (soft != 0) | (hard != 0)
    logits.copy_(gradient.masked_fill_(~counts[:, None], 0))
    return RowLosses(*(each.where(counts, 0) for each in losses))


def _log_probabilities(*logits: Tensor) -> list[Tensor]:
    """``log_softmax``, which loses four digits over 150,000 classes on a CPU: it adds one after the other."""
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    shifted = [each.to(dtype) - each.amax(-1, keepdim=True) for each in logits]
    return [each - each.exp().sum(-1, keepdim=True).log() for each in shifted]


def _losses(log_q: Tensor, log_p: Tensor, p: Tensor, labels: Tensor) -> RowLosses:
    terms = (p * (log_p - log_q)).masked_fill_(p == 0, 0)  # which 0 * (-inf - -inf) is not
    entropies = (-each.gather(1, _index(labels))[:, 0] for each in (log_q, log_p))
    return RowLosses(terms.sum(-1), *(each.where(labels != IGNORED, 0) for each in entropies))


def _index(labels: Tensor) -> Tensor:
    """Labels as a column, 0 where there are none."""
    return labels.where(labels != IGNORED, 0)[:, None]


def divergence_(
    logits: Tensor,
    expected: Tensor,
    labels: Tensor | None = None,
    *,
    soft: float | Tensor = 1.0,
    hard: float | Tensor = 0.0,
) -> RowLosses:
    """The losses of each row; ``logits`` becomes the gradient of the sum of the rows' ``loss``.

    ``soft`` and ``hard`` are a number, or one for each row. A row where both are 0, or where ``soft`` is 0 and there is
    no label, is left out: its losses and its gradient are 0, whatever its logits are, even NaN.
    """
    return _row_losses(logits, expected, labels, [_each_row(weight, logits) for weight in (soft, hard)])


def divergence(logits: Tensor, expected: Tensor, labels: Tensor | None = None) -> RowLosses:
    return _row_losses(logits, expected, labels, [])


def _row_losses(logits: Tensor, expected: Tensor, labels: Tensor | None, weights: list[Tensor]) -> RowLosses:
    """By the kernel on a GPU; elsewhere by the definition, a part of the rows at a time."""
    num_rows, num_classes = logits.shape
    labels = logits.new_full((1,), IGNORED, dtype=torch.long).expand(num_rows) if labels is None else labels
    losses = logits.new_empty(num_rows, 3, dtype=torch.promote_types(logits.dtype, torch.float32))
    if logits.is_cuda and losses.dtype == torch.float32 and logits.stride(1) == 1:
        from ._triton.divergence import divergence_ as kernel

        kernel(losses, logits, expected if expected.stride(1) == 1 else expected.contiguous(), labels, weights)
        return RowLosses(*losses.unbind(1))
    define = divergence_reference_ if weights else divergence_reference
    size = max(1, ELEMENTS // num_classes)
    for rows in (slice(first, first + size) for first in range(0, num_rows, size)):
        losses[rows] = torch.stack(define(*(each[rows] for each in (logits, expected, labels, *weights))), 1)
    return RowLosses(*losses.unbind(1))


def _each_row(weight: float | Tensor, logits: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if not isinstance(weight, Tensor):
        weight = logits.new_full((), weight, dtype=dtype)
    return weight.to(logits.device, dtype).expand(len(logits))
