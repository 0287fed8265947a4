"""What torch.profiler's trace says: the time of each part on the host and on the device, and what was allocated.

Parts are marked by names with a prefix. They nest by time, whatever thread they ran in: while autograd's thread
works, the main one waits for it. Time belongs to the part that was entered last.
"""

import json
import os
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...ops.machine import wait_for

PREFIX = "prunus: "
WINDOW = "other"  # the outermost part: what is in no other
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

Entries = Sequence[Mapping[str, Any]]


@contextmanager
def traced(device: torch.device, memory: bool = False) -> Iterator[list[Any]]:
    """A window of work that is traced; on a GPU it begins and ends with the device idle.

    The list that it gives is filled with the entries of the trace when the window is closed.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    entries: list[Any] = []
    recorded = profile(activities=activities, profile_memory=memory)
    with _quiet():
        recorded.start()
    try:
        wait_for(device)
        with part(WINDOW), _quiet() if memory else nullcontext():
            yield entries
            with part("waiting for the device"):
                wait_for(device)
    finally:
        with _quiet():
            recorded.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        entries += json.loads(path.read_text(errors="replace"))["traceEvents"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the standard error, to which the profiler writes messages."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def part(name: str) -> record_function:
    """A part of the work, as a context."""
    return record_function(PREFIX + name)


class Stretch(NamedTuple):
    """Time, in microseconds of the trace, that belongs to one part."""

    name: str
    start: float
    end: float


def stretches(entries: Entries) -> list[Stretch]:
    """The window, cut where parts begin and end, in order and without gaps."""
    spans = [
        Stretch(entry["name"].removeprefix(PREFIX), entry["ts"], entry["ts"] + entry["dur"])
        for entry in entries
        if entry.get("cat") == "user_annotation" and str(entry.get("name")).startswith(PREFIX)
    ]
    spans = sorted(spans, key=lambda span: (span.start, -span.end))[::-1]  # the first and outermost last
    edges = sorted({edge for span in spans for edge in (span.start, span.end)})
    cut: list[Stretch] = []
    open_spans: list[Stretch] = []
    for start, end in pairwise(edges):
        open_spans = [span for span in open_spans if span.end > start]
        while spans and spans[-1].start <= start:
            open_spans.append(spans.pop())
        if open_spans:
            cut.append(Stretch(open_spans[-1].name, start, end))
    return cut


def on_host(entries: Entries) -> dict[str, float]:
    """Seconds of the window by part: they add up to it."""
    seconds: dict[str, float] = {}
    for stretch in stretches(entries):
        seconds[stretch.name] = seconds.get(stretch.name, 0.0) + (stretch.end - stretch.start) / 1e6
    return seconds


def on_device(entries: Entries) -> dict[str, float] | None:
    """Seconds that the device worked for each part, and those it was idle: they add up to the window.

    Work belongs to the part that launched it. Where kernels overlap, time is counted once. None where no
    work was seen.
    """
    parts = stretches(entries)
    starts = [stretch.start for stretch in parts]
    launched = {
        entry["args"]["correlation"]: entry["ts"]
        for entry in entries
        if entry.get("cat") in LAUNCHES and "correlation" in entry.get("args", {})
    }
    work = sorted((e for e in entries if e.get("cat") in ON_DEVICE), key=lambda entry: entry["ts"])
    if not work or not parts:
        return None
    seconds: dict[str, float] = {}
    busy_until, last = parts[0].start, parts[-1].end
    for entry in work:
        start, end = max(entry["ts"], busy_until), min(entry["ts"] + entry["dur"], last)
        if end <= start:
            continue
        at = bisect_right(starts, launched.get(entry.get("args", {}).get("correlation"), entry["ts"])) - 1
        name = parts[max(at, 0)].name
        seconds[name] = seconds.get(name, 0.0) + (end - start) / 1e6
        busy_until = end
    return seconds | {"idle": (last - parts[0].start) / 1e6 - sum(seconds.values())}


def allocated(entries: Entries) -> list[tuple[str, float, int]]:
    """Part, time and bytes that torch held on the CPU, beside those from before the window, after each allocation."""
    parts = stretches(entries)
    starts = [stretch.start for stretch in parts]
    moments = []
    for entry in sorted((e for e in entries if e.get("name") == "[memory]"), key=lambda entry: entry["ts"]):
        if entry["args"].get("Device Type") == 0 and parts:
            name = parts[max(bisect_right(starts, entry["ts"]) - 1, 0)].name
            moments.append((name, entry["ts"], int(entry["args"]["Total Allocated"])))
    return moments


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


def split_of(entries: Entries, num: int) -> Split:
    """Seconds of each of ``num`` steps."""
    host, device = on_host(entries), on_device(entries)
    each = {name: seconds / num for name, seconds in host.items()}
    return Split(sum(each.values()), each, device and {name: seconds / num for name, seconds in device.items()})


def only_event(entries: Entries) -> Split:
    """The event of a step alone."""
    total, device = on_host(entries)["event"], on_device(entries)
    if device is not None:
        busy = device.get("event", 0.0)
        device = {"event": busy, "idle": total - busy}
    return Split(total, {"event": total}, device)
