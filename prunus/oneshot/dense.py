"""A copy of a model with the old values of some of its tensors; it shares no memory and no hook with the model."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .built_twice import tensors_of
from .resources import reason_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# hooks from here are part of a model: spectral norms and the like, and the hidden states that transformers returns
OWN_HOOKS = ("torch.", "transformers.utils.output_capturing")
PLAIN = (Tensor, nn.Parameter)


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
