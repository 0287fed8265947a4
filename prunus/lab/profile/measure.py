"""``measure(run, window)``: where the time and memory of a training step go; ``compare_compile``: what compile does."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...ops.machine import wait_for
from ..data import TokenData
from ..gpu import Sampler, utilisation_reader
from ..run import Run
from ..tracking import environment
from ..trainer import Training
from .memory_use import Memory, measured_memory
from .step_parts import BEFORE_ANY, due_events, events_twice, fused, instrument, plain_step, reload, seek_event
from .trace import Split, split_of, traced

TRACED = 5  # steps that are traced at most: a trace of hundreds fills the memory
STRETCHES = 5
SAMPLED = 2.0  # seconds of steps in which the driver is asked
MIB = 2**20


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
class StepProfile:
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
        return self.share_of_events(self.run.total_steps if self.has_one_event else self.run.event_period)

    def share_of_events(self, num_steps: int) -> float:
        """``E / (k S + E)``: what one event in k steps takes of the time, S a step without one."""
        if self.event_seconds is None:
            return 0.0
        return self.event_seconds / (num_steps * self.seconds + self.event_seconds)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values |= {"run": self.run.to_json(), "busy": self.busy, "event_share": self.event_share}
        return values | {"environment": environment()}


def measure(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> StepProfile:
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
    with traced(training.device) as entries:
        for _ in range(num_traced):
            plain_step(training)
    step = split_of(entries, num_traced)
    progress("memory")
    reload(training, step=BEFORE_ANY)
    memory = measured_memory(training, partial(seek_event, training, due, due[-1]) if due else None)
    examples = run.batch * run.accumulate / seconds
    return StepProfile(
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


def compare_compile(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """The profile of each arm, and what compile does, in figures and in words.

    Both arms have the same batch, learning rate and data. Each has a process of its own and an empty cache of
    compiled code, so that start-up and memory are its own.
    """
    arms = {}
    for name, is_compiled in (("eager", False), ("compile", True)):
        progress(name)
        arms[name] = _in_a_process(replace(run, compile=is_compiled), window)
    figures = compared(arms["eager"], arms["compile"])
    return {"says": sentences(figures), "figures": figures, "arms": arms}


def _in_a_process(run: Run, window: Window) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        given = json.dumps({"run": run.to_json(), "window": asdict(window), "command": sys.argv[1:]})
        command = [sys.executable, "-m", "prunus.lab.profile.measure", str(out)]
        cache = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(command, input=given, text=True, capture_output=True, env=os.environ | cache, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(f"the arm {'compile' if run.compile else 'eager'} failed: {lines[-1] if lines else '?'}")
        return json.loads(out.read_text())


def compared(eager: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """Figures of both arms, and the second over the first."""
    gain = eager["seconds"] - compiled["seconds"]
    peaks = [sum(arm["memory"]["peak"].values()) for arm in (eager, compiled)]
    startups = [sum(arm["startup"].values()) for arm in (eager, compiled)]
    return {
        "seconds": [eager["seconds"], compiled["seconds"]],
        "speed_up": eager["seconds"] / compiled["seconds"],
        "peak_bytes": peaks,
        "peak_ratio": peaks[1] / peaks[0],
        "startup_seconds": startups,
        "pays_after_steps": (startups[1] - startups[0]) / gain if gain > 0 else None,
        "loss": [eager["loss"], compiled["loss"]],
        **compiled["compiled"],
    }


def sentences(figures: dict[str, Any]) -> list[str]:
    """What compile does, one sentence a figure."""
    slow, fast = (1e3 * seconds for seconds in figures["seconds"])
    before, after = (num_bytes / MIB for num_bytes in figures["peak_bytes"])
    cold, compiling = figures["startup_seconds"]
    steps = figures["pays_after_steps"]
    pays = "it never pays for that" if steps is None else f"it pays for that after {max(0, steps):,.0f} steps"
    losses = "{:.5f} and {:.5f}".format(*figures["loss"])
    return [
        f"Throughput: {figures['speed_up']:.2f} times that of eager ({slow:.2f} ms a step, compiled {fast:.2f} ms).",
        f"Peak memory: {figures['peak_ratio']:.2f} times ({before:,.1f} MiB, compiled {after:,.1f} MiB).",
        f"Start-up: {cold:.1f} s, compiled {compiling:.1f} s with an empty cache; {pays}.",
        f"Compiled: {Compiled(figures['graphs'], figures['graph_breaks'], figures['recompiles'])}.",
        f"Batch, learning rate and data are equal; the losses after the same steps are {losses}.",
    ]


def main() -> None:
    """One arm: run and window come in as JSON, the profile goes to the file named."""
    given = json.loads(sys.stdin.read())
    profile = measure(Run.from_json(given["run"]), Window(**given["window"])).to_json()
    profile["environment"]["command"] = given["command"]  # what a person typed
    Path(sys.argv[1]).write_text(json.dumps(profile))


if __name__ == "__main__":
    main()
