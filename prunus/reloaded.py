"""Weights that are loaded without their Pruner's state: what the masks prune is zeroed again, or refused."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .masking import Masking, has_trained, is_initialising
from .ops import bits
from .ops.machine import is_capturing
from .ops.shard import together
from .validation import check_parameters

FEW = 0.05  # share of zeros that weights may have without having been pruned
LoadedPart = Literal["model", "optimizer", "masks", "pruner"]  # masks are those in an optimizer's state


class ReloadGuard:
    """Looks at what was loaded before the next step, since what fits it may be loaded after it."""

    def __init__(
        self, model: nn.Module, masking: Masking, action: str, masks: Mapping[str, Tensor] | str | None
    ) -> None:
        self.model, self.masking, self.store, self.action = model, masking, masking.store, action
        self._is_first = True  # no step has followed yet
        self._given = masks  # to begin with
        self._zeroed: str | None = None  # the first weight that was not zero where the pruner's state prunes
        self._loaded: set[LoadedPart] = set()  # since the last step
        self._has_warned = False
        self._hooks = ExitStack()

    def attach(self) -> None:
        """Hook into the optimizer's step, and into the loading of every module that owns a weight."""
        before_step = self.masking.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        self._hooks.callback(before_step.remove)
        ids = {id(p) for p in self.store.weights.values()}
        for module in self.model.modules():
            if any(id(p) in ids for p in module.parameters(recurse=False)):
                self._hooks.callback(module.register_load_state_dict_post_hook(_LoadHook(self._note_model)).remove)

    def detach(self) -> None:
        self._hooks.close()

    def note(self, *parts: LoadedPart) -> None:
        self._loaded.update(parts)

    def note_pruner(self, masks: Mapping[str, Tensor]) -> None:
        """The pruner's state was loaded; what its masks prune is about to be zeroed."""
        self.note("pruner")
        self._zeroed = next(iter(self.store.num_not_zeroed(bits.CHUNK, masks)), None)

    def check_event(self) -> None:
        """Look at the weights before they are ranked: at some of each, which costs little, or at all to refuse them."""
        if self.action == "raise" or self.store.num_not_zeroed(bits.CHUNK):
            self._has_only_zeros()

    def _note_model(self) -> None:
        self.note("model")

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        if not (self._is_first or self._loaded) or is_capturing() or is_initialising(self.masking.optimizer):
            return
        if "pruner" in self._loaded:
            self._check_forgotten()
        elif self._may_miss_masks():
            together(self.store.holders if self._is_first or self.action == "raise" else None, self._check_zeros)
        if self._loaded:
            check_parameters(self.model, self.store.weights)
            together(self.store.holders if self.action == "raise" else None, self._has_only_zeros)
            self.masking.apply_(self.store.bits)
        self._loaded, self._is_first = set(), False

    def _may_miss_masks(self) -> bool:
        """Whether the masks may not be those of the weights: before a first step, or with a loaded optimizer."""
        if self._given is not None and not self._given:
            return False
        return "optimizer" in self._loaded or (self._is_first and self._given is None)

    def _check_zeros(self) -> bool:
        """Whether no zeros lie outside the masks; an error if the optimizer trained around them, else a warning."""
        share = 0.0 if "masks" in self._loaded else self.store.share_of_unmasked_zeros(bits.CHUNK)
        if share > FEW and has_trained(self.store.weights, self.masking.optimizer):
            problem = f"{share:.0%} of the weights are zero but in no mask, so this step would fill them"
            advice = "to continue a run, also call pruner.load_state_dict; otherwise make the Pruner after loading"
            raise ValueError(f"{problem}; {advice}, with masks='zeros' to keep the zeros or masks={{}} to fill them")
        if share > FEW:
            problem = f"{share:.0%} of the weights are zero already, and the first step fills them"
            warnings.warn(f"{problem}; Pruner(..., masks='zeros') keeps them zero", stacklevel=2)
        if "masks" in self._loaded and self.masking.progress.step == 0:
            problem = "the masks came with the optimizer's state, but the schedule starts at step 0"
            warnings.warn(f"{problem}; to continue a run, also call pruner.load_state_dict", stacklevel=2)
        return share <= FEW

    def _check_forgotten(self) -> None:
        """Warn if the pruner's state was loaded and that of its optimizer or of the model was not."""
        optimizer, step = self.masking.optimizer, self.masking.progress.step
        keeps_state = any(group.get("momentum", True) for group in optimizer.param_groups)  # all but plain SGD
        is_trained = "optimizer" in self._loaded or has_trained(self.store.weights, optimizer)
        if self._is_first and self._zeroed and is_trained and "model" not in self._loaded:
            problem = f"the pruner continues from step {step}, but {self._zeroed} was not zero where its masks prune"
            warnings.warn(f"{problem}; to continue a run, also call model.load_state_dict", stacklevel=2)
        if step and keeps_state and not is_trained:
            problem = f"the pruner continues from step {step}, but the optimizer has no state"
            warnings.warn(f"{problem}; to continue a run, also call optimizer.load_state_dict", stacklevel=2)

    def _has_only_zeros(self) -> bool:
        """Whether the weights on this rank are zero where the masks prune; if not, it warns once, or raises."""
        if not (not_zero := self.store.num_not_zeroed()):
            return True
        what = f"{sum(not_zero.values())} weights that the masks prune are not zero, first in {next(iter(not_zero))}"
        if self.action == "raise":
            raise ValueError(f"{what}; call pruner.load_state_dict after loading the weights")
        if not self._has_warned:
            advice = "call pruner.load_state_dict after loading weights, or pass reloaded='raise'"
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
