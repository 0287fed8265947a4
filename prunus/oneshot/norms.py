"""Input norms of a trained model: how large every input feature of each weight is over the calibration samples."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..input_statistics import InputNorms, fill_unreached_
from .calibration import Calibration
from .forward import head_of, is_encoder_decoder, outputs, replaced
from .resources import FAILURES
from .samples import Chunk, mask_of

Squares = dict[str, Tensor]
SIZE = {"cpu": 4, "cuda": 32}  # samples per pass: more is no faster


@torch.no_grad()
def input_norms(calibration: Calibration) -> dict[str, Tensor]:
    """L2 norm of every input feature over all tokens that the attention masks admit.

    A norm broadcasts to its weight. Samples are batched where that does not change what the layers see.
    """
    reader, weights = _Sums(calibration), list(calibration.weights.values())
    size = SIZE.get(calibration.device.type, 4) if reader.may_batch() else 1
    calibration.visit(size, lambda chunk: reader.squares(chunk).items(), reader.add, after=reader.done)
    left = [name for name in calibration.weights if name not in reader.sums]
    used = reader.used(left) if left else set()
    if unreached := [name for name in left if name not in used]:
        raise ValueError(
            f"the score reads input norms, but no sample reached {', '.join(unreached)}: modules that were not called; "
            "exclude them, give samples that use them, or take magnitude"
        )
    homes = {weight.name: weight.parameter.device for weight in weights}
    norms = {name: squares.sqrt().to(homes[name], torch.float32) for name, squares in reader.sums.items()}
    mean = fill_unreached_(norms, weights)
    if left:
        warnings.warn(
            f"the model uses {', '.join(left)} without calling their modules, so that their inputs are not seen; "
            "they are pruned by their weights alone (exclude them to leave them dense)",
            stacklevel=2,
        )
        norms |= {name: mean.to(homes[name]) for name in left}
    return norms


@dataclass
class _Sums:
    """Sums of squares so far, and how this model may be run for them."""

    calibration: Calibration
    sums: Squares = field(default_factory=dict)
    done: Chunk | None = None  # samples that are in the sums already
    skipped: Mapping[nn.Module, Callable[..., Any]] = field(default_factory=dict)

    def may_batch(self) -> bool:
        """Whether two samples in one pass, without the head, give the sums that they give one by one with it."""
        number = next((i for i, stack in enumerate(self.calibration.samples.stacks) if stack.size > 1), None)
        if number is None:
            return False
        parts = [self.squares(Chunk(number, i, i + 1)) for i in (0, 1)]
        self.done = Chunk(number, 0, 2)
        for part in parts:
            self.calibration.each_once([*part.items()], self.add)
        for skipped in self._head(), {}:
            self.skipped = skipped
            with suppress(*FAILURES, MemoryError):
                if _add_up(parts, self.squares(self.done)):
                    return True
        return False

    def _head(self) -> dict[nn.Module, Callable[..., Any]]:
        """A forward that skips the head, whose output nothing reads, unless the head is pruned itself."""
        if is_encoder_decoder(self.calibration.model):  # which computes its loss
            return {}
        try:
            head = head_of(self.calibration.model)
        except ValueError:
            return {}
        is_pruned = any(weight.module is head for weight in self.calibration.weights.values())
        return {} if is_pruned else {head: lambda hidden: hidden}

    def squares(self, chunk: Chunk) -> Squares:
        batch = self.calibration.batch(chunk)
        collector = InputNorms(list(self.calibration.weights.values()), mode="eval", mask=mask_of(batch))
        with replaced(dict(self.skipped)), collector:
            outputs(self.calibration.model, batch)
        self.calibration.cost.forwards += chunk.size
        return collector.squares

    def add(self, found: tuple[str, Tensor]) -> None:
        name, squares = found
        self.sums[name] = self.sums[name] + squares if name in self.sums else squares

    def used(self, names: Collection[str]) -> set[str]:
        """Which weights functions read in the pass of one sample, though their modules are not called."""
        watched = _Uses({self.calibration.weights[name].parameter: name for name in names})
        with watched:
            outputs(self.calibration.model, self.calibration.batch(next(self.calibration.samples.chunks(1))))
        self.calibration.cost.forwards += 1
        return watched.found


class _Uses(TorchFunctionMode):
    """Which of some parameters functions of torch are called with while this is open."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self.names, self.found = names, set[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter)]
        self.found |= {self.names[parameter] for parameter in read if parameter in self.names}
        return func(*args, **(kwargs or {}))


def _add_up(parts: Sequence[Squares], together: Squares) -> bool:
    """Whether the sums of a batch are those of its samples, rounding aside."""
    if any(set(part) != set(together) for part in parts):
        return False
    for name, squares in together.items():
        alone = torch.stack([part[name] for part in parts]).sum(0)
        if not bool((squares - alone).abs().max() <= 0.01 * alone.abs().max()):
            return False
    return True
