"""Which Pruner a weight belongs to: one at a time, and only the optimizer of that Pruner may step the weight."""

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .masks import MaskStore

_OWNERS: weakref.WeakKeyDictionary[MaskStore, weakref.WeakMethod[Callable[[], None]]] = weakref.WeakKeyDictionary()
# optimizers that step no weight of another's owner, with their numbers of parameters
_CHECKED: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_HOOKED_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # which calls the hooks of every step


def claim(owner: MaskStore, remove: Callable[[], None]) -> None:
    """Make these weights the owner's alone; owners that had some of them are removed, by their ``remove``."""
    for other, name in _owned(owner.weights.values(), by=lambda _: True):
        warnings.warn(
            f"{name} had a Pruner over another {type(other.optimizer).__name__}, which is now removed: step only the "
            "new Pruner's optimizer; steps of the old one raise an error",
            stacklevel=4,  # the line that makes the Pruner
        )
        if remove_other := _OWNERS[other]():
            remove_other()
    _watch_steps()
    _OWNERS[owner] = weakref.WeakMethod(remove)
    _CHECKED.clear()


@cache
def _watch_steps() -> None:
    """Check the steps of all optimizers, for good: torch may be walking over its hooks when the last owner is freed."""
    register_optimizer_step_pre_hook(check_owner)


def release(owner: MaskStore) -> None:
    _OWNERS.pop(owner, None)


def check_free(weights: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Refuse weights that have an owner already in the steps of this optimizer."""

    def step_together(other: Optimizer) -> bool:
        return other in _held(optimizer) or optimizer in _held(other)

    if owned := _owned(weights.values(), step_together):
        problem = f"{owned[0][1]} is already pruned by another Pruner"
        raise ValueError(f"{problem}; call .remove() on the first, or leave its weights out with exclude=")


def check_owner(optimizer: Optimizer, *_: object) -> None:
    """Refuse the step of an optimizer over weights that are pruned in another's steps: it would fill their zeros."""
    if torch.compiler.is_compiling():
        return
    num = sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == num:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def is_alone(other: Optimizer) -> bool:
        return other not in _held(optimizer) and other not in _stepping()

    if owned := _owned(parameters, is_alone):
        problem = f"{owned[0][1]} belongs to another optimizer's Pruner"
        harm = f"steps of this {type(optimizer).__name__} would fill its zeros; call pruner.remove() and make a Pruner"
        raise ValueError(f"{problem}, and {harm} for the optimizer that you step, with masks='zeros' to keep the zeros")
    if all(stepping is optimizer for stepping in _stepping()):  # else it may step alone later
        _CHECKED[optimizer] = num


def _owned(parameters: Iterable[nn.Parameter], by: Callable[[Optimizer], bool]) -> list[tuple[MaskStore, str]]:
    """The owners of these weights in the steps of such optimizers, each with the name of its first."""
    ids = {id(p) for p in parameters}

    def find() -> list[tuple[MaskStore, str]]:
        names = ((owner, [n for n, p in owner.weights.items() if id(p) in ids]) for owner in list(_OWNERS))
        return [(owner, owned[0]) for owner, owned in names if owned and by(owner.optimizer)]

    if find():
        gc.collect()  # an owner that nobody can reach any more may wait to be freed
    return find()


def _held(optimizer: Optimizer) -> list[Optimizer]:
    """This optimizer and those that it holds, at any depth and in containers, as a wrapper holds what it steps by."""
    optimizers: list[Optimizer] = []
    left: list[object] = [optimizer]
    for value in left:
        parts: Iterable[object] = value if isinstance(value, list | tuple) else ()
        if isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, Optimizer):
            optimizers.append(value)
            parts = (part for name, part in vars(value).items() if name not in ("state", "param_groups"))
        left += [part for part in parts if not any(part is known for known in left)]
    return optimizers


def _stepping() -> Iterator[Optimizer]:
    """The optimizers whose steps call this, found on the stack: a flag would stay after a step that fails."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code is _HOOKED_STEP:
            yield frame.f_locals["self"]
