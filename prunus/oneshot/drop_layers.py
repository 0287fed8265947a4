"""Whole layers that go: one at a time, that without which the model's outputs change least."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import SAME, STUB, is_near
from .calibration import Calibration
from .cut import Cuts
from .distance import Distance, distance_of, output_of
from .fewer_layers import FewerLayers, fewer_layers, new_keys
from .forward import arguments, outputs, replaced
from .resources import FAILURES, is_out_of_memory
from .samples import Chunk, Samples, Stack, Tree, mask_of, rows

NUM_SAMPLES = 16  # that decide
SIZE = {"cpu": 4, "cuda": 16}  # samples of a pass
Place = tuple[str, int]  # a list of blocks, and one of them


@dataclass(repr=False)
class DroppedLayers:
    """Which layers went, in their order, and how far the model's outputs were from the dense model's after each."""

    names: list[str]  # in the dense model
    distances: list[float]
    loss: str  # what the distances are
    num_layers: int  # of the dense model
    _lists: list[tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Module]]] = field(default_factory=list)
    _numbers: Cuts = field(default_factory=Cuts)
    is_applied: bool = False

    def __repr__(self) -> str:
        return f"DroppedLayers({self.num_dropped} of {self.num_layers}: {', '.join(self.names)})"

    @property
    def num_dropped(self) -> int:
        return len(self.names)

    @property
    def by_list(self) -> dict[str, list[str]]:
        """Names of the layers that went, by the list that held them."""
        lists: dict[str, list[str]] = {}
        for name in self.names:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
        return lists

    def apply_(self) -> None:
        """Remove the layers, unless they are removed already."""
        if not self.is_applied:
            for module, _, after in self._lists:
                _fill(module, after)
            self._numbers.apply_()
        self.is_applied = True

    def undo_(self) -> None:
        """Put the same modules back, with all that counts them."""
        if self.is_applied:
            for module, before, _ in self._lists:
                _fill(module, before)
            self._numbers.undo_()
        self.is_applied = False


def _fill(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    module._modules.clear()
    module._modules.update(blocks)


def drop_layers_(calibration: Calibration, num: int) -> DroppedLayers:
    """Remove ``num`` blocks: each time that without which the outputs are nearest to the dense model's.

    Outputs are compared on at most 16 samples, evenly taken, as KL divergence where they are logits. Each block that
    stays gives what it gave before, and a list keeps at least one. Of equal blocks the first goes. ``calibration``
    still has the weights and blocks of the dense model afterwards.
    """
    if isinstance(num, bool) or not isinstance(num, Integral) or num < 1:
        raise ValueError(f"layers is the number of them to remove, at least 1, got {num!r}")
    plan = fewer_layers(calibration.model, calibration.blocks)
    if num > plan.num - len(plan.lists):
        most = plan.num - len(plan.lists)
        raise ValueError(
            f"{num} of {plan.num} layers cannot go: at least one of each list stays; remove at most {most}"
        )
    choice = _Choice(calibration, plan)
    for _ in range(int(num)):
        choice.remove_one()
    dropped = without_layers(plan, choice.gone, choice.distances, str(choice.distance))
    dropped.apply_()
    return dropped


def without_layers(
    plan: FewerLayers, gone: Collection[Place], distances: Collection[float] = (), loss: str = ""
) -> DroppedLayers:
    """What takes the place of the lists of blocks and of numbers where the blocks ``gone`` are; not applied yet."""
    places: dict[str, list[int]] = {}
    for name, place in gone:
        places.setdefault(name, []).append(place)
    numbers = Cuts.of(plan.model, {}, plan.numbers(places))
    dropped = DroppedLayers([], [*distances], loss, plan.num, [], numbers)
    for name, place in gone:
        dropped.names.append(f"{name}.{[*plan.model.get_submodule(name)._modules][place]}")
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
        self.distance = Distance()
        self._sums: dict[Place, float] = {}
        with calibration.open(), torch.no_grad():
            calibration.check_model()
            self.stubs = self._stubs()
            size = calibration.batch_size or SIZE.get(calibration.device.type, 4)
            self.size = size if calibration.can_batch() else 1

    def _stubs(self) -> "dict[Place, tuple[nn.Module, _Identity]]":
        """An identity for each block that the first sample reaches once, and whose output has its input's form."""
        modules = {
            (blocks.name, place): module
            for blocks in self.plan.lists
            for place, module in enumerate(self.plan.modules(blocks))
        }
        calls: dict[nn.Module, list[_Identity | None]] = {module: [] for module in modules.values()}

        def see(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tree) -> None:
            calls[module].append(_Identity.of(args, kwargs, output))

        handles = [module.register_forward_hook(see, with_kwargs=True) for module in calls]
        try:
            first = self._outputs(next(self.calibration.samples.chunks(1)))
        finally:
            for handle in handles:
                handle.remove()
        problem = getattr(getattr(self.calibration.model, "config", None), "problem_type", None)
        self.distance = distance_of(first, self.calibration.samples.stacks[0].tree, problem)
        _check_shared(modules)
        if often := [name for (name, _), module in modules.items() if len(calls[module]) > 1]:
            raise ValueError(f"the blocks of {often[0]} run more than once in a pass, so that none can be removed")
        able = {where: (module, stub) for where, module in modules.items() for stub in calls[module] if stub}
        if not able:
            raise ValueError(
                f"no layer of {type(self.plan.model).__name__} can be removed: none of {self.plan.lists[0].name} "
                "returns a tensor of the shape of its input"
            )
        return able

    def _outputs(self, chunk: Chunk) -> Any:
        self.calibration.cost.forwards += chunk.size
        return outputs(self.calibration.model, self.calibration.batch(chunk))

    def _as_called(self, chunk: Chunk) -> Any:
        """Outputs of the model as users call it: with a cache, if that is its default."""
        args, named = arguments(self.calibration.model, self.calibration.batch(chunk))
        return self.calibration.model(*args, **{key: value for key, value in named.items() if key != "use_cache"})

    @contextmanager
    def _without(self, places: Collection[Place]) -> Iterator[None]:
        with replaced(dict(self.stubs[where] for where in places)):
            yield

    def remove_one(self) -> None:
        """The next block: the nearest outputs among those whose removal the class can build."""
        left = {blocks.name: blocks.num for blocks in self.plan.lists}
        for name, _ in self.gone:
            left[name] -= 1
        trials = [where for where in self.stubs if where not in self.gone and left[where[0]] > 1]
        self._sums = dict.fromkeys(trials, 0.0)
        with self.calibration.open(), torch.no_grad(), self.calibration.reading(f"layer {len(self.gone) + 1}"):
            self.calibration.visit(self.size, self._pass, self._add)
        reasons = []
        for where in sorted((w for w in trials if self._sums[w] == self._sums[w]), key=self._sums.__getitem__):
            if reason := self._refusal([*self.gone, where]):
                reasons.append(f"{where[0]}.{where[1]}: {reason}")
                continue
            self.gone.append(where)
            self.distances.append(self._sums[where])
            return
        why = reasons[0] if reasons else "the outputs are not finite"
        raise ValueError(f"no layer can be removed after {len(self.gone)}: {why}")

    def _pass(self, chunk: Chunk) -> list[tuple[Place, float]]:
        mask, share = mask_of(self.calibration.batch(chunk)), chunk.size / len(self.calibration.samples)
        expected, parts = output_of(self._outputs(chunk)), []
        for where in self._sums:
            with self._without([*self.gone, where]):
                distance = self.distance(output_of(self._outputs(chunk)), expected, mask)
            parts.append((where, distance.double().item() * share))
        return parts

    def _add(self, part: tuple[Place, float]) -> None:
        self._sums[part[0]] += part[1]

    def _refusal(self, gone: Collection[Place]) -> str:
        """Why the model without these blocks is not what it is with identities in their places; empty where it is."""
        first = next(self.calibration.samples.chunks(1))
        with self.calibration.open(), torch.no_grad(), self._without(gone):
            expected = output_of(self._outputs(first))
        try:
            dropped = without_layers(self.plan, gone)
        except ValueError as error:
            return str(error)
        dropped.apply_()
        try:
            with self.calibration.open(), torch.no_grad():
                output = output_of(self._as_called(first))
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return f"the model fails without it: {' '.join(str(error).split())[:200]}"
        finally:
            dropped.undo_()
        if output.shape == expected.shape and is_near(output, expected, SAME.get(output.dtype, 1e-2)):
            return ""
        return f"the layers after it would compute something else{self.plan.periods}"


class _Identity:
    """A forward that returns its first input, in the form of what the block returns."""

    def __init__(self, sources: list[int | str | None], spec: Any) -> None:
        self.sources, self.spec = sources, spec
        setattr(self, STUB, True)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tree) -> "_Identity | None":
        """None where the first tensor of the output has not the shape of the first input."""
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        leaves, spec = pytree.tree_flatten(output)
        first = next(iter(given), None)
        sources: list[int | str | None] = [
            next((key for key, value in given.items() if value is leaf and value is not None), None) for leaf in leaves
        ]
        number = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if number is None or first is None or not isinstance(given[first], Tensor):
            return None
        if leaves[number].shape != given[first].shape:
            return None
        sources[number] = first
        return _Identity(sources, spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        given: dict[int | str | None, Any] = {**dict(enumerate(args)), **kwargs}
        return pytree.tree_unflatten([given.get(source) for source in self.sources], self.spec)


def _check_shared(modules: Mapping[Place, nn.Module]) -> None:
    """Refuse blocks that share weights: removing one would save nothing."""
    owners: dict[Tensor, Place] = {}
    for where, module in modules.items():
        for parameter in module.parameters():
            if owners.setdefault(parameter, where) != where:
                (a, i), (b, j) = owners[parameter], where
                raise ValueError(f"{a}.{i} and {b}.{j} share weights, so that no layer can be removed")


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
