"""Tensors without some of their slices, in the places of whole ones, until the whole ones come back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .units import Number, UnitLayer, home_of

MISSING = object()  # an attribute that is not there


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
        self.order, self.small.data = order, small.permute(_inverse(order))
        self.removed = removed.cpu()  # before this nothing has changed, and after it undo_ has all that it needs
        self.home[self.key], self.whole.data = self.small, whole.new_empty(0)

    def undo_(self) -> None:
        assert self.removed is not None
        if self.home[self.key].shape == self.small.shape:  # a buffer is another tensor after the model was moved
            self.small.data = self.home[self.key].data
        small, dim, shape = self.small.data.permute(self.order), self.order.index(self.dim), list(self.removed.shape)
        shape[dim] += len(self.keep)
        whole = small.new_empty(shape)
        for places, values in ((self.keep, small), (self.drop, self.removed)):
            whole.index_copy_(dim, places.to(small.device), values.to(small.device))
        self.whole.data = whole.permute(_inverse(self.order))
        self.home[self.key], self.removed = self.whole, None
        self.small.data = small.new_zeros(()).expand(self.small.shape)  # its shape, without its memory


def to_the_end(undo: Callable[[], None]) -> None:
    """Undo, also where an interruption ends it: what it leaves, a second call undoes."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


@dataclass(repr=False)
class Removal:
    """What is taken out of a model and can be put back: all of it or, after an exception, nothing."""

    is_applied: bool = field(default=False, kw_only=True)

    def apply_(self) -> None:
        """Take it out, unless it is out already; after an exception everything is as before."""
        if self.is_applied:
            return
        self.is_applied = True
        try:
            self._apply_()
        except BaseException:
            self.undo_()
            raise

    def undo_(self) -> None:
        """Put everything back, bit for bit."""
        to_the_end(self._undo_if_applied_)

    def _undo_if_applied_(self) -> None:
        if self.is_applied:
            self._undo_()
        self.is_applied = False

    def _apply_(self) -> None:
        raise NotImplementedError

    def _undo_(self) -> None:
        """Put back what is out; it may be a part of it."""
        raise NotImplementedError


@dataclass(repr=False)
class Cuts(Removal):
    """What makes a model smaller, and whole again bit for bit. What was removed is in main memory."""

    _cuts: list[_Cut] = field(default_factory=list)
    _numbers: list[tuple[Any, str, Any, Any]] = field(default_factory=list)  # owner, attribute, before and after

    @staticmethod
    def of(model: nn.Module, drop: Mapping[tuple[str, int], Tensor], numbers: Iterable[Number]) -> "Cuts":
        """Without the places ``drop``, by name of a tensor and dimension, and with new numbers; not applied yet."""
        cuts, now = Cuts(), {}
        for (name, dim), places in drop.items():
            home, key = home_of(model, name)
            whole = now.get(name, home[key])
            small = whole.detach().new_empty(0)
            if isinstance(whole, nn.Parameter):
                small = nn.Parameter(small, whole.requires_grad)
            stays = torch.ones(whole.shape[dim] if name not in now else home[key].shape[dim], dtype=torch.bool)
            stays[places] = False
            keep, gone = stays.nonzero().squeeze(1), (~stays).nonzero().squeeze(1)
            cuts._cuts.append(_Cut(home, key, dim, keep, gone, whole, small))
            now[name] = small
        cuts._numbers = [(owner, key, getattr(owner, key, MISSING), after) for owner, key, after in numbers]
        return cuts

    @staticmethod
    def of_units(model: nn.Module, gone: Mapping[UnitLayer, Tensor], numbers: Iterable[Number]) -> "Cuts":
        """Without the units ``gone`` of each layer, by their numbers."""
        drop: dict[tuple[str, int], list[Tensor]] = {}
        for layer, units in gone.items():
            for name, slices in layer.slices.items():
                drop.setdefault((name, slices.dim), []).append(slices.places[units].flatten())
        return Cuts.of(model, {where: torch.cat(places) for where, places in drop.items()}, numbers)

    def _apply_(self) -> None:
        for cut in self._cuts:
            cut.apply_()
        for owner, key, _, after in self._numbers:
            setattr(owner, key, after)

    def _undo_(self) -> None:
        for cut in reversed(self._cuts):
            if cut.removed is not None:
                cut.undo_()
        for owner, key, before, _ in reversed(self._numbers):
            if before is not MISSING and getattr(owner, key, MISSING) != before:
                setattr(owner, key, before)
            elif before is MISSING and hasattr(owner, key):
                delattr(owner, key)
