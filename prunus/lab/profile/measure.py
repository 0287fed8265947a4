"""``measure(run, window) -> Profile``: where the time and memory of a training step go."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ...ops.machine import wait_for
from ..data import TokenData
from ..gpu import Sampler, utilisation_reader
from ..run import Run
from ..tracking import environment
from ..trainer import Training
from .memory_use import Memory, measured_memory
from .steps import between_events, due_events, events_twice, fused, instrument, plain_step, seek_event
from .trace import Split, split_of, traced

TRACED = 5  # steps that are traced at most: a trace of hundreds fills the memory
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
class Compiled:
    """Graphs that were compiled, places where the code had to be split, and frames compiled more than once."""

    graphs: int
    graph_breaks: int
    recompiles: int | None  # None where this torch does not count them

    def __str__(self) -> str:
        counts = {"graph": self.graphs, "graph break": self.graph_breaks, "recompile": self.recompiles}
        return ", ".join(f"{'unknown' if n is None else n} {name}{'s' * (n != 1)}" for name, n in counts.items())


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of one run."""

    run: Run
    device: str
    seconds: float  # a step without an event, nothing traced
    examples_a_second: float
    tokens_a_second: float | None
    step: Split  # traced, which takes longer
    event_seconds: float | None  # what an event adds to its step, nothing traced
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
    def has_one_event(self) -> bool:
        return self.run.schedule in ("constant", "one_shot")

    @property
    def event_share(self) -> float:
        """Of the ramp's time, or of the run's where it has a single event."""
        return self.share_of_events(self.run.total_steps if self.has_one_event else self.run.every)

    def share_of_events(self, num_steps: int) -> float:
        """``E / (k S + E)``: what one event in k steps takes of the time, S a step without one."""
        if self.event_seconds is None:
            return 0.0
        return self.event_seconds / (num_steps * self.seconds + self.event_seconds)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values |= {"run": self.run.to_json(), "busy": self.busy, "event_share": self.event_share}
        return values | {"environment": environment()}


def measure(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> Profile:
    """Train for a while as ``run`` says, without writing anything, and look where time and memory go."""
    progress("start")
    started = time.perf_counter()
    training = Training(run)
    built = time.perf_counter()
    training.train_step()  # in which the pruner checks what it was given
    wait_for(training.device)
    startup = {"build": built - started, "first step": time.perf_counter() - built}
    due = _to_the_middle(training, window.before - 1)
    progress("steps")
    seconds, loss = _median_seconds(training, window.measured)
    counted = compiled() if run.compile else None  # before hooks of ours can make it compile again
    utilisation = _utilisation(training)
    instrument(training)
    progress("events")
    event_seconds, event = events_twice(training, due)
    progress("trace")
    num_traced = min(TRACED, window.measured)
    with traced(training.device) as trace:
        for _ in range(num_traced):
            plain_step(training)
    step = split_of(trace.entries, num_traced)
    progress("memory")
    between_events(training)
    memory = measured_memory(training, partial(seek_event, training, due, due[-1]) if due else None)
    examples = run.batch * run.accumulate / seconds
    return Profile(
        run,
        str(training.device),
        seconds,
        examples,
        examples * run.context if isinstance(training.data, TokenData) else None,
        step,
        event_seconds,
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
        plain_step(training)  # with events they could pass the middle, and those from there on would prune nothing
    due = due_events(training)
    if due:
        seek_event(training, due, due[0])
        training.train_step()
    for _ in range(2):
        plain_step(training)
    return due


def _utilisation(training: Training) -> float | None:
    """Mean over some seconds of steps of what the driver says; None where it says nothing."""
    sampler = Sampler(utilisation_reader(training.device))
    if sampler.read is None:
        return None
    until = time.perf_counter() + SAMPLED
    with sampler.running():
        while time.perf_counter() < until:
            float(plain_step(training))
    return sampler.mean


def _median_seconds(training: Training, num: int) -> tuple[float, float]:
    """Seconds a step without an event, and the last loss: on a CPU, which others use too, the median of some stretches.

    A GPU is not stopped in between: it would wait for the host after each stretch, which it does not in training.
    """
    size = num if training.device.type == "cuda" else max(1, num // STRETCHES)
    seconds, loss = [], 0.0
    for _ in range(num // size):
        wait_for(training.device)
        started = time.perf_counter()
        losses = [plain_step(training) for _ in range(size)]
        wait_for(training.device)
        seconds.append((time.perf_counter() - started) / size)
        loss = float(losses[-1])
    return statistics.median(seconds), loss


def compiled() -> Compiled:
    """What torch.compile did so far, as its own counters say."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    times = getattr(convert_frame, "FRAME_COMPILE_COUNTER", None)
    return Compiled(
        counters["stats"].get("unique_graphs", 0),
        sum(counters["graph_break"].values()),
        None if times is None else sum(max(0, num - 1) for num in times.values()),
    )
