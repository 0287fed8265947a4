"""A training step as a profile sees it: its parts, marked for traces, and its events, at chosen steps."""

import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...eligible import eligible
from ...ops.machine import wait_for
from ...optim import AdamWPrune
from ..recipe import make_pruner
from ..trainer import Training
from .trace import Split, only_event, part, traced

NUM_EVENTS = 3
BEFORE_ANY = -10  # a step before any event of a schedule, while regrowth is still on
PARTS = {
    "data": "batches from the data set",
    "forward": "the model and its loss, with the copy of the batch to the device",
    "backward": "gradients",
    "gradient masking": "zeros in the gradients of pruned weights, by hooks",
    "clipping": "the norm of all gradients, and scaling by it",
    "optimizer": "the update of the weights",
    "event": "new masks: scores and the cut in one pass, zeros in weights and moments",
    "waiting for the device": "at the end of the steps measured",
    "other": "everything else: learning rate, hooks, zeroing gradients",
    "idle": "the device had nothing to do",
}


class Marks:
    """Called with the part that begins, which ends the one before."""

    def __init__(self) -> None:
        self._now: AbstractContextManager[Any] | None = None

    def __call__(self, name: str) -> None:
        if self._now is not None:
            self._now.__exit__(None, None, None)
        self._now = None if name == "other" else part(name)
        if self._now is not None:
            self._now.__enter__()


def instrument(training: Training) -> None:
    """Mark the training's parts for traces; it computes the same as before.

    The Pruner is made anew from its state, so that hooks of ours run before and after its own.
    """
    training.mark = Marks()
    if (pruner := training.pruner) is None:
        return
    state, schedule, every = pruner.state_dict(), pruner.schedule, pruner.every
    optimizer, device = training.optimizer, training.device
    prunable = eligible(training.model, training.run.include, training.run.exclude).weights
    masked_by_hooks = [] if isinstance(optimizer, AdamWPrune) else [weight.parameter for weight in prunable]
    spans: dict[torch.Tensor, AbstractContextManager[Any]] = {}

    def before_masking(weight: torch.Tensor) -> None:
        spans[weight] = part("gradient masking")
        spans[weight].__enter__()

    def is_event(later: int) -> bool:
        assert training.pruner is not None and schedule is not None
        return schedule.is_event(training.pruner.step + later, every)

    def before_event(*_: object) -> None:
        if is_event(1):
            wait_for(device)  # work of the step that is still running does not count
            training.mark("event")

    def after_event(*_: object) -> None:
        if is_event(0):
            wait_for(device)
            training.mark("optimizer")

    pruner.remove()
    optimizer.register_step_post_hook(before_event)
    for weight in masked_by_hooks:
        weight.register_post_accumulate_grad_hook(before_masking)
    training.pruner = make_pruner(training.run, training.model, optimizer, training.events.append)
    reload(training, **state)
    optimizer.register_step_post_hook(after_event)
    for weight in masked_by_hooks:
        weight.register_post_accumulate_grad_hook(lambda weight: spans.pop(weight).__exit__(None, None, None))


def fused(training: Training) -> list[str]:
    """Notes on what happens inside another part and cannot be timed apart from it."""
    optimizer, pruner, notes = training.optimizer, training.pruner, []
    if isinstance(optimizer, AdamWPrune):
        inside = {"gradient masking": pruner, "clipping": optimizer.max_norm, "SPAM": optimizer.spam}
        if names := [name for name, is_on in inside.items() if is_on]:
            notes.append(f"{' and '.join(names)} happen inside AdamWPrune's step: their time is the optimizer's")
    if training.run.regrow:
        notes.append("until the ramp ends, pruned weights are zeroed after each step: that time is the optimizer's")
    if pruner and "input_norm" in pruner.score.reads:
        notes.append("the step of an event collects inputs in its forward pass: that time is neither's")
    if training.run.compile:
        notes.append("compiled code computes gradients before it hands them over: until then they count as activations")
    return notes


def due_events(training: Training) -> list[int]:
    """Steps of a few events in the middle of the schedule."""
    pruner = training.pruner
    if pruner is None or pruner.schedule is None or not pruner.schedule.final:
        return []
    schedule = pruner.schedule
    steps = [t for t in range(1, round(schedule.end) + 1) if schedule.is_event(t, pruner.every) and schedule(t)]
    middle = max(0, min(len(steps) // 2, len(steps) - NUM_EVENTS - 1))
    return steps[middle : middle + NUM_EVENTS + 1]


def seek_event(training: Training, due: list[int], step: int) -> None:
    """Make the next step the one of this event; if it is the only event, it begins without masks.

    An event at which everything is pruned already would have little to do.
    """
    reload(training, step=step - 1, **({} if len(due) > 1 else {"masks": {}}))


def reload(training: Training, **state: Any) -> None:
    """Change the Pruner's state; no event waits any more."""
    if training.pruner:
        training.pruner.load_state_dict(training.pruner.state_dict() | {"due": False} | state)


def plain_step(training: Training) -> torch.Tensor:
    """The loss of a step without an event, even where there is one at every step; the masks stay."""
    if training.pruner:
        training.pruner.step = BEFORE_ANY
    return training.train_step()[0]


def events_twice(training: Training, due: list[int]) -> tuple[float | None, Split | None]:
    """A few events, each taken once by the clock and once traced, which takes longer: the medians."""
    seconds: list[float] = []
    splits = []
    mark, started = training.mark, 0.0

    def timed(name: str) -> None:
        nonlocal started
        if started:
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter() if name == "event" else 0.0

    for step in due[1:] or due:
        masks = training.pruner.state_dict()["masks"] if training.pruner else {}
        num_before = len(training.events)
        seek_event(training, due, step)
        training.mark = timed
        training.train_step()
        training.mark = mark
        if len(training.events) == num_before:  # SPAM makes events wait
            reload(training)
            return None, None
        reload(training, masks=masks)
        seek_event(training, due, step)
        with traced(training.device) as entries:
            training.train_step()
        splits.append(only_event(entries))  # without what is the step's own
    if not splits:
        return None, None
    middle = statistics.median_low([split.seconds for split in splits])
    return statistics.median(seconds), next(split for split in splits if split.seconds == middle)
