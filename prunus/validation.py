"""Checks of what a Pruner is given: wrong options are refused at once, not at the first event."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral
from typing import Any, ParamSpec

import torch
from torch import nn
from torch.optim import Optimizer

from .eligible import plain_name
from .ranks import is_dtensor
from .rate import Rate
from .regrow import Regrow
from .schedule import Ramp, Schedule
from .select import Selector, Shape
from .statistics import score_of


def _has(value: object, *methods: str) -> bool:
    """Whether a value is an instance, not a class, with these methods."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in methods)


# options of a Pruner: what is valid, and the words for it
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (
        lambda schedule: schedule is None or _has(schedule, "__call__", "is_event", "over"),
        "a schedule: Ramp(0.5, begin=100, end=1000), OneShot(0.5, at=100) or Constant(0.5)",
    ),
    "select": (
        lambda select: _has(select, "quota", "packed", "group", "sparsity"),
        "a selector: Global(), PerLayer(), PerRow() or NofM(2, 4)",
    ),
    "every": (
        lambda every: every is None or (isinstance(every, Integral) and int(every) >= 1),
        "a whole number of steps, at least 1, or None for about 20 events",
    ),
    "regrow": (lambda regrow: isinstance(regrow, Regrow | None), "a Regrow, such as Regrow(0.1)"),
    "rate": (lambda rate: isinstance(rate, Rate | None), "a Rate, such as Rate(power=1)"),
    "masks": (lambda masks: isinstance(masks, str | Mapping | None), 'boolean tensors by name, or "zeros"'),
    "reloaded": (lambda reloaded: reloaded in ("zero", "raise"), '"zero" or "raise"'),
    "no_gradient": (lambda way: way in ("raise", "dense"), '"raise" or "dense"'),
    "score_options": (lambda given: isinstance(given, Mapping | None), "values by name, such as {'eps': 1e-8}"),
    "score_dtype": (
        lambda dtype: isinstance(dtype, torch.dtype) and dtype.is_floating_point,
        "a floating-point dtype, such as torch.float32",
    ),
    "on_event": (lambda on_event: on_event is None or callable(on_event), "a function that takes an Event"),
}
SPARSITIES = ("sparsity", "amount", "target_sparsity", "final_sparsity", "initial_sparsity", "pruning_ratio", "ratio")
P = ParamSpec("P")


def explained(init: Callable[P, None]) -> Callable[P, None]:
    """The constructor of a Pruner, or of a callback with its options, that answers a wrong call with what to write."""
    parameters = signature(init).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    first, takes = "", ""
    if "model" in parameters:
        first, takes = "model, optimizer, ", "a model and the optimizer that trains it, then "

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        name = type(args[0]).__name__
        call = f"{name}({first}schedule=Ramp({{}}, begin=100, end=1000))"
        for option, value in options.items():
            if option in SPARSITIES:
                final = value if isinstance(value, float) and 0 < value < 1 else 0.5
                text = f"{option} is part of the schedule: {call.format(final)}, or schedule=Constant({final})"
                raise TypeError(text)
            if option not in parameters:
                near = get_close_matches(option, known, n=1)
                more = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
                raise TypeError(f"a {name} has no option {option!r}; {more}")
        try:
            signature(init).bind(*args, **options)
        except TypeError:
            raise TypeError(f"a {name} takes {takes}options by name: {call.format(0.5)}") from None
        init(*args, **options)

    return checked


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a Pruner that would fail later, at its first event."""
    for name, value in options.items():
        fits, expected = EXPECTED.get(name, (lambda _: True, ""))
        if not fits(value):
            text = " ".join(repr(value).split())
            raise ValueError(f"{name} must be {expected}; got {text if len(text) <= 80 else f'{text[:77]}...'}")
    score_of(options.get("score", "bitter7"), options.get("score_options") or {})
    if options.get("schedule") is None and options.get("masks") is None:
        raise ValueError("pass schedule=, a Ramp(...), OneShot(...) or Constant(...), or masks= to keep")


def check_together(
    select: Selector, schedule: Schedule | None, regrow: Regrow | None, shapes: Sequence[Shape], is_sharded: bool
) -> None:
    """Refuse a selector, a schedule and a regrowth that do not go with each other, or not with these weights."""
    only = select.sparsity
    fits = schedule is None or only is None or schedule.final == 0 or abs(schedule.final - only) < 1e-9
    if not fits or (only is not None and isinstance(schedule, Ramp)):
        fitting = f"OneShot({only:g}, at=...) or Constant({only:g})"
        raise ValueError(f"{select} has one fixed sparsity and needs {fitting}, got {schedule}")
    if regrow:
        regrow.check(schedule, select, is_sharded)
    if schedule:
        select.quota(shapes, schedule.final)


def check_parameters(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse to go on if the model's parameters are other tensors than when the Pruner was made."""
    for full, parameter in model.named_parameters():
        name = plain_name(full)
        known = weights.get(name)
        if known is None or parameter is known:
            continue
        if is_dtensor(parameter) and not is_dtensor(known):
            problem = f"{name} has become a DTensor since the Pruner was made"
            raise ValueError(f"{problem}; make the optimizer and the Pruner after fully_shard or parallelize_module")
        if is_dtensor(parameter) == is_dtensor(
            known
        ):  # FSDP2 puts plain tensors in the place of its shards for a while
            problem = f"{name} was replaced by another tensor after the Pruner was made"
            raise ValueError(f"{problem}; load weights without assign=True, or make optimizer and Pruner after loading")


def copied_weights(copy: object, weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The weights of these names in a copy of their model, wrapped or not; refused if one is missing or differs."""
    if not isinstance(copy, nn.Module):
        raise ValueError(f"apply_to takes a model, such as AveragedModel(model), got {type(copy).__name__}")
    copies = {plain_name(full): p for full, p in copy.named_parameters(remove_duplicate=False)}
    for name, weight in weights.items():
        if name not in copies:
            problem = f"the model passed to apply_to has no {name!r}, but first {next(iter(copies), 'none')!r}"
            raise ValueError(f"{problem}; pass a copy of the pruned model")
        if copies[name].shape != weight.shape:
            problem = f"{name} has shape {tuple(copies[name].shape)} in the model passed to apply_to"
            raise ValueError(f"{problem}, but {tuple(weight.shape)} in the pruned one; pass a copy of that")
    return {name: copies[name] for name in weights}


def check_devices(weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse weights that have no values yet: their optimizer would never see those that come."""
    if name := next((name for name, weight in weights.items() if weight.is_meta), None):
        problem = f"{name} is on the meta device and has no values; load the weights on a real device"
        how = "(model.to_empty(device=...), then load_state_dict)"
        raise ValueError(f"{problem} {how}, and make the optimizer and the Pruner after that")


def check_eps(weights: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Refuse an eps that is zero: Adam would divide zero by zero where a weight is pruned."""
    names = {id(p): name for name, p in weights.items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            eps = group.get("eps")
            if id(p) in names and isinstance(eps, float | int) and not torch.tensor(eps, dtype=p.dtype):
                problem = f"eps = {eps} rounds to 0 in {p.dtype}, so a pruned element of {names[id(p)]} would become"
                raise ValueError(f"{problem} 0 / 0; give the optimizer a larger eps")
