"""Input norms: how large every input feature of each weight is over the calibration samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import CONVOLUTIONS, TRANSPOSED, Weight, is_conv1d
from ..input_statistics import input_squares
from .head import head_of
from .memory import is_out_of_memory
from .objective import mask_of, outputs
from .samples import Chunk, Samples, moved
from .session import replaced

Sums = dict[str, Tensor]
SIZE = {"cpu": 4, "cuda": 32}  # samples a pass: more would be no faster
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


@torch.no_grad()
def input_norms(model: nn.Module, weights: Sequence[Weight], samples: Samples, device: torch.device) -> "Norms":
    """L2 norm of every input feature over all tokens that the attention masks admit.

    A norm broadcasts to its weight. Samples are batched where that does not change what the layers see.
    """
    reader = _Reader(model, weights, samples, device)
    size = SIZE.get(device.type, 4) if reader.may_batch() else 1
    pending = [chunk.behind(reader.done) for chunk in samples.chunks(size) if chunk.behind(reader.done).size]
    while pending:
        chunk = pending.pop(0)
        if not reader.tried(chunk):
            pending[:0] = chunk.halves()
    for weight in weights:
        if weight.name not in reader.sums:
            raise ValueError(
                f"the score reads input norms, but no sample reached {weight.name}: its module was not called; "
                "exclude it, give samples that use it, or take magnitude"
            )
    homes = {weight.name: weight.parameter.device for weight in weights}
    norms = {name: squares.sqrt().to(homes[name], torch.float32) for name, squares in reader.sums.items()}
    return Norms(norms, reader.forwards)


@dataclass(frozen=True)
class Norms:
    of: dict[str, Tensor]
    forwards: int  # forward passes of one sample that they took


@dataclass
class _Reader:
    """Sums of squares, and how they may be read from this model."""

    model: nn.Module
    weights: Sequence[Weight]
    samples: Samples
    device: torch.device
    sums: Sums = field(default_factory=dict)
    forwards: int = 0
    done: Chunk = field(default_factory=lambda: Chunk(-1, 0, 0))  # samples that are in the sums already
    skipped: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)

    def may_batch(self) -> bool:
        """Whether two samples together, without the head, give the sums that they give one by one with it."""
        number = next((i for i, group in enumerate(self.samples.groups) if group.size > 1), None)
        if number is None:
            return False
        parts = [self._squares(Chunk(number, i, i + 1)) for i in (0, 1)]
        self.done = Chunk(number, 0, 2)
        for part in parts:
            _add(self.sums, {name: squares.clone() for name, squares in part.items()})
        for skipped in ([head] if (head := self._head()) else []), []:
            self.skipped = dict.fromkeys(skipped, lambda hidden: hidden)
            try:
                if _add_up(parts, self._squares(Chunk(number, 0, 2))):
                    return True
            except Exception as error:
                if not (is_out_of_memory(error) or isinstance(error, ERRORS)):
                    raise
        return False

    def _head(self) -> nn.Module | None:
        """The layer behind all that is read, whose output nobody does."""
        try:
            head = head_of(self.model)
        except ValueError:
            return None
        return None if any(weight.module is head for weight in self.weights) else head

    def tried(self, chunk: Chunk) -> bool:
        """Add one chunk; False where memory was not enough for more than one sample."""
        try:
            found = self._squares(chunk)
        except Exception as error:
            if not is_out_of_memory(error) or chunk.size == 1:
                raise
            return False
        _add(self.sums, found)
        return True

    def _squares(self, chunk: Chunk) -> Sums:
        tree = moved(self.samples.tree(chunk), self.device)
        sums: Sums = {}
        with replaced(self.skipped), _listening(self.weights, sums, mask_of(tree)):
            outputs(self.model, tree)
        self.forwards += chunk.size
        return sums


def _add_up(parts: Sequence[Sums], together: Sums) -> bool:
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


@contextmanager
def _listening(weights: Sequence[Weight], sums: Sums, mask: Tensor | None) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            (x,) = args or kwargs.values()
            _add(sums, {name: _squares_of(module, x.detach(), mask)})

        return add

    handles = [w.module.register_forward_pre_hook(hook(w.name), with_kwargs=True) for w in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _squares_of(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Sums of squares of an input in float64, so that neither the size of a batch nor padding shows in them."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        parts = x if x.ndim == module.weight.ndim else [x]
        return torch.stack([input_squares(module, part).double() for part in parts]).sum(0)
    squares = x.float().square()
    if mask is not None and x.ndim > 2 and mask.shape == x.shape[:2]:
        squares = squares[mask.bool()]
    features = squares.reshape(-1, x.shape[-1]).sum(0, dtype=torch.float64)
    return features.unsqueeze(1) if is_conv1d(module) else features
