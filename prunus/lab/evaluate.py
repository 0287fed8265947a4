"""Quality on held-out data."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..trained.quality import Quality
from .data.batches import Batch


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (..., classes) at targets (...)."""
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def counted(batches: Iterable[Batch], total: int, report: Callable[[int, int, str], None]) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        report(number, total, "held-out data")
        yield batch
    report(total, total, "held-out data")


@torch.no_grad()
def measured(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    autocast: AbstractContextManager[object],
) -> list[tuple[float, int, int]]:
    """Summed loss, right predictions and targets of each batch; the model goes back to the mode it was in."""
    was_training = model.training
    model.eval()
    rows = []
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        with autocast:
            logits = model(inputs)
        loss = loss_of(logits, targets).item() * targets.numel()
        rows.append((loss, int((logits.argmax(-1) == targets).sum()), targets.numel()))
    model.train(was_training)
    return rows


def summed(rows: Iterable[tuple[float, int, int]]) -> Quality:
    loss, right, total = 0.0, 0, 0
    for row in rows:
        loss, right, total = loss + row[0], right + row[1], total + row[2]
    return Quality(loss / total, right / total)
