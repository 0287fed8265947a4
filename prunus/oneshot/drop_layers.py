"""Whole layers that go: one at a time, that without which the model's outputs change least."""

import math
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .blocks import Stream, is_chain
from .calibration import Calibration
from .cuts import Cuts
from .distance import distance_of, output_of
from .fewer_layers import BlockList, FewerLayers, fewer_layers
from .forward import outputs, replaced
from .progress import Progress
from .resources import FAILURES, is_out_of_memory
from .samples import Chunk, Samples, Stack, Tree, mask_of, rows
from .shared_work import agreed, same
from .skipped import LayerCheck, Place, can_generate, seen_blocks
from .widths import num_removed

NUM_SAMPLES = 16  # that decide
SIZE = {"cpu": 4, "cuda": 16}  # samples of a pass


@dataclass(repr=False)
class DroppedLayers:
    """Which layers were removed, in order, and the distance of the outputs from the dense model's after each."""

    names: list[str]  # in the dense model
    distances: list[float]
    loss: str  # what the distances are
    num_layers: int  # of the dense model, in lists that the samples reach
    cuts: Cuts

    def __repr__(self) -> str:
        return f"DroppedLayers({self.num_dropped} of {self.num_layers}: {', '.join(self.names)})"

    @property
    def num_dropped(self) -> int:
        return len(self.names)


def drop_layers_(calibration: Calibration, wanted: float, progress: Progress | None = None) -> DroppedLayers:
    """Remove a number or a fraction of the blocks: each time that without which the outputs change least.

    Outputs are compared on at most 16 samples, evenly taken, as KL divergence where they are logits. Each block that
    stays gives what it gave before, and a list keeps at least one. Of equal blocks the first goes. ``calibration``
    still has the weights and blocks of the dense model afterwards.
    """
    choice = _Choice(calibration, fewer_layers(calibration.model, calibration.blocks))
    num = num_removed("layers", wanted, choice.num_layers)
    if not 0 < num <= choice.most:
        raise ValueError(
            f"cannot remove {num} of {choice.num_layers} layers: each list keeps at least one; remove 1 to "
            f"{choice.most}"
        )
    calibration.meter.begin(progress, num * len(choice.calibration.samples))
    for _ in range(num):
        choice.remove_one()
    lists = {name: [*calibration.model.get_submodule(name)._modules] for name, _ in choice.gone}
    names = [f"{name}.{lists[name][place]}".removeprefix(".") for name, place in choice.gone]
    cuts = choice.plan.cuts(choice.gone)
    cuts.apply_()
    return DroppedLayers(names, choice.distances, str(choice.distance), choice.num_layers, cuts)


class _Choice:
    """Measures which block goes next, given those that are gone."""

    def __init__(self, calibration: Calibration, plan: FewerLayers) -> None:
        self.calibration, self.plan = copy(calibration), plan
        vars(self.calibration)["samples"] = _few(calibration.samples, NUM_SAMPLES)
        self.gone: list[Place] = []
        self.distances: list[float] = []
        self._sums: dict[Place, float] = {}
        self.first = self.calibration.batch(next(self.calibration.samples.chunks(1)))
        with self.calibration.open(), torch.no_grad():
            self.calibration.check_model()
            self._see_blocks()
            self.check = LayerCheck(
                self.calibration, plan, self.skips, self.first, can_generate(calibration.model, self.first)
            )
            size = calibration.batch_size or SIZE.get(calibration.device.type, 4)
            self.size = size if self.calibration.can_batch() else 1

    def _see_blocks(self) -> None:
        """Run the first sample, and find the blocks that can be skipped and the lists that hold them."""
        model, lists = self.calibration.model, self.plan.lists
        blocks = {part.name: [*model.get_submodule(part.name).children()] for part in lists}
        with seen_blocks({(name, i): block for name, each in blocks.items() for i, block in enumerate(each)}) as skips:
            first = outputs(model, self.first)
        if not skips:
            raise ValueError(
                f"no layer of {type(model).__name__} can be removed: no block of {lists[0].name} that samples reach "
                "returns a tensor of the shape of its input"
            )
        self.blocks, self.skips = blocks, skips
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        self.distance = distance_of(first, self.calibration.samples.stacks[0].tree, problem)
        self.lists = [part for part in lists if any(name == part.name for name, _ in skips)]
        self.is_chain = {part.name: self._is_chain(part, output_of(first)) for part in self.lists}

    def _is_chain(self, part: BlockList, expected: Tensor) -> bool:
        stream = Stream(self.blocks[part.name], Samples([Stack(self.first, 1)]))
        return is_chain(stream, lambda _: self._output(self.first), [expected])

    @property
    def num_layers(self) -> int:
        return sum(part.num for part in self.lists)

    @property
    def most(self) -> int:
        """How many blocks can go, if the class can be built without any of them."""
        names = [name for name, _ in self.skips]
        return sum(min(names.count(part.name), part.num - 1) for part in self.lists)

    def _output(self, batch: Tree) -> Tensor:
        return output_of(outputs(self.calibration.model, batch))

    def remove_one(self) -> None:
        """The next block: the nearest outputs among those whose removal the class can build."""
        names = [name for name, _ in self.gone]
        full = {part.name for part in self.lists if names.count(part.name) == part.num - 1}
        self._sums = {where: 0.0 for where in self.skips if where not in self.gone and where[0] not in full}
        with self.calibration.open(), torch.no_grad(), self.calibration.reading(f"layer {len(self.gone) + 1}"):
            agreed(self.calibration.ranks, partial(self.calibration.visit, self.size, self._pass, self._add))
        self._sums, reasons = same(self.calibration.ranks, self._sums), []
        for where, distance in sorted(self._sums.items(), key=lambda item: item[1]):
            if not math.isfinite(distance):
                reason = "the outputs are not finite, or the blocks after it need it"
            else:
                reason = self.check.fault([*self.gone, where])
            if not reason:
                self.gone.append(where)
                self.distances.append(distance)
                return
            reasons.append(f"{where[0]}.{where[1]}: {reason}")
        raise ValueError(f"no layer can be removed after {len(self.gone)}: {reasons[0]}")

    def _pass(self, chunk: Chunk) -> list[tuple[Place, float]]:
        """For each block that may go next, how far the outputs are without it; passes start at that block."""
        batch, whole, parts = self.calibration.batch(chunk), Chunk(0, 0, chunk.size), []
        expected, share = self._output(batch), chunk.size / len(self.calibration.samples)
        with replaced(dict(self.skips[gone] for gone in self.gone)):
            for part in self.lists:
                stream = Stream(self.blocks[part.name], Samples([Stack(batch, chunk.size)]))
                start = 0
                for where in (where for where in self._sums if where[0] == part.name):
                    while self.is_chain[part.name] and start < where[1]:
                        stream.advance(start, lambda _: self._output(batch), lambda act: act(whole))
                        start += 1
                    with stream.starting_at(start, whole):
                        parts.append((where, share * self._distance(where, batch, expected)))
        self.calibration.cost.forwards += chunk.size * (1 + len(parts))
        return parts

    def _distance(self, where: Place, batch: Tree, expected: Tensor) -> float:
        """Infinite where the model does not run without this block, or not to finite numbers."""
        try:
            with replaced(dict([self.skips[where]])):
                distance = self.distance(self._output(batch), expected, mask_of(batch)).double().item()
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return math.inf
        return distance if math.isfinite(distance) else math.inf

    def _add(self, part: tuple[Place, float]) -> None:
        self._sums[part[0]] += part[1]


def _few(samples: Samples, num: int) -> Samples:
    """At most ``num`` of the samples, evenly taken."""
    if len(samples) <= num:
        return samples
    chosen = {len(samples) * i // num for i in range(num)}
    stacks, start = [], 0
    for stack in samples.stacks:
        own = [row for row in range(stack.size) if start + row in chosen]
        start += stack.size
        if own:
            stacks.append(Stack(rows(stack.tree, own, stack.size), len(own)))
    return Samples(stacks)
