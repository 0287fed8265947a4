"""What a Pruner is asked for, refused at once where it cannot be meant."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .regrow import Regrow
from .schedule import Ramp, Schedule
from .select import Selector, Shape
from .stats import score_of


def _has(*methods: str) -> Callable[[object], bool]:
    """Whether something is a value, and not a class, that has these methods."""
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in methods)


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


# options of a Pruner: what fits, and what to write
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (
        _or_none(_has("__call__", "is_event", "over")),
        "a schedule: Ramp(0.5, begin=100, end=1000), OneShot(0.5, at=100) or Constant(0.5)",
    ),
    "select": (_has("quota", "packed"), "a selector: Global(), PerLayer(), PerRow() or NofM(2, 4)"),
    "every": (lambda every: isinstance(every, Integral) and int(every) >= 1, "a whole number of steps, at least 1"),
    "regrow": (lambda regrow: regrow is None or isinstance(regrow, Regrow), "a Regrow, as Regrow(0.1)"),
    "masks": (
        lambda masks: masks is None or isinstance(masks, str | Mapping),
        'boolean tensors by name, or "zeros"',
    ),
    "score_options": (lambda given: given is None or isinstance(given, Mapping), "values by name, as {'eps': 1e-8}"),
    "score_dtype": (
        lambda dtype: isinstance(dtype, torch.dtype) and dtype.is_floating_point,
        "a floating-point dtype, as torch.float32",
    ),
    "on_event": (_or_none(callable), "a function that takes an Event"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a Pruner that would fail at its first event, in the middle of a training."""
    for name, value in options.items():
        fits, expected = EXPECTED.get(name, (lambda _: True, ""))
        if not fits(value):
            raise ValueError(f"{name} must be {expected}; got {_shown(value)}")
    score_of(options.get("score", "bitter7"), options.get("score_options") or {})
    if options.get("schedule") is None and options.get("masks") is None:
        raise ValueError("say how sparse: pass schedule=Ramp(...), OneShot(...) or Constant(...), or masks to hold")


def check_order(model: object, optimizer: object) -> None:
    """Refuse what is no model or no optimizer, as where the two are given the other way round."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ValueError(
            "a Pruner takes a model, then the optimizer that trains it: Pruner(model, optimizer, ...); "
            f"got {type(model).__name__} and {type(optimizer).__name__}"
        )


def check_together(
    select: Selector, schedule: Schedule | None, regrow: Regrow | None, shapes: Sequence[Shape], is_sharded: bool
) -> None:
    """Refuse a selector, a schedule and a regrowth that do not go with each other, or not with these weights."""
    only = select.sparsity
    fits = schedule is None or only is None or schedule.final == 0 or abs(schedule.final - only) < 1e-9
    if not fits or (only is not None and isinstance(schedule, Ramp)):
        fitting = f"OneShot({only:g}, at=...) or Constant({only:g})"
        raise ValueError(f"{select} has one sparsity and goes with {fitting}, got {schedule}")
    if regrow:
        regrow.check(schedule, select, is_sharded)
    if schedule:
        select.quota(shapes, schedule.final)


def _shown(value: object) -> str:
    """One short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
