"""Input norms of a trained model: how large every input feature of each weight is over the calibration samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..input_statistics import InputNorms
from .blocks import replaced
from .resources import is_out_of_memory
from .samples import Chunk, mask_of
from .walk import Walk, head_of, outputs

Sums = dict[str, Tensor]
SIZE = {"cpu": 4, "cuda": 32}  # samples per pass: more is no faster
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


@torch.no_grad()
def input_norms(walk: Walk) -> "Norms":
    """L2 norm of every input feature over all tokens that the attention masks admit.

    A norm broadcasts to its weight. Samples are batched where that does not change what the layers see.
    """
    reader = _Reader(walk)
    size = SIZE.get(walk.device.type, 4) if reader.may_batch() else 1
    walk.visit(size, lambda chunk: _add(reader.sums, reader.squares(chunk)), after=reader.done)
    for weight in walk.weights:
        if weight.name not in reader.sums:
            raise ValueError(
                f"the score reads input norms, but no sample reached {weight.name}: its module was not called; "
                "exclude it, give samples that use it, or take magnitude"
            )
    homes = {weight.name: weight.parameter.device for weight in walk.weights}
    norms = {name: squares.sqrt().to(homes[name], torch.float32) for name, squares in reader.sums.items()}
    return Norms(norms, reader.forwards)


@dataclass(frozen=True)
class Norms:
    by_name: dict[str, Tensor]
    forwards: int  # forward passes of one sample that they took


@dataclass
class _Reader:
    """Sums of squares so far, and how this model may be run for them."""

    walk: Walk
    sums: Sums = field(default_factory=dict)
    forwards: int = 0
    done: Chunk | None = None  # samples that are in the sums already
    skipped: Mapping[nn.Module, Callable[..., Any]] = field(default_factory=dict)

    def may_batch(self) -> bool:
        """Whether two samples in one pass, without the head, give the sums that they give one by one with it."""
        number = next((i for i, group in enumerate(self.walk.samples.groups) if group.size > 1), None)
        if number is None:
            return False
        parts = [self.squares(Chunk(number, i, i + 1)) for i in (0, 1)]
        self.done = Chunk(number, 0, 2)
        for part in parts:
            _add(self.sums, {name: squares.clone() for name, squares in part.items()})
        for skipped in self._head(), {}:
            self.skipped = skipped
            try:
                if _add_up(parts, self.squares(self.done)):
                    return True
            except Exception as error:
                if not (is_out_of_memory(error) or isinstance(error, ERRORS)):
                    raise
        return False

    def _head(self) -> dict[nn.Module, Callable[..., Any]]:
        """A forward that skips the head, whose output nothing reads, unless the head is pruned itself."""
        try:
            head = head_of(self.walk.model)
        except ValueError:
            return {}
        return {} if any(weight.module is head for weight in self.walk.weights) else {head: lambda hidden: hidden}

    def squares(self, chunk: Chunk) -> Sums:
        batch = self.walk.batch(chunk)
        collector = InputNorms(self.walk.weights, mode="eval", mask=mask_of(batch))
        with replaced(dict(self.skipped)), collector:
            outputs(self.walk.model, batch)
        self.forwards += chunk.size
        return collector.squares


def _add_up(parts: Sequence[Sums], together: Sums) -> bool:
    """Whether the sums of a batch are those of its samples, rounding aside."""
    if any(set(part) != set(together) for part in parts):
        return False
    for name, squares in together.items():
        alone = torch.stack([part[name] for part in parts]).sum(0)
        if not bool((squares - alone).abs().max() <= 0.01 * alone.abs().max()):
            return False
    return True


def _add(sums: Sums, more: Sums) -> None:
    for name, squares in more.items():
        sums[name] = sums[name].add_(squares) if name in sums else squares
