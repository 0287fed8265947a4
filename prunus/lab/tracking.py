"""A run folder: what was run, where, and what was measured. Trackers that the user names get the numbers too.

A tracker (wandb, tensorboard, trackio) gets what metrics.jsonl gets, nested names joined by a slash: ``loss``,
``eval/perplexity``. Its package is imported only when it is asked for.
"""

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..files.atomic import write_atomically
from ..files.json_file import to_json, write_json
from ..ops.machine import said_by_linux, wait_for
from .run import Run
from .run_files import RunFiles, has_step

Result = TypeVar("Result")


def environment() -> dict[str, Any]:
    versions = {}
    for name in ("prunus", "torch", "numpy", "triton"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.enabled,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions,
        "commit": commit(),
        "command": sys.argv[1:],
    }


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


@cache
def commit() -> str | None:
    """Commit of the checkout that holds this package, marked if it is changed; None without a checkout.

    Found once a process, since the checkout may change while its code does not. PRUNUS_COMMIT gives it for a
    copy without history.
    """
    if said := os.environ.get("PRUNUS_COMMIT"):
        return said
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure anew, so that the run before it in the same process does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux alone can; elsewhere the peak is the whole process's
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since ``reset_peak_memory``; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (peak := said_by_linux("self/status", "VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of a call that begins and ends with nothing under way on the device, and what it returned."""
    wait_for(device)
    started = time.perf_counter()
    result = work()
    wait_for(device)
    return time.perf_counter() - started, result


@contextmanager
def sampled(read: Callable[[], float] | None, interval: float = 0.25) -> Iterator[list[float]]:
    """The numbers that ``read`` returns at intervals while something runs; none where there is nothing to read."""
    values: list[float] = []
    stop = threading.Event()

    def loop() -> None:
        while read is not None and not stop.wait(interval):
            try:
                values.append(read())
            except (OSError, ValueError, RuntimeError, subprocess.SubprocessError):
                return  # a missing figure must not end the run

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        stop.set()
        thread.join()


def utilisation_reader(device: torch.device) -> Callable[[], float] | None:
    """A function that returns the GPU's utilisation in [0, 1]; None without a GPU or nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    identity = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    command = [program, f"--id={identity}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def read() -> float:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return float(said.split()[0]) / 100

    return read


@dataclass(frozen=True)
class Sink:
    log: Callable[[Mapping[str, float], int], object]  # numbers by name, and their step
    close: Callable[[], object]


@dataclass(frozen=True)
class Tracker:
    """Writes a run folder, and lines of ``metrics.jsonl`` to trackers; without a folder, on other ranks, nothing."""

    folder: Path | None = None
    sinks: tuple[Sink, ...] = ()

    @classmethod
    def open(cls, run: Run, step: int) -> "Tracker":
        """Make the folder, or continue it at ``step``: later lines of metrics.jsonl, or half ones, are dropped."""
        run.out.mkdir(parents=True, exist_ok=True)
        sinks = tuple(SINKS[name](run, step) for name in run.track)
        if step:
            lines = [line for line in RunFiles(run.out).metrics() if has_step(line) and line["step"] <= step]
        else:
            write_json(run.out / "run.json", {"run": run.to_json(), "environment": environment()})
            lines = []
        text = "".join(to_json(line) + "\n" for line in lines)
        write_atomically(run.out / "metrics.jsonl", lambda file: file.write(text.encode()))
        return cls(run.out, sinks)

    def log(self, **values: Any) -> None:
        if self.folder is None:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(to_json(values) + "\n")
        if self.sinks and (numbers := flat(values)):
            for sink in self.sinks:
                sink.log(numbers, values["step"])

    def flush(self) -> None:
        """Wait until the disk has all lines, as a checkpoint relies on those up to its step."""
        if self.folder is not None:
            with (self.folder / "metrics.jsonl").open("a") as file:
                os.fsync(file.fileno())

    def result(self, values: dict[str, Any]) -> None:
        if self.folder is not None:
            write_json(self.folder / "result.json", values)
        for sink in self.sinks:
            sink.close()


def check_installed(names: tuple[str, ...]) -> None:
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"--track {name} needs the package {name}: pip install 'prunus[{name}]'")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name, those of inner mappings with a prefix; lists and the sizes of layers are left out."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if name == "layers":
            continue
        if isinstance(value, Mapping):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            numbers[prefix + name] = value
    return numbers


def wandb_sink(run: Run, step: int) -> Sink:
    """Weights & Biases; WANDB_MODE=offline keeps it on this machine, in the run folder."""
    wandb: Any = import_module("wandb")
    known, own = run.out / "wandb-id", run.out / "wandb"
    before = own.exists()
    try:
        begun = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "prunus"),
            name=run.out.name,
            dir=str(run.out),
            config=run.to_json(),
            id=known.read_text() if step and known.is_file() else None,
            resume="allow" if step else None,
            reinit="finish_previous",  # of a failed run in this process
            settings=wandb.Settings(console="off"),
        )
    except wandb.errors.Error as error:
        if not before:
            shutil.rmtree(own, ignore_errors=True)
        raise ValueError(f"wandb did not start: {error}; WANDB_MODE=offline needs no account") from None
    known.write_text(begun.id)
    return Sink(lambda values, step: begun.log(dict(values), step=step), begun.finish)


def tensorboard_sink(run: Run, step: int) -> Sink:
    """Event files in the run folder: ``tensorboard --logdir RUN``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.out / "tensorboard"), purge_step=step + 1 if step else None, flush_secs=10)
    return Sink(lambda values, step: [writer.add_scalar(*each, step) for each in values.items()], writer.close)


def trackio_sink(run: Run, step: int) -> Sink:
    trackio: Any = import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", "prunus")
    name = "-".join(run.out.resolve().parts[-2:])
    trackio.init(project=project, name=name, config=run.to_json(), resume="allow" if step else "never")
    return Sink(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


SINKS = {"wandb": wandb_sink, "tensorboard": tensorboard_sink, "trackio": trackio_sink}
