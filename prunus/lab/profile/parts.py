"""A training step as a profile sees it: the time and memory of its parts, and events at chosen steps."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from ...eligible import eligible
from ...ops.machine import wait_for
from ...optim import AdamWPrune
from ..recipe import make_pruner
from ..tracking import peak_memory, reset_peak_memory
from ..trainer import Training

NUM_EVENTS = 3
BEFORE_ANY = -10  # a step before any event of a schedule, while regrowth is still on
PARTS = {
    "data": "batches from the data set",
    "forward": "the model and its loss, with the copy of the batch to the device",
    "backward": "gradients",
    "gradient masking": "zeros in the gradients of pruned weights, by hooks",
    "clipping": "the norm of all gradients, and scaling by it",
    "optimizer": "the update of the weights",
    "event": "new masks: scores and the cut, zeros in weights and moments",
    "other": "everything else: learning rate, hooks, zeroing gradients",
}


class PartClock:
    """Seconds by part, which add up. On a GPU they are those of its stream, which CUDA events time without a stop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []
        wait_for(device)

    def __call__(self, part: str) -> None:
        now: Any = time.perf_counter()
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        self.marks.append((part, now))

    def seconds(self) -> dict[str, float]:
        wait_for(self.device)
        parts: dict[str, float] = {}
        for (part, start), (_, end) in pairwise(self.marks):
            took = start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
            parts[part] = parts.get(part, 0.0) + took
        return parts


class Peaks:
    """The highest memory by part: allocated on a GPU, held by the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.part = device, "other"
        self.bytes: dict[str, int] = {}

    def __call__(self, part: str) -> None:
        self.bytes[self.part] = max(self.bytes.get(self.part, 0), peak_memory(self.device))
        reset_peak_memory(self.device)
        self.part = part

    def now(self) -> int:
        reset_peak_memory(self.device)
        return peak_memory(self.device)


@contextmanager
def watched(training: Training, meter: Callable[[str], None]) -> Iterator[None]:
    """Steps within it tell ``meter`` of each part that begins."""
    before, training.mark = training.mark, meter
    reset_peak_memory(training.device)
    meter("other")
    try:
        yield
    finally:
        meter("other")
        training.mark = before


def instrument(training: Training) -> None:
    """Mark events and gradient masking too: the Pruner is made anew from its state, between hooks of ours."""
    if (pruner := training.pruner) is None:
        return
    state, schedule, every = pruner.state_dict(), pruner.schedule, pruner.every
    optimizer, run = training.optimizer, training.run
    owner = weakref.proxy(training)  # torch's hooks of gradients would keep it alive
    prunable = eligible(training.model, **run.choice).weights
    masked_by_hooks = [] if isinstance(optimizer, AdamWPrune) else [weight.parameter for weight in prunable]

    def mark_event(part: str, later: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            assert training.pruner is not None and schedule is not None
            if schedule.is_event(training.pruner.step + later, every):
                training.mark(part)

        return hook

    pruner.remove()
    optimizer.register_step_post_hook(mark_event("event", 1))
    for weight in masked_by_hooks:
        weight.register_post_accumulate_grad_hook(lambda _: owner.mark("gradient masking"))
    training.pruner = make_pruner(run, training.model, optimizer, training.events.append)
    reload(training, **state)
    optimizer.register_step_post_hook(mark_event("optimizer", 0))
    for weight in masked_by_hooks:
        weight.register_post_accumulate_grad_hook(lambda _: owner.mark("backward"))


def not_apart(training: Training) -> list[str]:
    """Notes on what happens inside another part and cannot be timed apart from it."""
    optimizer, pruner, notes = training.optimizer, training.pruner, []
    if isinstance(optimizer, AdamWPrune):
        inside = {"gradient masking": pruner, "clipping": optimizer.max_norm, "SPAM": optimizer.spam}
        if names := [name for name, is_on in inside.items() if is_on]:
            notes.append(f"{' and '.join(names)} happen inside AdamWPrune's step: their time is the optimizer's")
    if training.run.regrow:
        notes.append("until the ramp ends, pruned weights are zeroed after each step: that time is the optimizer's")
    if pruner and "input_norm" in pruner.score.reads:
        notes.append("the step of an event collects inputs in its forward pass: that time is not the event's")
    return notes


def due_events(training: Training) -> list[int]:
    pruner = training.pruner
    if pruner is None or pruner.schedule is None or not pruner.schedule.final:
        return []
    schedule = pruner.schedule
    steps = [t for t in range(1, round(schedule.end) + 1) if schedule.is_event(t, pruner.every) and schedule(t)]
    middle = max(0, min(len(steps) // 2, len(steps) - NUM_EVENTS - 1))
    return steps[middle : middle + NUM_EVENTS + 1]


def seek_event(training: Training, due: list[int], step: int) -> None:
    """Make the next step the one of this event; the only event begins without masks, or it would have little to do."""
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


def event_step(training: Training, due: list[int], step: int, meter: Callable[[str], None]) -> bool:
    """Take the step of an event; whether the event happened: SPAM makes events wait."""
    num_before = len(training.events)
    seek_event(training, due, step)
    with watched(training, meter):
        training.train_step()
    if len(training.events) == num_before:
        reload(training)
    return len(training.events) > num_before
