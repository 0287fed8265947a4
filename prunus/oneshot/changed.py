"""A model that a call has changed, how it gets back what it was, and a copy of that which shares no memory or hook."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .built_twice import tensors_of
from .cuts import to_the_end
from .disk_offload import disk_offload_of
from .level import Level
from .originals import sums_of_bits
from .resources import Cost, reason_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# hooks from here are part of a model: spectral norms and the like, and the hidden states that transformers returns
OWN_HOOKS = ("torch.", "transformers.utils.output_capturing")
PLAIN = (Tensor, nn.Parameter)


@dataclass(repr=False)
class ChangedModel:
    """What was done to a model. ``undo_``, ``apply_`` and ``dense`` raise if it was trained or cast; it may move."""

    level: Level
    model: nn.Module

    done: ClassVar[str] = "pruned"
    doing: ClassVar[str] = "pruning"
    call: ClassVar[str] = "prune"

    def __post_init__(self) -> None:
        self._note_bits()

    def __str__(self) -> str:
        return "\n".join([repr(self), str(self.cost), *self.notes])

    @property
    def notes(self) -> list[str]:
        return self.level.tuning_notes() + self.level.not_tuned

    @property
    def cost(self) -> Cost:
        return self.level.cost

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def errors(self) -> dict[str, float]:
        """``|W' X - W X_d|^2 / |W X_d|^2`` by layer: inputs X in the changed model, X_d in the dense one."""
        return {name: repair.error for name, repair in self.level.repairs.items() if repair.error is not None}

    def dense(self) -> nn.Module:
        """The model as it was before the call: a separate module in eval mode, without gradients or your hooks.

        Repaired weights use the memory that ``undo_`` reads, without another copy: the module is then in main
        memory, and you must not write to it while you may still undo. Everything else is cloned, and nothing is shared
        with the model. If units were removed, or two tensors overlap in memory, all of it is a copy.
        """
        self._check("dense")
        originals, is_undone = self.level.originals, self._is_undone
        device = torch.device("cpu") if originals.whole or self._is_cut else None
        if not self._is_cut and not is_overlapping(self.model):
            with nullcontext() if is_undone else self.level.grids_before():
                return copied(self.model, originals.lend(), device)
        self.undo_()
        try:
            return copied(self.model, {}, device)
        finally:
            if not is_undone:
                self.apply_()

    def undo_(self) -> None:
        """Give every changed weight its old value, bit for bit, and put removed units back."""
        with self._changing("undo_"):
            to_the_end(self._undo_)

    def apply_(self) -> None:
        """Redo what ``undo_`` undid."""
        with self._changing("apply_"):
            self._undo_()
            self._apply_()

    def _undo_(self) -> None:
        self.level.undo_()

    def _apply_(self) -> None:
        self.level.apply_()

    @property
    def _is_cut(self) -> bool:
        """Whether tensors have other shapes than before."""
        return False

    @property
    def _is_undone(self) -> bool:
        return self.level.originals.is_empty and not self._is_cut

    def _note_bits(self) -> None:
        self._buffers = dict(self.model.named_buffers())
        self._bits = {} if disk_offload_of(self.model) else sums_of_bits(self.model)

    def _check_parameters(self) -> None:
        """Refuse a model in which others have replaced parameters."""

    def _check(self, call: str) -> None:
        """Refuse a model that others have changed; where it was moved, its new buffers are known afterwards."""
        if disk_offload_of(self.model):
            raise ValueError(
                f"{call} needs both models in memory, but this one is on disk; the dense one is still in its folder"
            )
        self._check_parameters()
        buffers = dict(self.model.named_buffers())
        self.level.follow_({old: buffers[name] for name, old in self._buffers.items() if name in buffers})
        now = sums_of_bits(self.model)
        changed = [name for name in {**self._bits, **now} if now.get(name) != self._bits.get(name)]
        if not changed or (call == "undo_" and self._is_undone):
            return
        when, so = "undo_ restored it", f"is for the {self.done} model; call {self.call} again"
        if not self._is_undone:
            when, so = f"it was {self.done}", f"would bring back only what {self.doing} changed"
            so += "; load the dense model again, or take result.dense() before you train"
        raise ValueError(f"the model was trained or changed after {when} (first in {changed[0]}); {call} {so}")

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Check the model before it is changed here, and know it again afterwards."""
        self._check(call)
        try:
            yield
        finally:
            self._note_bits()


@torch.no_grad()
def copied(model: nn.Module, old: Mapping[Tensor, Tensor], device: torch.device | None = None) -> nn.Module:
    """The model in eval mode and without gradients, with ``old`` values in the memory in which they are given.

    Other tensors are cloned, to ``device`` if there is one. Tied tensors stay tied. Hooks stay behind, except for
    those of torch and transformers and those that are methods of the model's own modules.
    """
    _check_functions(model)
    copies: dict[str, Tensor] = {}
    memo: dict[int, Any] = {}
    for name, tensor in tensors_of(model).items():
        if tensor in old or type(tensor) in PLAIN:  # other kinds of tensors know how they are copied
            there = device or old.get(tensor, tensor).device
            values = old[tensor].to(there) if tensor in old else tensor.detach().to(there, copy=True)
            copies[name] = nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values.detach()
            memo[id(tensor)] = copies[name]
    kept = _leave_hooks(model, memo)
    try:
        dense = copy.deepcopy(model, memo)
        for hooks, own in kept:
            hooks.update(copy.deepcopy(own, memo))
    except Exception as error:
        raise _refusal(model, reason_of(error)) from error
    now = tensors_of(dense)
    if lost := [name for name, tensor in copies.items() if now.get(name) is not tensor]:
        raise _refusal(model, f"its __deepcopy__ does not copy {lost[0]}")
    return dense.requires_grad_(False).eval()


def is_overlapping(model: nn.Module) -> bool:
    """Whether two tensors of the model share memory without being one."""
    ranges = []
    for tensor in tensors_of(model).values():
        if tensor.numel() and type(tensor) in PLAIN:
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize))
    ranges.sort()
    return any(start < end for (_, end), (start, _) in pairwise(ranges))


def _leave_hooks(model: nn.Module, memo: dict[int, Any]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Have deepcopy give each module new hooks, still empty; returns them, and which hooks of the model they take."""
    modules, kept = set(model.modules()), []
    for hooks in (vars(module)[key] for module in modules for key in HOOKS):
        own = {
            number: hook
            for number, hook in hooks.items()
            if str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS) or _owner(hook) in modules
        }
        memo[id(hooks)] = type(hooks)()
        kept.append((memo[id(hooks)], own))
    return kept


def _owner(value: Any) -> nn.Module | None:
    owner = value.__self__ if isinstance(value, MethodType) else None
    return owner if isinstance(owner, nn.Module) else None


def _check_functions(model: nn.Module) -> None:
    """Refuse functions in the place of methods that would call the model from its copy: deepcopy does not copy them."""
    modules = set(model.modules())
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            function = value.__func__ if isinstance(value, MethodType) else getattr(value, "func", value)
            if isinstance(function, FunctionType) and _reaches(function, modules):
                name = f"{path}.{key}".lstrip(".")
                raise _refusal(model, f"{name} is a function that calls the model itself; restore the original first")


def _reaches(function: FunctionType, modules: set[nn.Module]) -> bool:
    """Whether a function holds one of the modules: in its closure, its defaults, or those of functions it holds."""
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if (value if isinstance(value, nn.Module) else _owner(value)) in modules:
            return True
        if isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType) and id(value) not in seen:
            seen.add(id(value))
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # a variable that is not set yet
                    pending.append(cell.cell_contents)
    return False


def _refusal(model: nn.Module, reason: str) -> ValueError:
    kind = type(model).__name__
    return ValueError(f"{kind} cannot be copied, so dense() does not work; load the dense model again ({reason})")
