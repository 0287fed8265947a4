"""Input norms of a trained model: how large every input feature of each weight is over the calibration samples."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..eligible import Weight
from ..input_statistics import InputNorms, fill_unreached_
from .blocks import is_near
from .calibration import Calibration
from .disk_offload import BY_BLOCK
from .forward import head_of, is_encoder_decoder, outputs, replaced
from .progress import Meter
from .resources import FAILURES
from .samples import Chunk, Samples, Stack, mask_of, rows

Squares = dict[str, Tensor]
SIZE = {"cpu": 4, "cuda": 32}  # samples per pass: more is no faster


@torch.no_grad()
def input_norms(calibration: Calibration) -> dict[str, Tensor]:
    """L2 norm of every input feature over all tokens that the masks admit, in a shape that broadcasts to its weight."""
    reader, weights = _Sums(calibration), list(calibration.weights.values())
    size = SIZE.get(calibration.device.type, 4) if reader.may_batch() else 1
    reader.read(calibration, size, after=reader.done)
    left = [name for name in calibration.weights if name not in reader.sums]
    used = reader.used(left) if left else set()
    if unreached := [name for name in left if name not in used]:
        problem = f"the score reads input norms, but no sample reached {', '.join(unreached)}"
        raise ValueError(f"{problem}: modules that were not called; exclude them, use other samples, or take magnitude")
    homes = {weight.name: weight.parameter.device for weight in weights}
    norms = {name: squares.sqrt().to(homes[name], torch.float32) for name, squares in reader.sums.items()}
    mean = fill_unreached_(norms, weights)
    if left:
        warnings.warn(
            f"the model uses {', '.join(left)} without calling their modules, so their inputs are unknown; they are "
            "pruned by their weights alone (exclude them to leave them dense)",
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

    def __post_init__(self) -> None:
        blocks = self.calibration.blocks if self.calibration.model in BY_BLOCK else []
        weights = list(self.calibration.weights.values())
        inside: dict[nn.Module, set[int]] = {}
        for k, block in enumerate(blocks):
            for module in block.modules():
                inside.setdefault(module, set()).add(k)
        homes = [set().union(*(inside.get(m, {len(blocks)}) for m in (w.module, *w.sharers))) for w in weights]
        if any(len(home) > 1 for home in homes) or not (blocks and self.calibration.is_chained):
            blocks, homes = [], [{0}] * len(weights)
        self.blocks = blocks  # that run one after the other, each for all samples
        self.places = [  # weights by block, and at the end those outside the blocks
            [weight for weight, home in zip(weights, homes, strict=True) if home == {k}] for k in range(len(blocks) + 1)
        ]

    def may_batch(self) -> bool:
        """Whether two samples in one pass, without the head, give the sums that they give one by one with it."""
        stacks = self.calibration.samples.stacks
        number = next((i for i, stack in enumerate(stacks) if stack.size > 1), None)
        if number is None:
            return False
        first = Samples([Stack(rows(stacks[number].tree, slice(2), stacks[number].size), 2)])
        two, self.done = self.calibration.with_samples(first), Chunk(number, 0, 2)
        two.meter = Meter()  # these samples are no steps of the call
        alone = self._sums_of(two, 1)
        self.sums |= alone
        for skipped in self._head(), {}:
            self.skipped = skipped
            with suppress(*FAILURES, MemoryError):
                both = self._sums_of(two, 2)
                if both.keys() == alone.keys() and all(is_near(both[name], alone[name], 0.01) for name in alone):
                    return True
        return False

    def _sums_of(self, calibration: Calibration, size: int) -> Squares:
        reader = _Sums(self.calibration, skipped=self.skipped)
        reader.read(calibration, size)
        return reader.sums

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

    def read(self, calibration: Calibration, size: int, after: Chunk | None = None) -> None:
        """Add the squares of all samples, ``size`` of them at a time: in whole passes, or one block after another."""
        num = len(self.blocks)
        stream = calibration.stream(self.blocks)

        def forward(chunk: Chunk) -> None:
            outputs(calibration.model, calibration.batch(chunk))

        def behind(chunk: Chunk) -> None:
            with stream.starting_at(num, chunk), replaced(dict(self.skipped)):
                forward(chunk)

        def squares(weights: Sequence[Weight], run: Callable[[Chunk], None], chunk: Chunk) -> list[tuple[str, Tensor]]:
            with InputNorms(weights, mode="eval", mask=mask_of(calibration.batch(chunk))) as collector:
                run(chunk)
            calibration.cost.forwards += chunk.size
            return list(collector.squares.items())

        def visit(weights: Sequence[Weight], run: Callable[[Chunk], None]) -> None:
            calibration.visit(size, partial(squares, weights, run), self.add, after=after)

        for k, weights in enumerate(self.places):
            if k < num:
                calibration.meter.show(f"input norms, block {k + 1} of {num}")
                stream.advance(k, forward, partial(visit, weights))
            elif weights:
                visit(weights, behind)

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter)]
        self.found |= {self.names[parameter] for parameter in read if parameter in self.names}
        return func(*args, **(kwargs or {}))
