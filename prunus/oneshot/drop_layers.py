"""Whole layers that go: one at a time, that without which the model's outputs change least."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import SAME, STUB, Stream, is_chain, is_near
from .built_twice import FewerLayers, fewer_layers
from .calibration import ROUNDING, Calibration
from .cuts import Cuts
from .distance import distance_of, output_of
from .forward import arguments, outputs, replaced
from .progress import Progress
from .resources import FAILURES, is_out_of_memory, reason_of
from .samples import Chunk, Samples, Stack, Tree, mask_of, num_tokens, rows, shortened
from .shared_work import agreed, same
from .units import num_removed

NUM_SAMPLES = 16  # that decide
SIZE = {"cpu": 4, "cuda": 16}  # samples of a pass
PROMPT = 8  # tokens of a sample that the model continues
Place = tuple[str, int]  # a list of blocks, and one of them
Key = int | str  # of an input: its place, or its name


class Identity:
    """A forward that returns its first input, in the form of what the block returns."""

    def __init__(self, sources: list[Key | None], spec: Any) -> None:
        self.sources, self.spec = sources, spec  # which input each leaf of the output is
        setattr(self, STUB, True)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tree) -> "Identity | None":
        """None where the first tensor of the output has not the shape of the first input."""
        given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        leaves, spec = pytree.tree_flatten(output)
        number = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        first = next(iter(given), None)
        if number is None or first is None or leaves[number].shape != _shape(given[first]):
            return None
        sources = [_source(given, place, leaf) for place, leaf in enumerate(leaves)]
        sources[number] = first
        return Identity(sources, spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        given: dict[Key | None, Any] = {**dict(enumerate(args)), **kwargs}
        return pytree.tree_unflatten([given.get(source) for source in self.sources], self.spec)


def _source(given: Mapping[Key, Any], place: int, leaf: Any) -> Key | None:
    """The input that a block returns: the very same, or that at its place if it has its shape."""
    same = [key for key, value in given.items() if value is leaf is not None]
    at_place = [key for key in [*given][place : place + 1] if _shape(given[key]) == _shape(leaf) is not None]
    return next(iter([*same, *at_place]), None)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


@contextmanager
def seen_blocks(blocks: Mapping[Place, nn.Module]) -> Iterator[dict[Place, tuple[nn.Module, Identity]]]:
    """Afterwards holds the blocks with weights that the pass reached once, and their identities; or ValueError."""
    owners: dict[Tensor, Place] = {}
    for where, block in blocks.items():
        for parameter in block.parameters():
            if owners.setdefault(parameter, where) != where:
                (a, i), (b, j) = owners[parameter], where
                raise ValueError(f"{a}.{i} and {b}.{j} share weights, so no layer can be removed")
    calls: dict[nn.Module, list[Identity | None]] = {block: [] for block in blocks.values()}
    skips: dict[Place, tuple[nn.Module, Identity]] = {}
    with replaced({block: _watched(block, seen) for block, seen in calls.items()}):
        yield skips
    for where, block in blocks.items():
        if len(calls[block]) > 1:
            raise ValueError(f"the blocks of {where[0]} run more than once in a pass, so none can be removed")
        identity = calls[block][0] if calls[block] else None
        if identity is not None and any(parameter.ndim > 1 for parameter in block.parameters()):
            skips[where] = block, identity


def _watched(block: nn.Module, seen: list[Identity | None]) -> Callable[..., Tree]:
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Tree:
        output = own(*args, **kwargs)
        seen.append(Identity.of(args, kwargs, output))
        return output

    return forward


def can_generate(model: Any, sample: Tree) -> bool:
    """Whether it generates a token with its cache, whose layers the class may count in its own way."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return False
    args, named = arguments(model, shortened(sample, PROMPT) if num_tokens(sample) > PROMPT else sample)
    named = {key: value for key, value in named.items() if key not in ("use_cache", "decoder_input_ids", "labels")}
    try:
        model.generate(*args, **named, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _is_near(output: Tensor, expected: Tensor, tolerances: Mapping[torch.dtype, float]) -> bool:
    return output.shape == expected.shape and is_near(output, expected, tolerances.get(output.dtype, 1e-2))


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
        problem = f"cannot remove {num} of {choice.num_layers} layers: each list keeps at least one"
        raise ValueError(f"{problem}; remove 1 to {choice.most}")
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
        self.calibration, self.plan = calibration.with_samples(_few(calibration.samples, NUM_SAMPLES)), plan
        self.gone: list[Place] = []
        self.distances: list[float] = []
        self._sums: dict[Place, float] = {}
        self.first = self.calibration.batch(next(self.calibration.samples.chunks(1)))
        with self.calibration.open(), torch.no_grad():
            self.calibration.check_model()
            self._see_blocks()
            self.generates = can_generate(calibration.model, self.first)  # with all layers
            size = calibration.batch_size or SIZE.get(calibration.device.type, 4)
            self.size = size if self.calibration.can_batch() else 1

    def _see_blocks(self) -> None:
        """Run the first sample, and find the blocks that can be skipped and the lists that hold them."""
        model, lists = self.calibration.model, self.plan.lists
        blocks = {part.name: [*model.get_submodule(part.name).children()] for part in lists}
        with seen_blocks({(name, i): block for name, each in blocks.items() for i, block in enumerate(each)}) as skips:
            first = outputs(model, self.first)
        if not skips:
            problem = f"no layer of {type(model).__name__} can be removed: no block of {lists[0].name}"
            raise ValueError(f"{problem} that samples reach returns a tensor of the shape of its input")
        self.blocks, self.skips = blocks, skips
        self.distance = distance_of(first, self.calibration.samples.stacks[0].tree, model)
        self.lists = [part for part in lists if any(name == part.name for name, _ in skips)]
        self.is_chain: dict[str, bool] = {}
        for name in (part.name for part in self.lists):
            stream = Stream(blocks[name], Samples([Stack(self.first, 1)]))
            self.is_chain[name] = is_chain(stream, lambda _: self._output(self.first), [output_of(first)])

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
                reason = self._fault([*self.gone, where])
            if not reason:
                self.gone.append(where)
                self.distances.append(distance)
                return
            reasons.append(f"{where[0]}.{where[1]}: {reason}")
        if not any(map(math.isfinite, self._sums.values())) and self._is_nan():
            problem = f"{type(self.calibration.model).__name__} gives NaN for a sample"
            raise ValueError(f"{problem}; check that the inputs and the model's weights are finite")
        raise ValueError(f"no layer can be removed after {len(self.gone)}: {reasons[0]}")

    def _is_nan(self) -> bool:
        """Whether the outputs of the whole model are, for any sample."""
        with self.calibration.open(), torch.no_grad():
            chunks = self.calibration.samples.chunks(self.size)
            return any(bool(self._output(self.calibration.batch(chunk)).isnan().any()) for chunk in chunks)

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

    def _fault(self, gone: Sequence[Place]) -> str:
        """Why the model without these blocks is not what it is with identities in their places; empty where it is."""
        model = self.calibration.model
        try:
            cuts = self.plan.cuts(gone)
        except ValueError as error:
            return str(error)
        with self.calibration.open(), torch.no_grad(), replaced(dict(self.skips[where] for where in gone)):
            expected = self._output(self.first)
        args, named = arguments(model, self.first)
        as_users_call = {key: value for key, value in named.items() if key != "use_cache"}  # with a cache by default
        cuts.apply_()
        try:
            with self.calibration.open(), torch.no_grad():
                same, as_called = self._output(self.first), output_of(model(*args, **as_users_call))
                if self.generates and not can_generate(model, self.first):
                    return "generate fails without it, since its class counts layers in another way"
        except FAILURES as error:
            return f"the model fails without it: {reason_of(error)}"
        finally:
            cuts.undo_()
        if _is_near(same, expected, SAME) and _is_near(as_called, expected, ROUNDING):
            return ""
        return f"the layers after it would compute something else{self.plan.periods}"


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
