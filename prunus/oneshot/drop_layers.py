"""Whole layers that go: one at a time, that without which the model's outputs change least."""

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import SAME, Stream, is_chain, is_near
from .calibration import ROUNDING, Calibration
from .cuts import Cuts, Removal
from .distance import distance_of, output_of
from .fewer_layers import BlockList, FewerLayers, fewer_layers, new_keys
from .forward import arguments, outputs, replaced
from .progress import Progress
from .resources import FAILURES, is_out_of_memory
from .samples import Chunk, Samples, Stack, Tree, mask_of, num_tokens, rows, shortened
from .skipped import Place, seen_blocks
from .widths import num_removed

NUM_SAMPLES = 16  # that decide
SIZE = {"cpu": 4, "cuda": 16}  # samples of a pass
PROMPT = 8  # tokens of a sample that the model continues


@dataclass(repr=False)
class DroppedLayers(Removal):
    """Which layers went, in their order, and how far the model's outputs were from the dense model's after each."""

    names: list[str]  # in the dense model
    distances: list[float] = field(default_factory=list)
    loss: str = ""  # what the distances are
    num_layers: int = 0  # of the dense model, in lists that the samples reach
    _lists: list[tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Module]]] = field(default_factory=list)
    _numbers: Cuts = field(default_factory=Cuts)
    _device: torch.device | None = None  # of the layers that stay, when the others went

    def __repr__(self) -> str:
        return f"DroppedLayers({self.num_dropped} of {self.num_layers}: {', '.join(self.names)})"

    @property
    def num_dropped(self) -> int:
        return len(self.names)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers that went."""
        return [b for _, before, after in self._lists for b in before.values() if b not in after.values()]

    def _apply_(self) -> None:
        self._device = self._device_now()
        for module, _, after in self._lists:
            _fill(module, after)
        self._numbers.apply_()

    def _undo_(self) -> None:
        """The same modules come back, with all that counts them; they follow the others to another device."""
        for block in self.blocks if self._device_now() != self._device else ():
            block.to(self._device_now())
        for module, before, _ in self._lists:
            _fill(module, before)
        self._numbers.undo_()

    def _device_now(self) -> torch.device | None:
        kept = (block for _, _, after in self._lists for block in after.values())
        return next((parameter.device for block in kept for parameter in block.parameters()), None)


def _fill(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    module._modules.clear()
    module._modules.update(blocks)


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
            f"{num} of {choice.num_layers} layers cannot go: at least one of each list stays; remove 1 to {choice.most}"
        )
    calibration.meter.begin(progress, num * len(choice.calibration.samples))
    for _ in range(num):
        choice.remove_one()
    dropped = without_layers(choice.plan, choice.gone)
    dropped.distances, dropped.loss, dropped.num_layers = choice.distances, str(choice.distance), choice.num_layers
    dropped.apply_()
    return dropped


def without_layers(plan: FewerLayers, gone: Collection[Place]) -> DroppedLayers:
    """What takes the place of the lists of blocks and of numbers where the blocks ``gone`` are; not applied yet."""
    places: dict[str, list[int]] = {}
    for name, place in gone:
        places.setdefault(name, []).append(place)
    numbers = Cuts.of(plan.model, {}, plan.numbers(places))
    dropped = DroppedLayers([], _numbers=numbers)
    for name, place in gone:
        dropped.names.append(f"{name}.{[*plan.model.get_submodule(name)._modules][place]}".removeprefix("."))
    for name, out in places.items():
        module = plan.model.get_submodule(name)
        before: dict[str, Any] = dict(module._modules)
        dropped._lists.append((module, before, {new: before[key] for key, new in new_keys(module, out).items()}))
    return dropped


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
            self.generates = self._can_generate()
            size = calibration.batch_size or SIZE.get(calibration.device.type, 4)
            self.size = size if self.calibration.can_batch() else 1

    def _see_blocks(self) -> None:
        """Run the first sample, and find the blocks that can be skipped and the lists that hold them."""
        model, lists = self.calibration.model, self.plan.lists
        with seen_blocks({(part.name, i): b for part in lists for i, b in enumerate(self.plan.modules(part))}) as skips:
            first = outputs(model, self.first)
        if not skips:
            raise ValueError(
                f"no layer of {type(model).__name__} can be removed: no block of {lists[0].name} that samples reach "
                "returns a tensor of the shape of its input"
            )
        self.skips = skips
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        self.distance = distance_of(first, self.calibration.samples.stacks[0].tree, problem)
        self.lists = [part for part in lists if any(name == part.name for name, _ in skips)]
        self.is_chain = {part.name: self._is_chain(part, output_of(first)) for part in self.lists}

    def _is_chain(self, part: BlockList, expected: Tensor) -> bool:
        stream = Stream(self.plan.modules(part), Samples([Stack(self.first, 1)]))
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

    def _output_as_called(self, batch: Tree) -> Tensor:
        """Of the model as users call it: with a cache, if that is its default."""
        args, named = arguments(self.calibration.model, batch)
        named = {key: value for key, value in named.items() if key != "use_cache"}
        return output_of(self.calibration.model(*args, **named))

    def _can_generate(self) -> bool:
        """Whether it generates a token with its cache, whose layers the class may count in its own way."""
        model: Any = self.calibration.model
        if not (hasattr(model, "can_generate") and model.can_generate()):
            return False
        sample = shortened(self.first, PROMPT) if num_tokens(self.first) > PROMPT else self.first
        args, named = arguments(model, sample)
        named = {key: value for key, value in named.items() if key not in ("use_cache", "decoder_input_ids", "labels")}
        try:
            model.generate(*args, **named, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return False
        return True

    def _without(self, places: Collection[Place]) -> AbstractContextManager[None]:
        return replaced(dict(self.skips[where] for where in places))

    def remove_one(self) -> None:
        """The next block: the nearest outputs among those whose removal the class can build."""
        names = [name for name, _ in self.gone]
        full = {part.name for part in self.lists if names.count(part.name) == part.num - 1}
        self._sums = {where: 0.0 for where in self.skips if where not in self.gone and where[0] not in full}
        with self.calibration.open(), torch.no_grad(), self.calibration.reading(f"layer {len(self.gone) + 1}"):
            self.calibration.visit(self.size, self._pass, self._add)
        reasons = []
        for where, distance in sorted(self._sums.items(), key=lambda item: item[1]):
            if not math.isfinite(distance):
                reason = "the outputs are not finite, or the blocks after it need it"
            else:
                reason = self._refusal([*self.gone, where])
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
        with self._without(self.gone):
            for part in self.lists:
                stream = Stream(self.plan.modules(part), Samples([Stack(batch, chunk.size)]))
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
            with self._without([where]):
                distance = self.distance(self._output(batch), expected, mask_of(batch)).double().item()
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return math.inf
        return distance if math.isfinite(distance) else math.inf

    def _add(self, part: tuple[Place, float]) -> None:
        self._sums[part[0]] += part[1]

    def _refusal(self, gone: Collection[Place]) -> str:
        """Why the model without these blocks is not what it is with identities in their places; empty where it is."""
        try:
            dropped = without_layers(self.plan, gone)
        except ValueError as error:
            return str(error)
        with self.calibration.open(), torch.no_grad(), self._without(gone):
            expected = self._output(self.first)
        dropped.apply_()
        try:
            with self.calibration.open(), torch.no_grad():
                same, as_called = self._output(self.first), self._output_as_called(self.first)
                if self.generates and not self._can_generate():
                    return "generate fails without it, since its class counts layers in another way"
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return f"the model fails without it: {' '.join(str(error).split())[:200]}"
        finally:
            dropped.undo_()
        if _is_near(same, expected, SAME) and _is_near(as_called, expected, ROUNDING):
            return ""
        return f"the layers after it would compute something else{self.plan.periods}"


def _is_near(output: Tensor, expected: Tensor, tolerances: Mapping[torch.dtype, float]) -> bool:
    return output.shape == expected.shape and is_near(output, expected, tolerances.get(output.dtype, 1e-2))


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
