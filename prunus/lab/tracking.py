"""A run folder: what was run, on what, and what was measured."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..files.json_file import to_json, write_json
from .run import Run
from .trackers import Sink, flat, open_sinks


def environment() -> dict[str, Any]:
    """Versions, hardware and commit: what a number needs beside it to be understood."""
    packages = ("prunus", "torch", "numpy", "triton")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.enabled,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": {name: version for name in packages if (version := _version(name))},
        "commit": commit(),
        "command": sys.argv[1:],
    }


def machine() -> str:
    """The GPU's name, or the CPU's model and number of cores."""
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
    """Commit of the checkout that this package stands in, with a mark if it is changed; None elsewhere.

    Asked once a process, whose code stays the same while the checkout may go on. PRUNUS_COMMIT says it for
    a copy of a checkout without its history.
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Tracker:
    """Writes a run folder; ``metrics.jsonl`` has one line a log, each with its step, which trackers get too."""

    folder: Path
    sinks: tuple[Sink, ...] = ()

    @classmethod
    def open(cls, run: Run, step: int) -> "Tracker":
        """Make the folder, or take it up again at ``step``: later lines of metrics.jsonl are dropped."""
        run.out.mkdir(parents=True, exist_ok=True)
        tracker = cls(run.out, open_sinks(run, step))
        if step:
            tracker._drop_after(step)
        else:
            write_json(run.out / "run.json", {"run": run.to_json(), "environment": environment()})
            tracker.metrics.write_text("")
        return tracker

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, **values: Any) -> None:
        with self.metrics.open("a") as file:
            file.write(to_json(values) + "\n")
        if self.sinks and (numbers := flat(values)):
            for sink in self.sinks:
                sink.log(values["step"], numbers)

    def result(self, values: dict[str, Any]) -> None:
        write_json(self.folder / "result.json", values)
        for sink in self.sinks:
            sink.close()

    def _drop_after(self, step: int) -> None:
        """Keep the lines up to the checkpoint; a line that a crash cut short is dropped with the rest."""
        kept = []
        for line in self.metrics.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                break
        self.metrics.write_text("".join(kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Silent:
    """The tracker of a rank whose numbers another one writes."""

    def log(self, **values: Any) -> None:
        pass

    def result(self, values: dict[str, Any]) -> None:
        pass
