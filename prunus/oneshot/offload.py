"""Models larger than the accelerator: the weights of one block are on it at a time, forward and backward.

Blocks are moved by hooks around their calls. What autograd would save of a block's weights for the backward is
replaced by a note of which weight it was, and fetched again when the backward reaches it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..eligible import Weight
from .chain import STUB, blocks_of

Saves = Callable[[Tensor], None]


@dataclass(frozen=True)
class _Note:
    """A saved tensor that is part of a weight: which, and which part."""

    parameter: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """Where a model's weights are while it runs on ``device`` block by block."""

    def __init__(self, model: nn.Module, weights: Sequence[Weight], device: torch.device) -> None:
        blocks = blocks_of(model, weights)
        if not blocks:
            raise ValueError(
                f"{type(model).__name__} has no list of blocks with weights to prune, so that none can be moved alone; "
                "leave out offload"
            )
        inside = {part for block in blocks for part in block.modules()}
        others = [weight.module for weight in weights if weight.module not in inside]
        self.units: list[nn.Module] = [*dict.fromkeys([*blocks, *others])]
        self.model, self.device = model, device
        self.num_moves = 0  # of a unit onto the device
        self._homes: dict[Tensor, Tensor] = {}  # of what is on the device now
        self._owners: dict[Tensor, nn.Module] = {t: unit for unit in self.units for t in _tensors(unit)}
        self._by_address: dict[int, Tensor] = {}
        self._fetched: tuple[nn.Module | None, dict[Tensor, Tensor]] = (None, {})
        self._edges: dict[Tensor, list[GradientEdge]] = {}

    @contextmanager
    def open(self) -> Iterator["Offload"]:
        """The model runs on the device; all that is in no unit is there the whole time, and comes back at the end."""
        outside = [t for t in _tensors(self.model) if t not in self._owners]
        homes = {tensor: tensor.data for tensor in outside}
        handles = [unit.register_forward_pre_hook(self._load) for unit in self.units]
        handles += [unit.register_forward_hook(self._unload, always_call=True) for unit in self.units]
        try:
            for tensor, home in homes.items():
                tensor.data = home.to(self.device)
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.settle()
            for tensor, home in homes.items():
                tensor.data = home
            self._fetched = (None, {})

    def _load(self, unit: nn.Module, *_: Any) -> None:
        if hasattr(vars(unit).get("forward"), STUB):
            return  # its output is known, and nothing in it will run
        self.settle()  # a unit that was left by an exception
        self.num_moves += 1
        for tensor in _tensors(unit):
            self._homes[tensor] = tensor.data
            tensor.data = _copy(tensor.data, self.device)
            if tensor.numel():
                self._by_address[tensor.untyped_storage().data_ptr()] = tensor
            if tensor.requires_grad:
                # the node that gradients end in belongs to the data of this moment
                self._edges.setdefault(tensor, []).append(get_gradient_edge(tensor))

    def _unload(self, unit: nn.Module, *_: Any) -> None:
        self.settle()

    def holds(self, unit: nn.Module) -> bool:
        """Whether the weights of ``unit`` are on the device now."""
        return all(tensor in self._homes for tensor in _tensors(unit))

    @contextmanager
    def loaded(self, unit: nn.Module) -> Iterator[None]:
        """The weights of ``unit`` on the device, for a run that none of its hooks sees."""
        self._load(unit)
        try:
            yield
        finally:
            self.settle()

    def settle(self) -> None:
        """Have every weight of a unit where it was."""
        for tensor, home in self._homes.items():
            tensor.data = home
        self._homes.clear()
        self._by_address.clear()

    @contextmanager
    def saving(self, saves: Saves | None = None) -> Iterator[None]:
        """Passes whose graph holds no weight of a unit; ``saves`` is told of what it does hold."""

        def pack(tensor: Tensor) -> Tensor | _Note:
            parameter = self._by_address.get(tensor.untyped_storage().data_ptr())
            if parameter is not None:
                return _Note(parameter, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if saves is not None:
                saves(tensor)
            return tensor

        def unpack(saved: Tensor | _Note) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            return self._value(saved.parameter).as_strided(saved.size, saved.stride, saved.offset)

        self._edges.clear()
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._edges.clear()
            self._fetched = (None, {})

    def _value(self, parameter: Tensor) -> Tensor:
        """A weight on the device, with the others of its unit: the backward will ask for them next."""
        owner = self._owners[parameter]
        if self._fetched[0] is not owner:
            self._fetched = (None, {})  # frees the unit before, ahead of this one
            self._fetched = (owner, {t: _copy(t.data, self.device) for t in _tensors(owner)})
            self.num_moves += 1
        return self._fetched[1][parameter].detach()

    def gradients(self, total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of ``total`` for tensors and weights, None where there is no way to them."""
        edges = [[*{edge.node: edge for edge in self._edges[t]}.values()] if t in self._edges else [t] for t in inputs]
        flat: list[Any] = [edge for each in edges for edge in each]
        found = iter(torch.autograd.grad(total, flat, allow_unused=True))
        return [_sum([next(found) for _ in each]) for each in edges]


def saving(offload: Offload | None, saves: Saves | None = None) -> AbstractContextManager[None]:
    """Passes whose saves are told to ``saves``, without the weights of an offloaded model."""
    if offload is not None:
        return offload.saving(saves)
    return nullcontext() if saves is None else saved_tensors_hooks(_told(saves), lambda tensor: tensor)


def gradients(offload: Offload | None, total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    if offload is not None:
        return offload.gradients(total, inputs)
    return [*torch.autograd.grad(total, list(inputs), allow_unused=True)]


def _told(saves: Saves) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        saves(tensor)
        return tensor

    return pack


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Always a copy, so that a device which is the weights' own is treated as any other."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None
