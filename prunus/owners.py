"""Which Pruner a weight belongs to: one at a time, and only the optimizer of that Pruner may step the weight."""

import gc
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Owner(Protocol):
    """What prunes weights in the steps of an optimizer."""

    weights: Mapping[str, nn.Parameter]
    optimizer: Optimizer


_OWNERS: weakref.WeakSet[Owner] = weakref.WeakSet()
_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that step no weight of another's owner


def claim(owner: Owner) -> None:
    """From now on no other owner may have these weights, and no other optimizer may step them."""
    _watch_steps()
    _OWNERS.add(owner)
    _CHECKED.clear()


@cache
def _watch_steps() -> None:
    """Check the steps of all optimizers, for good: torch may be walking over its hooks when the last owner is freed."""
    register_optimizer_step_pre_hook(check_step)


def release(owner: Owner) -> None:
    _OWNERS.discard(owner)


def check_free(weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse weights that have an owner already."""
    if name := _first_owned(weights.values()):
        raise ValueError(
            f"{name} is pruned by another Pruner already; call .remove() on the first, or leave its weights out by "
            "exclude="
        )


def check_step(optimizer: Optimizer, *_: object) -> None:
    """Refuse the step of an optimizer over weights that are pruned in another's steps: it would fill their zeros."""
    if torch.compiler.is_compiling() or optimizer in _CHECKED:
        return
    if name := _first_owned([p for group in optimizer.param_groups for p in group["params"]], optimizer):
        raise ValueError(
            f"{name} belongs to a Pruner of another optimizer, and steps of this {type(optimizer).__name__} would fill "
            "its zeros; call pruner.remove() and make a Pruner for the optimizer that you step, with masks='zeros' to "
            "keep the zeros"
        )
    _CHECKED.add(optimizer)


def _first_owned(parameters: Iterable[nn.Parameter], optimizer: Optimizer | None = None) -> str | None:
    """Name of the first of these weights that has an owner, other than one in the steps of ``optimizer``."""
    ids = {id(p) for p in parameters}

    def find() -> str | None:
        others = [owner for owner in _OWNERS if optimizer is None or not _step_together(owner.optimizer, optimizer)]
        return next((name for owner in others for name, p in owner.weights.items() if id(p) in ids), None)

    if find():
        gc.collect()  # an owner that nobody can reach any more may wait to be freed
    return find()


def _step_together(one: Optimizer, other: Optimizer) -> bool:
    """Whether these are one optimizer, or one holds the other, as a wrapper holds what it steps by."""
    parts = [part for own in (one, other) for part in vars(own).values()]
    nested = [value for part in parts if isinstance(part, list | tuple) for value in part]
    return one is other or any(value is one or value is other for value in (*parts, *nested))
