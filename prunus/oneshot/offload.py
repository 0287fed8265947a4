"""Models that do not fit on the accelerator: one block is there at a time, or runs again for the backward.

Hooks around the calls of a block move its weights. Where autograd would save a weight for the backward, a reference to
it is saved instead, and the weight is fetched again when the backward needs it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..eligible import Weight
from .blocks import blocks_of, is_stubbed
from .disk_offload import opened

Saves = Callable[[Tensor], None]


@dataclass(frozen=True)
class _Reference:
    """A view of a weight, saved in place of its values."""

    parameter: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Copy:
    """Values of a tensor on the device, made when it had this version; ``home`` holds on to their address."""

    values: Tensor
    home: Tensor
    version: int


class Offload:
    """Moves the weights of a model while it runs on ``device`` block by block."""

    def __init__(self, model: nn.Module, weights: Sequence[Weight], device: torch.device) -> None:
        blocks = blocks_of(model, weights)
        if not blocks:
            raise ValueError(
                f"{type(model).__name__} has no list of blocks with prunable weights to move one at a time; leave out "
                "offload"
            )
        inside = {part for block in blocks for part in block.modules()}
        # hooks of an output projection would not move it, since attention does not call it: it stays on the device
        others = [w.module for w in weights if not isinstance(w.module, NonDynamicallyQuantizableLinear)]
        others = [module for module in others if module not in inside]
        self.units: list[nn.Module] = [*dict.fromkeys([*blocks, *others])]
        self.model, self.device = model, device
        self.num_moves = 0  # of a unit onto the device
        self._homes: dict[Tensor, Tensor] = {}  # of what is on the device now
        self._staying: nn.Module | None = None
        self._owners: dict[Tensor, nn.Module] = {t: unit for unit in self.units for t in _tensors(unit)}
        self._by_address: dict[int, Tensor] = {}
        self._fetched: tuple[nn.Module | None, dict[Tensor, Tensor]] = (None, {})
        self._keeps = False
        self._last: nn.Module | None = None  # the unit that was loaded last
        self._copies: dict[tuple[Tensor, int], _Copy] = {}  # of it, by tensor and the address of its values
        self._edges: dict[Tensor, list[GradientEdge]] = {}

    @contextmanager
    def open(self) -> Iterator["Offload"]:
        """The model runs on the device; what is in no unit stays there, and comes back at the end."""
        outside = [t for t in _tensors(self.model) if t not in self._owners]
        homes = {tensor: tensor.data for tensor in outside}
        with opened(self.model):  # what is on disk is read before it is moved
            handles = [unit.register_forward_pre_hook(self._load) for unit in self.units]
            handles += [unit.register_forward_hook(lambda *_: self.unload(), always_call=True) for unit in self.units]
            try:
                for tensor, home in homes.items():
                    tensor.data = home.to(self.device)
                yield self
            finally:
                for handle in handles:
                    handle.remove()
                self.unload()
                for tensor, home in homes.items():
                    tensor.data = home.copy_(tensor.data)
                self._fetched = (None, {})

    def _load(self, unit: nn.Module, *_: Any) -> None:
        if is_stubbed(unit) or unit is self._staying:
            return
        self.unload()  # a unit whose forward ended with an exception
        if unit is not self._last:
            self._copies.clear()
            self._last = unit
        tensors = {tensor: self._kept(tensor) for tensor in _tensors(unit)}
        self.num_moves += any(values is None for values in tensors.values())
        for tensor, values in tensors.items():
            self._homes[tensor] = home = tensor.data
            tensor.data = _copy(home, self.device) if values is None else values
            if self._keeps:
                self._copies[tensor, home.data_ptr()] = _Copy(tensor.data, home, tensor._version)
            if tensor.numel():
                self._by_address[tensor.untyped_storage().data_ptr()] = tensor
            if tensor.requires_grad:
                # the node that gradients end in belongs to the data of this moment
                self._edges.setdefault(tensor, []).append(get_gradient_edge(tensor))

    def _kept(self, tensor: Tensor) -> Tensor | None:
        copy = self._copies.get((tensor, tensor.data_ptr()))
        return None if copy is None or copy.version != tensor._version else copy.values

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A unit stays on the device until the next one comes: passes in a row move only what has changed in it.

        Changes must be made to the weights themselves, not to their ``data``.
        """
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self._copies.clear()

    @contextmanager
    def loaded(self, unit: nn.Module) -> Iterator[None]:
        """The weights of ``unit`` on the device, for a run that may not call its hooks."""
        if all(tensor in self._homes for tensor in _tensors(unit)):
            yield
            return
        self._load(unit)
        try:
            yield
        finally:
            self.unload()

    @contextmanager
    def staying(self, unit: nn.Module) -> Iterator[None]:
        """The weights of ``unit`` on the device for many passes; changes to them are written back at the end."""
        self._load(unit)
        homes, self._homes, self._staying = self._homes, {}, unit
        try:
            yield
        finally:
            self.unload()
            self._staying = None
            self._copies.clear()
            for tensor, home in homes.items():
                tensor.data = home.copy_(tensor.data)

    def unload(self) -> None:
        """Give the weights of the unit on the device back their own data."""
        for tensor, home in self._homes.items():
            tensor.data = home
        self._homes.clear()
        self._by_address.clear()

    @contextmanager
    def saving(self, saves: Saves | None = None) -> Iterator[None]:
        """Passes whose graph holds no weight of a unit; ``saves`` is called with every tensor that it does hold."""

        def pack(tensor: Tensor) -> Tensor | _Reference:
            parameter = self._by_address.get(tensor.untyped_storage().data_ptr())
            if parameter is not None:
                return _Reference(parameter, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if saves is not None:
                saves(tensor)
            return tensor

        def unpack(saved: Tensor | _Reference) -> Tensor:
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
        """A weight on the device; the others of its unit are fetched too, as the backward needs them next."""
        owner = self._owners[parameter]
        if self._fetched[0] is not owner:
            self._fetched = (None, {})  # frees the previous unit first
            self._fetched = (owner, {t: _copy(t.data, self.device) for t in _tensors(owner)})
            self.num_moves += 1
        return self._fetched[1][parameter].detach()

    def gradients(self, total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of ``total`` for tensors and weights, None where the graph does not reach them."""
        edges = [[*{edge.node: edge for edge in self._edges[t]}.values()] if t in self._edges else [t] for t in inputs]
        flat: list[Any] = [edge for each in edges for edge in each]
        flat_gradients = iter(torch.autograd.grad(total, flat, allow_unused=True))
        parts = [[g for _ in each if (g := next(flat_gradients)) is not None] for each in edges]
        return [torch.stack(own).sum(0) if len(own) > 1 else own[0] if own else None for own in parts]


def saving(offload: Offload | None, saves: Saves | None = None) -> AbstractContextManager[None]:
    """Passes that call ``saves`` with each tensor that autograd saves, an offloaded model's weights aside."""
    if offload is not None:
        return offload.saving(saves)
    if saves is None:
        return nullcontext()

    def pack(tensor: Tensor) -> Tensor:
        saves(tensor)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


@contextmanager
def counted_saves(model: nn.Module, offload: Offload | None = None) -> Iterator[list[int]]:
    """A list that collects the sizes in bytes of what autograd saves, the model's own tensors aside."""
    sizes: list[int] = []
    seen = {tensor.untyped_storage().data_ptr() for tensor in _tensors(model)}

    def count(tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in seen:
            seen.add(address)
            sizes.append(tensor.untyped_storage().nbytes())

    with saving(offload, count):
        yield sizes


def gradients(offload: Offload | None, total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """``torch.autograd.grad`` of a model that may be offloaded, None for what has no part in ``total``."""
    if offload is not None:
        return offload.gradients(total, inputs)
    return [*torch.autograd.grad(total, list(inputs), allow_unused=True)]


def checkpointed(block: nn.Module, offload: Offload | None) -> Callable[..., Any]:
    """A forward for ``block`` that saves only its inputs, and runs the block again for the backward."""
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]

        def run(*args: Any, **kwargs: Any) -> Any:
            if [tensor._version for tensor in given] != versions:
                raise ValueError(f"{type(block).__name__} changes its input in place; leave out checkpointing")
            with nullcontext() if offload is None else offload.loaded(block):  # the backward calls no hook of it
                return own(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Always a copy, so that the weights' own device is treated like any other."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
