"""``measure(run, window)``: the time and memory of a training step by part."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data import TokenData
from ..run import Run
from ..tracking import environment, timed
from ..trainer import Training
from .parts import PartClock, Peaks, due_events, event_step, instrument, not_apart, plain_step, seek_event, watched

STRETCHES = 5


@dataclass(frozen=True)
class Window:
    before: int = 10
    measured: int = 20

    def __post_init__(self) -> None:
        if self.before < 1 or self.measured < 1:
            raise ValueError(f"warm-up and measurement need at least 1 step, got {self.before} and {self.measured}")


@dataclass(frozen=True)
class Memory:
    """Bytes: on a GPU what torch allocated, on a CPU what the process holds."""

    steady: dict[str, int]  # between steps, by category; the rest are batches, tables and workspaces of libraries
    peak: dict[str, int]  # of a step without an event: activations are all that its passes add, with gradients
    parts: dict[str, int]  # the highest of each part


@dataclass(frozen=True)
class StepProfile:
    run: Run
    device: str
    seconds: float  # a step without an event, nothing marked
    examples_a_second: float
    tokens_a_second: float | None
    parts: dict[str, float]  # seconds of a step without an event
    event_seconds: float | None  # what an event adds to its step
    memory: Memory
    busy: float | None  # share of the time in which the GPU worked
    startup: dict[str, float]  # seconds to build, and of the first step
    loss: float  # of the last step measured
    compiled: dict[str, int | None] | None
    notes: list[str] = field(default_factory=list)

    @property
    def has_one_event(self) -> bool:
        return self.run.schedule in ("constant", "one_shot")

    @property
    def event_share(self) -> float:
        """``E / (k S + E)``: what one event in k steps takes of the ramp's time, or a single one of the run's."""
        if self.event_seconds is None:
            return 0.0
        num_steps = self.run.total_steps if self.has_one_event else self.run.event_period
        return self.event_seconds / (num_steps * self.seconds + self.event_seconds)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"run": self.run.to_json(), "event_share": self.event_share}
        return values | {"environment": environment()}


def measure(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> StepProfile:
    """Train for a while as ``run`` says, without writing anything, and see where time and memory go."""
    progress("start")
    started = time.perf_counter()
    training = Training(run)
    startup = {"build": time.perf_counter() - started}
    startup["first step"], _ = timed(training.train_step, training.device)  # in which the pruner checks its arguments
    due = to_the_middle(training, window.before - 1)
    progress("steps")
    seconds, loss = _median_seconds(training, window.measured)
    compiled = _compile_counts() if run.compile else None  # before hooks of ours can make it compile again
    busy = _busy(training, window.measured)
    instrument(training)
    clock = PartClock(training.device)
    with watched(training, clock):
        for _ in range(window.measured):
            plain_step(training)
    progress("events")
    event_seconds = time_events(training, due)
    progress("memory")
    memory = measured_memory(training, due)
    examples = run.batch * run.accumulate / seconds
    return StepProfile(
        run,
        str(training.device),
        seconds,
        examples,
        examples * run.context if isinstance(training.data, TokenData) else None,
        {part: total / window.measured for part, total in clock.seconds().items()},
        event_seconds,
        memory,
        busy,
        startup,
        loss,
        compiled,
        not_apart(training),
    )


def to_the_middle(training: Training, num_steps: int) -> list[int]:
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


def _median_seconds(training: Training, num: int) -> tuple[float, float]:
    """Seconds a step without an event, and the last loss: on a CPU, which others use too, the median of some stretches.

    A GPU is not stopped in between: it would wait for the host after each stretch, which it does not in training.
    """
    size = num if training.device.type == "cuda" else max(1, num // STRETCHES)
    seconds, loss = [], 0.0
    for _ in range(num // size):
        took, losses = timed(lambda: [plain_step(training) for _ in range(size)], training.device)
        seconds.append(took / size)
        loss = float(losses[-1])
    return statistics.median(seconds), loss


def _compile_counts() -> dict[str, int | None]:
    """Graphs that torch.compile made so far, places where it split the code, frames that it compiled more than once."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    times = getattr(convert_frame, "FRAME_COMPILE_COUNTER", None)  # not every torch counts them
    recompiles = None if times is None else sum(max(0, num - 1) for num in times.values())
    breaks = sum(counters["graph_break"].values())
    return {"graphs": counters["stats"].get("unique_graphs", 0), "graph_breaks": breaks, "recompiles": recompiles}


def _busy(training: Training, num: int) -> float | None:
    """Share of some steps in which the GPU ran kernels; None on a CPU."""
    if training.device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        seconds, _ = timed(lambda: [plain_step(training) for _ in range(num)], training.device)
    on_gpu = [kernel for kernel in recorded.key_averages() if kernel.device_type == torch.autograd.DeviceType.CUDA]
    return min(1.0, sum(kernel.self_device_time_total for kernel in on_gpu) / 1e6 / seconds)


def time_events(training: Training, due: list[int]) -> float | None:
    """Median seconds of the events that are due; None without events, and where SPAM makes them wait."""
    seconds = []
    for step in due[1:] or due:
        clock = PartClock(training.device)
        if not event_step(training, due, step, clock):
            return None
        seconds.append(clock.seconds()["event"])
    return statistics.median(seconds) if seconds else None


def measured_memory(training: Training, due: list[int]) -> Memory:
    gc.collect()
    fixed, total = steady_bytes(training), Peaks(training.device).now()
    step, event = Peaks(training.device), Peaks(training.device)
    with watched(training, step):
        plain_step(training)
    if due and event_step(training, due, due[-1], event):
        step.bytes["event"] = event.bytes["event"]
    steady = fixed | {"rest": total - sum(fixed.values())}
    highest = max(size for part, size in step.bytes.items() if part != "event")
    return Memory(steady, steady | {"activations": highest - total}, step.bytes)


def steady_bytes(training: Training) -> dict[str, int]:
    pruner, state = training.pruner, training.optimizer.state.values()
    moments = [value for own in state for key, value in own.items() if key != "mask" and isinstance(value, Tensor)]
    sizes = {
        "weights": bytes_held([*training.model.parameters(), *training.model.buffers()], training.device),
        "moments": bytes_held(moments, training.device),
        "masks": bytes_held(pruner.masks.packed.values() if pruner else (), training.device),
        "movement": bytes_held(pruner.state_dict()["movement"].values() if pruner else (), training.device),
    }
    return {name: size for name, size in sizes.items() if size}


def bytes_held(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages under the tensors on this device, each counted once."""
    there = [t.untyped_storage() for t in tensors if t.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())
