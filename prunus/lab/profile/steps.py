"""A training step as a profile sees it: its parts, marked for traces, and its events, at chosen steps."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ...ops.machine import wait_for
from ...optim import AdamWPrune
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
    "score and select": "which weights stay: one pass computes scores and cuts, so there is no line between the two",
    "apply": "new masks, zeros in weights and moments",
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
    """Mark the training's parts for traces; it computes the same as before."""
    training.mark = Marks()
    pruner = training.pruner
    if pruner is None:
        return
    masking, updated = pruner._masking, pruner.update

    def update() -> None:
        wait_for(training.device)  # work of the step that is still running does not count
        with part("score and select"):
            updated()
            wait_for(training.device)

    def marked(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any) -> Any:
            with part(name):
                return work(*args)

        return inside

    masking.mask_gradient = marked("gradient masking", masking.mask_gradient)
    masking.apply_ = marked("apply", masking.apply_)
    pruner.update = update


def fused(training: Training) -> list[str]:
    """Notes on what happens inside another part and cannot be timed apart from it."""
    optimizer, notes = training.optimizer, []
    if isinstance(optimizer, AdamWPrune):
        inside = [
            *(["gradient masking"] if training.pruner else []),
            *(["clipping"] if optimizer.max_norm else []),
            *(["SPAM"] if optimizer.spam else []),
        ]
        if inside:
            notes.append(f"{' and '.join(inside)} happen inside AdamWPrune's step: their time is the optimizer's")
    if training.run.regrow:
        notes.append("until the ramp ends, pruned weights are zeroed after each step: that time is the optimizer's")
    if training.pruner and training.pruner._inputs:
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
    _load(training, step=step - 1, due=False, **({} if len(due) > 1 else {"masks": {}}))


def _load(training: Training, **state: Any) -> None:
    if training.pruner:
        training.pruner.load_state_dict(training.pruner.state_dict() | state)


def plain_step(training: Training) -> torch.Tensor:
    """The loss of a step without an event, even where there is one at every step."""
    between_events(training)
    return training.train_step()[0]


def between_events(training: Training) -> None:
    """Make the next step one without an event; the masks stay."""
    if training.pruner:
        training.pruner.step, training.pruner._progress.is_due = BEFORE_ANY, False


def events_twice(training: Training, due: list[int]) -> tuple[float | None, Split | None]:
    """A few events, each taken once by the clock and once traced, which takes longer: the medians."""
    seconds: list[float] = []
    splits = []

    def timed(update: Callable[[], None]) -> None:
        wait_for(training.device)
        started = time.perf_counter()
        update()
        wait_for(training.device)
        seconds.append(time.perf_counter() - started)

    for step in due[1:] or due:
        masks = training.pruner.state_dict()["masks"] if training.pruner else {}
        seek_event(training, due, step)
        with around_events(training, timed):
            training.train_step()
        _load(training, masks=masks)
        seek_event(training, due, step)
        with traced(training.device) as entries:
            training.train_step()
        splits.append(only_event(entries))  # without what is the step's own
    splits = [split for split in splits if split.host]
    if not seconds or not splits:  # SPAM makes events wait
        return None, None
    middle = statistics.median_low([split.seconds for split in splits])
    return statistics.median(seconds), next(split for split in splits if split.seconds == middle)


@contextmanager
def around_events(training: Training, around: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Call ``around`` in place of each event, with the event to call."""
    pruner = training.pruner
    if pruner is None:
        yield
        return
    update = pruner.update
    pruner.update = partial(around, update)
    try:
        yield
    finally:
        pruner.update = update
