"""Weights that are loaded without their Pruner's state: what the masks prune is zeroed again, or refused."""

import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from .masking import Masking, is_initialising
from .ops import bits
from .ops.machine import is_capturing
from .ops.shard import together
from .validation import check_parameters

FEW = 0.05  # share of zeros that weights may have without having been pruned


class ReloadGuard:
    """Looks at loaded weights before the next step, since masks that fit them may be loaded after them."""

    def __init__(self, model: nn.Module, masking: Masking, action: Literal["zero", "raise"]) -> None:
        self.model, self.masking, self.store, self.action = model, masking, masking.store, action
        self.is_pending = False  # something was loaded, and no step has followed
        self._has_looked = False  # for zeros that no mask keeps
        self._has_warned = False
        self._hooks = ExitStack()

    def attach(self) -> None:
        """Hook into the optimizer's step, and into the loading of every module that owns a weight."""
        before_step = self.masking.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        self._hooks.callback(before_step.remove)
        ids = {id(p) for p in self.store.weights.values()}
        for module in self.model.modules():
            if any(id(p) in ids for p in module.parameters(recurse=False)):
                self._hooks.callback(module.register_load_state_dict_post_hook(_LoadHook(self._note_loading)).remove)

    def detach(self) -> None:
        self._hooks.close()

    def check_event(self) -> None:
        """Look at the weights before they are ranked: at some of each, which costs little, or at all to refuse them."""
        if self.action == "raise" or self.store.num_not_zeroed(bits.CHUNK):
            self._has_only_zeros()

    def _note_loading(self) -> None:
        self.is_pending = True

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        if (self._has_looked and not self.is_pending) or is_capturing() or is_initialising(self.masking.optimizer):
            return
        if not self._has_looked and not self.store.bits and (share := self.store.share_of_zeros(bits.CHUNK)) > FEW:
            warnings.warn(
                f"{share:.0%} of the weights are zero already, and the first step fills them: "
                "Pruner(..., masks='zeros') keeps them zero",
                stacklevel=2,
            )
        self._has_looked = True
        if self.is_pending:
            check_parameters(self.model, self.store.weights)
            together(self.store.holders if self.action == "raise" else None, self._has_only_zeros)
            self.masking.apply_(self.store.bits)
            self.is_pending = False

    def _has_only_zeros(self) -> bool:
        """Whether the weights on this rank are zero where the masks prune; if not, it warns once, or raises."""
        if not (found := self.store.num_not_zeroed()):
            return True
        what = f"{sum(found.values())} weights that the masks prune are not zero, first in {next(iter(found))}"
        if self.action == "raise":
            raise ValueError(f"{what}; load the pruner's state after the weights, by pruner.load_state_dict")
        if not self._has_warned:
            advice = "after weights load the pruner's state too, or pass reloaded='raise'"
            warnings.warn(f"{what}; they are zeroed again: {advice}", stacklevel=2)
        self._has_warned = True
        return False


class _LoadHook:
    """Calls a method when a module has loaded its weights; keeps nothing alive, and copies of the module forget it."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        if method := self._method():
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that does nothing, so that a pickled module can be loaded without this package."""
        return getattr, (nullcontext(), "__exit__")
