"""``measure(run, window) -> Profile``: where the time and memory of a training step go."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from ..data import TokenData
from ..prune_profile import Sampler, utilisation_reader
from ..run import Run
from ..tracking import environment
from ..trainer import Training
from .compiled import Compiled, compiled
from .memory import Memory, measured_memory
from .parts import fused, instrument
from .trace import Entry, on_device, on_host, traced, wait_for

TRACED = 5  # steps that are traced at most: a trace of hundreds fills the memory
NUM_EVENTS = 3
STRETCHES = 5
SAMPLED = 2.0  # seconds of steps in which the driver is asked


@dataclass(frozen=True)
class Window:
    """How many steps are taken before the measurement, and how many are measured."""

    before: int = 10
    measured: int = 20

    def __post_init__(self) -> None:
        if self.before < 1 or self.measured < 1:
            raise ValueError(f"at least 1 step before and 1 to measure, got {self.before} and {self.measured}")


@dataclass(frozen=True)
class Split:
    """Seconds of one step or event by part, on the host and on the device; each adds up to ``seconds``."""

    seconds: float
    host: dict[str, float]
    device: dict[str, float] | None

    @property
    def parts(self) -> dict[str, float]:
        """The device's where there is one, else the host's."""
        return self.device or self.host

    def share(self, part: str) -> float:
        return self.parts.get(part, 0.0) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of one run."""

    run: Run
    device: str
    seconds: float  # a step without an event, nothing traced
    examples_a_second: float
    tokens_a_second: float | None
    step: Split  # traced, which takes longer
    event: Split | None
    memory: Memory
    utilisation: float | None  # as the driver says
    startup: dict[str, float]  # seconds to build, and of the first step
    loss: float  # of the last step measured
    compiled: Compiled | None
    notes: list[str] = field(default_factory=list)

    @property
    def busy(self) -> float | None:
        """Share of the traced steps in which the device worked."""
        return None if self.step.device is None else 1 - self.step.share("idle")

    @property
    def event_share(self) -> float:
        """What an event adds to the steps between two of them, as a share of their time."""
        if self.event is None or self.run.every == 1:
            return 0.0
        return self.event.seconds / (self.seconds * self.run.every)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values |= {"run": self.run.to_json(), "busy": self.busy, "event_share": self.event_share}
        return values | {"environment": environment()}


def measure(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> Profile:
    """Train for a while as ``run`` says, without writing anything, and look where time and memory go."""
    progress("start")
    started = time.perf_counter()
    training = Training(run)
    startup = {"build": time.perf_counter() - started, "first step": _seconds(training, 1)[0]}
    due = _to_the_middle(training, window.before - 1)
    pinned = due[0] if due else 0
    progress("steps")
    seconds, loss = _median_seconds(training, window.measured, pinned)
    counted = compiled() if run.compile else None  # before hooks of ours can make it compile again
    utilisation = _utilisation(training, pinned)
    instrument(training)
    progress("events")
    event = _event(training, due)
    progress("trace")
    step = _step(training, min(TRACED, window.measured), due[-1] if due else 0)
    progress("memory")
    memory = measured_memory(training, partial(_seek, training, due[-1] - 1) if due else None)
    examples = run.batch * run.accumulate / seconds
    return Profile(
        run,
        str(training.device),
        seconds,
        examples,
        examples * run.context if isinstance(training.data, TokenData) else None,
        step,
        event,
        memory,
        utilisation,
        startup,
        loss,
        counted,
        fused(training),
    )


def _to_the_middle(training: Training, num_steps: int) -> list[int]:
    """Take some steps and one event, so that there are masks as in the middle of the ramp; events from that one on."""
    for _ in range(num_steps):
        training.train_step()
    due = _events(training)
    if due:
        _seek(training, due[0] - 1)
        training.train_step()
    _seconds(training, 2, due[0] if due else 0)
    return due


def _events(training: Training) -> list[int]:
    """Steps of a few events in the middle of the schedule."""
    pruner = training.pruner
    if pruner is None or pruner.schedule is None or not pruner.schedule.final:
        return []
    schedule = pruner.schedule
    steps = [t for t in range(1, round(schedule.end) + 1) if schedule.is_event(t, pruner.every) and schedule(t)]
    middle = max(0, min(len(steps) // 2, len(steps) - NUM_EVENTS - 1))
    return steps[middle : middle + NUM_EVENTS + 1]


def _seek(training: Training, step: int) -> None:
    """Set the pruner's count of steps, as if it had come there."""
    if training.pruner:
        training.pruner.load_state_dict(training.pruner.state_dict() | {"step": step, "due": False})


def _utilisation(training: Training, pinned: int) -> float | None:
    """Mean over some seconds of steps of what the driver says; None where it says nothing."""
    sampler = Sampler(utilisation_reader(training.device))
    if sampler.read is None:
        return None
    until = time.perf_counter() + SAMPLED
    with sampler.running():
        while time.perf_counter() < until:
            float(_pinned_step(training, pinned))
    return sampler.mean


def _pinned_step(training: Training, step: int) -> torch.Tensor:
    """A step that, for the pruner, is the one after ``step``: no event, unless there is one at every step."""
    if training.pruner:
        training.pruner.step = step
    return training.train_step()[0]


def _seconds(training: Training, num: int, pinned: int | None = None) -> tuple[float, float]:
    """Seconds a step, and the loss of the last."""
    wait_for(training.device)
    started = time.perf_counter()
    losses = [training.train_step()[0] if pinned is None else _pinned_step(training, pinned) for _ in range(num)]
    wait_for(training.device)
    return (time.perf_counter() - started) / num, float(losses[-1])


def _median_seconds(training: Training, num: int, pinned: int) -> tuple[float, float]:
    """Seconds a step, and the loss of the last: on a CPU, which others use too, the median over a few stretches.

    A GPU is not stopped in between: it would wait for the host after each stretch, which it does not in training.
    """
    size = num if training.device.type == "cuda" else max(1, num // STRETCHES)
    found = [_seconds(training, size, pinned) for _ in range(num // size)]
    return statistics.median(seconds for seconds, _ in found), found[-1][1]


def _step(training: Training, num: int, pinned: int) -> Split:
    with traced(training.device) as trace:
        for _ in range(num):
            _pinned_step(training, pinned)
    return _split_of(trace.entries, num)


def _split_of(entries: list[Entry], num: int) -> Split:
    host, device = on_host(entries), on_device(entries)
    each = {name: seconds / num for name, seconds in host.items()}
    return Split(sum(each.values()), each, device and {name: seconds / num for name, seconds in device.items()})


def _event(training: Training, due: list[int]) -> Split | None:
    """The median of a few events, each after a step of training; those of the step itself are left out."""
    found = []
    for step in due[1:] or due:
        _seek(training, step - 1)
        with traced(training.device) as trace:
            training.train_step()
        found.append(_only_event(trace.entries))
    found = [split for split in found if split.host]  # none where SPAM makes events wait
    if not found:
        return None
    middle = statistics.median_low([split.seconds for split in found])
    return next(split for split in found if split.seconds == middle)


def _only_event(entries: list[Entry]) -> Split:
    inside = ("score and select", "apply")
    host = {name: value for name, value in on_host(entries).items() if name in inside}
    device, total = on_device(entries), sum(host.values())
    if device is not None:
        device = {name: device.get(name, 0.0) for name in inside}
        device["idle"] = total - sum(device.values())
    return Split(total, host, device)
