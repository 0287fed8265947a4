"""Events of a training, where one wants them: which are due, steps without any, and what one takes."""

import statistics
import time
from typing import Any

import torch

from ...ops.machine import wait_for
from ..trainer import Training
from .split import Split, only_event
from .trace import traced

NUM_EVENTS = 3
BEFORE_ANY = -10  # a count of steps at which no schedule has an event, and weights that may come back still may


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
    """Let the next step be the one of this event; the only one of all begins without masks.

    Where all that it asks for is pruned already, an event has little to do.
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
    """Let the next step have no event; the masks stay."""
    if training.pruner:
        training.pruner.step, training.pruner._due = BEFORE_ANY, False


def events_twice(training: Training, due: list[int]) -> tuple[float | None, Split | None]:
    """A few events, each taken once by the clock and once traced, which takes longer: the medians."""
    seconds, splits = [], []
    for step in due[1:] or due:
        masks = training.pruner.state_dict()["masks"] if training.pruner else {}
        seek_event(training, due, step)
        seconds += _event_seconds(training)
        _load(training, masks=masks)
        seek_event(training, due, step)
        splits.append(_event(training))
    splits = [split for split in splits if split.host]
    if not seconds or not splits:  # SPAM makes events wait
        return None, None
    middle = statistics.median_low([split.seconds for split in splits])
    return statistics.median(seconds), next(split for split in splits if split.seconds == middle)


def _event_seconds(training: Training) -> list[float]:
    """Take a step: the seconds of its event, if it has one."""
    pruner, found = training.pruner, []
    assert pruner is not None
    update = pruner.update

    def timed() -> None:
        wait_for(training.device)
        started = time.perf_counter()
        update()
        wait_for(training.device)
        found.append(time.perf_counter() - started)

    pruner.update = timed
    try:
        training.train_step()
    finally:
        pruner.update = update
    return found


def _event(training: Training) -> Split:
    """Take a step: its event by part, without what is the step's own."""
    with traced(training.device) as trace:
        training.train_step()
    return only_event(trace.entries)
