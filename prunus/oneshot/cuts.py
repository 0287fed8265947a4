"""Tensors without some of their slices and lists without some blocks, until the whole ones come back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .disk_offload import DiskOffload, disk_offload_of, nothing_like
from .units import MISSING, Number, UnitLayer, home_of


@dataclass
class _DiskCut:
    """A parameter on disk, of which the places ``keep`` along ``dim`` are read."""

    home: dict[str, Any]
    key: str
    dim: int
    keep: Tensor
    whole: nn.Parameter
    small: nn.Parameter
    name: str
    disk: DiskOffload
    is_applied: bool = False

    def apply_(self) -> None:
        shape = list(self.whole.shape)
        shape[self.dim] = len(self.keep)
        self.small.data = nothing_like(self.whole, shape)
        self.disk.put_view(self.name, lambda value: value.index_select(self.dim, self.keep), self.small)
        self.home[self.key], self.is_applied = self.small, True

    def undo_(self) -> None:
        if self.is_applied:
            self.disk.drop_view(self.name, self.whole)
        self.home[self.key], self.is_applied = self.whole, False


@dataclass
class _Cut:
    """A tensor, and the smaller one that takes its place in a module: without the places ``drop`` along ``dim``."""

    home: dict[str, Any]  # parameters or buffers of the module
    key: str
    dim: int
    keep: Tensor
    drop: Tensor
    whole: Tensor
    small: Tensor
    removed: Tensor | None = None  # in main memory, while the small one is in place
    order: tuple[int, ...] = ()  # of the dimensions in memory, where channels may come last

    def apply_(self) -> None:
        whole = self.whole.data
        order = tuple(sorted(range(whole.ndim), key=lambda dim: -whole.stride(dim)))
        laid, dim = whole.permute(order), order.index(self.dim)
        small, removed = (laid.index_select(dim, places.to(whole.device)) for places in (self.keep, self.drop))
        self.order, self.small.data = order, _permuted_back(small, order)
        self.removed = removed.cpu()  # before this nothing has changed, and after it undo_ has all that it needs
        self.home[self.key], self.whole.data = self.small, whole.new_empty(0)

    def undo_(self) -> None:
        if self.removed is None:
            return
        if self.home[self.key].shape == self.small.shape:  # a buffer is another tensor after the model was moved
            self.small.data = self.home[self.key].data
        small, dim, shape = self.small.data.permute(self.order), self.order.index(self.dim), list(self.removed.shape)
        shape[dim] += len(self.keep)
        whole = small.new_empty(shape)
        for places, values in ((self.keep, small), (self.drop, self.removed)):
            whole.index_copy_(dim, places.to(small.device), values.to(small.device))
        self.whole.data = _permuted_back(whole, self.order)
        self.home[self.key], self.removed = self.whole, None
        self.small.data = small.new_zeros(()).expand(self.small.shape)  # its shape, without its memory


def _permuted_back(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    return tensor.movedim(tuple(range(tensor.ndim)), order)


def to_the_end(undo: Callable[[], None]) -> None:
    """Undo, also where an interruption ends it: what it leaves, a second call undoes."""
    try:
        undo()
    except BaseException:
        undo()
        raise


@dataclass
class _Blocks:
    """A list of modules without some of them, which come back on the device of those that stay."""

    module: nn.Module
    before: dict[str, nn.Module]
    after: dict[str, nn.Module]
    device: torch.device | None = None  # of the blocks that stay, when the others went

    @property
    def gone(self) -> list[nn.Module]:
        return [block for block in self.before.values() if block not in self.after.values()]

    def apply_(self) -> None:
        self.device = self._device_now()
        self._fill(self.after)

    def undo_(self) -> None:
        if (now := self._device_now()) != self.device and self.device is not None:
            for block in self.gone:
                block.to(now)
        self._fill(self.before)

    def _fill(self, blocks: Mapping[str, nn.Module]) -> None:
        self.module._modules.clear()
        self.module._modules.update(blocks)

    def _device_now(self) -> torch.device | None:
        return next((parameter.device for block in self.after.values() for parameter in block.parameters()), None)


@dataclass(repr=False)
class Cuts:
    """What makes a model smaller, and whole again bit for bit; what was removed is in main memory."""

    _cuts: list[_Cut | _DiskCut | _Blocks] = field(default_factory=list)
    _numbers: list[tuple[Any, str, Any, Any]] = field(default_factory=list)  # owner, attribute, before and after
    is_applied: bool = False

    @staticmethod
    def of(model: nn.Module, drop: Mapping[tuple[str, int], Tensor], numbers: Iterable[Number]) -> "Cuts":
        """Without the places ``drop``, by name of a tensor and dimension, and with new numbers; not applied yet."""
        cuts, now, disk = Cuts(_numbers=_with_old(numbers)), {}, disk_offload_of(model)
        for (name, dim), places in drop.items():
            home, key = home_of(model, name)
            whole = now.get(name, home[key])
            small = whole.detach().new_empty(0)
            if isinstance(whole, nn.Parameter):
                small = nn.Parameter(small, whole.requires_grad)
            stays = torch.ones(whole.shape[dim] if name not in now else home[key].shape[dim], dtype=torch.bool)
            stays[places] = False
            keep, gone = stays.nonzero().squeeze(1), (~stays).nonzero().squeeze(1)
            if disk is not None and name in disk.names:
                cuts._cuts.append(_DiskCut(home, key, dim, keep, whole, small, name, disk))
            else:
                cuts._cuts.append(_Cut(home, key, dim, keep, gone, whole, small))
            now[name] = small
        return cuts

    @staticmethod
    def of_units(model: nn.Module, gone: Mapping[UnitLayer, Tensor], numbers: Iterable[Number]) -> "Cuts":
        """Without the units ``gone`` of each layer, by their numbers."""
        drop: dict[tuple[str, int], list[Tensor]] = {}
        for layer, units in gone.items():
            for name, slices in layer.slices.items():
                drop.setdefault((name, slices.dim), []).append(slices.places[units].flatten())
        return Cuts.of(model, {where: torch.cat(places) for where, places in drop.items()}, numbers)

    @staticmethod
    def of_blocks(model: nn.Module, kept: Mapping[str, Mapping[str, str]], numbers: Iterable[Number]) -> "Cuts":
        """With the blocks ``kept`` alone, by name of their list: for the key of each its new one."""
        cuts = Cuts(_numbers=_with_old(numbers))
        for name, keys in kept.items():
            module = model.get_submodule(name)
            before: dict[str, Any] = dict(module._modules)
            cuts._cuts.append(_Blocks(module, before, {new: before[key] for key, new in keys.items()}))
        return cuts

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for cut in self._cuts if isinstance(cut, _Blocks) for block in cut.gone]

    def apply_(self) -> None:
        """Take it out, unless it is out already; after an exception everything is as before."""
        if self.is_applied:
            return
        self.is_applied = True
        try:
            for cut in self._cuts:
                cut.apply_()
            for owner, key, _, after in self._numbers:
                setattr(owner, key, after)
        except BaseException:
            self.undo_()
            raise

    def undo_(self) -> None:
        to_the_end(self._undo_)

    def _undo_(self) -> None:
        if not self.is_applied:
            return
        for cut in reversed(self._cuts):
            cut.undo_()
        for owner, key, before, _ in reversed(self._numbers):
            if before is not MISSING and getattr(owner, key, MISSING) != before:
                setattr(owner, key, before)
            elif before is MISSING and hasattr(owner, key):
                delattr(owner, key)
        self.is_applied = False


def _with_old(numbers: Iterable[Number]) -> list[tuple[Any, str, Any, Any]]:
    return [(owner, key, getattr(owner, key, MISSING), after) for owner, key, after in numbers]
