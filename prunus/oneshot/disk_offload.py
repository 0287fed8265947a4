"""Models larger than memory: the weights of one block at a time are there, read from where they are stored."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..ops.machine import give_back
from .blocks import is_stubbed

Read = Callable[[str], Tensor]  # the values of a parameter, by name
View = Callable[[Tensor], Tensor]
RECLAIMED = 1 << 27  # bytes of read values after which free memory goes back to the system
_OFFLOADS: "WeakKeyDictionary[nn.Module, DiskOffload]" = WeakKeyDictionary()


class DiskOffload:
    """The parameters of a model's blocks, which are read when their block runs and dropped when another one does.

    In between one NaN stands for all elements of a parameter, so that nothing computes with it unseen. Parameters
    outside the blocks, or of several, stay. Who changes a block stores it, and says by ``stored`` what reads it.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], read: Read) -> None:
        self.blocks, self.read = list(blocks), read  # without the model, which would live as long as this
        self.stored: dict[str, Read] = {}  # of parameters that were changed
        self._views: dict[str, list[View]] = {}  # what else becomes of values when they are read
        self.num_reads = 0  # of a block
        self._num_bytes = 0  # that were read since memory was given back
        names = {parameter: name for name, parameter in model.named_parameters()}
        layers = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
        homes = Counter(parameter for block in self.blocks for parameter in block.parameters())
        alone = {parameter for parameter in names if layers[parameter] == homes[parameter] == 1}
        self._names = {
            block: {parameter: names[parameter] for parameter in block.parameters() if parameter in alone}
            for block in self.blocks
        }
        self._homes = {name: block for block, own in self._names.items() for name in own.values()}
        self._here: list[nn.Module] = []  # blocks that are in memory
        self._held: list[nn.Module] = []  # those of them that stay
        self._other: Read | None = None  # in place of the values that parameters have now
        self._is_open = False
        for block in self.blocks:
            self._drop(block)
        _OFFLOADS[model] = self

    @property
    def names(self) -> Collection[str]:
        return self._homes.keys()

    @property
    def parameters(self) -> set[Tensor]:
        return {parameter for own in self._names.values() for parameter in own}

    def num_bytes(self, block: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._names[block])

    @contextmanager
    def open(self) -> Iterator[None]:
        """While this is open, the model runs: a block is read before its forward, or that of a layer in it."""
        if self._is_open:
            yield
            return
        handles = [
            module.register_forward_pre_hook(partial(self._run, block))
            for block in self.blocks
            for module in block.modules()
            if module is block or not self._names[block].keys().isdisjoint(module._parameters.values())
        ]
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            for handle in handles:
                handle.remove()
            self.clear()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The same for a call that changes the model: after an exception parameters have the values of before."""
        stored = dict(self.stored)
        try:
            with self.open():
                yield
        except BaseException:
            self.stored = stored
            raise

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """The blocks of these parameters in memory until this is closed, with all that is changed in them."""
        blocks = list(dict.fromkeys(self._homes[name] for name in names if name in self._homes))
        self._held += blocks
        try:
            for block in blocks:
                self._enter(block)
            yield
        finally:
            for block in blocks:
                self._held.remove(block)

    @contextmanager
    def reading(self, read: Read) -> Iterator[None]:
        """While this is open, blocks have other values."""
        self.clear()
        before, self._other = self._other, read
        try:
            yield
        finally:
            self._other = before
            self.clear()

    def now(self) -> Read:
        """What reads the values that parameters have now, however they are changed later."""
        stored, read = dict(self.stored), self.read
        return lambda name: stored.get(name, read)(name)

    def clear(self) -> None:
        """Drop every block that is not held."""
        for block in [block for block in self._here if block not in self._held]:
            self._drop(block)

    def value(self, name: str) -> Tensor:
        """What a parameter holds now; OSError, which no pass takes for a failure of the model, if it cannot be read."""
        try:
            value = (self._other or self.stored.get(name) or self.read)(name)
        except ValueError as error:
            raise OSError(str(error)) from error
        for view in self._views.get(name, ()):
            value = view(value)
        self._num_bytes += value.nbytes
        if self._num_bytes > RECLAIMED:  # a tensor seldom fits into the hole that one of its size left in the heap
            self._num_bytes = 0
            give_back()
        return value

    def put_view(self, name: str, view: View, parameter: nn.Parameter | None = None) -> None:
        """Read a parameter through a function from now on; another one takes its place where its shape changes."""
        self._views.setdefault(name, []).append(view)
        self._take(name, parameter)

    def drop_view(self, name: str, parameter: nn.Parameter | None = None) -> None:
        self._views[name].pop()
        self._take(name, parameter)

    def _take(self, name: str, parameter: nn.Parameter | None) -> None:
        block = self._homes[name]
        self.clear()
        if parameter is not None:
            own = self._names[block]
            self._names[block] = {parameter if own[one] == name else one: own[one] for one in own}

    def _run(self, block: nn.Module, *_: Any) -> None:
        if not is_stubbed(block):
            self._enter(block)

    def _enter(self, block: nn.Module) -> None:
        if block in self._here:
            return
        self.clear()  # before the next one takes memory
        self._here.append(block)
        self.num_reads += 1
        for parameter, name in self._names[block].items():
            value = self.value(name)
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                there, here = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (value, parameter))
                raise OSError(f"{name} is {there} on disk, but {here} in the model; has its folder changed?")
            parameter.data = value

    def _drop(self, block: nn.Module) -> None:
        for parameter in self._names[block]:
            parameter.data = nothing_like(parameter)
        if block in self._here:
            self._here.remove(block)


def disk_offload_of(model: nn.Module) -> DiskOffload | None:
    """That of a model whose blocks are read from disk."""
    return _OFFLOADS.get(model)


def opened(model: nn.Module) -> AbstractContextManager[None]:
    """While this is open, the model runs, wherever its weights are."""
    offload = disk_offload_of(model)
    return nullcontext() if offload is None else offload.open()


def nothing_like(parameter: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """One element that stands for all, of a tensor of this shape, or of another one."""
    value = math.nan if parameter.is_floating_point() else 0
    shape = parameter.shape if shape is None else shape
    return torch.full((), value, dtype=parameter.dtype, device="cpu").expand(shape)
