"""How ways to do the same are timed, beside each other, and what they need of memory."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from prunus.lab.tracking import peak_memory, reset_peak_memory, timed
from prunus.ops.machine import said_by_linux

QUEUED = 10  # calls that are queued on a GPU and timed together


def median_ms(
    function: Callable[[], object], repeat: int, device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of ``repeat`` calls after one to warm up; ``before`` runs untimed ahead of each."""
    times: list[float] = []
    while len(times) <= repeat and (len(times) < 4 or sum(times) < 20):  # a slow rival is measured fewer times
        before()
        times.append(timed(queued(function, 1), device)[0])  # its result is freed within its time
    return 1e3 * statistics.median(times[1:])


@dataclass
class Turns:
    """Seconds of every call of one arm, those of all CPU cores, and what the last call returned."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    result: Any = None

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def in_turns(
    arms: Mapping[str, Callable[[], object]],
    repeat: int,
    device: torch.device,
    warm_up: int = 1,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Turns]:
    """Each arm ``repeat`` times after some calls to warm up, in turns: what else the machine does falls on all.

    ``after`` runs untimed behind each call.
    """
    turns = {name: Turns() for name in arms}
    for number in range(-warm_up, repeat):
        for name, arm in arms.items():
            cpu = time.process_time()
            seconds, turns[name].result = timed(arm, device)
            if number >= 0:
                turns[name].seconds.append(seconds)
                turns[name].cpu_seconds.append(time.process_time() - cpu)
            after()
    return turns


def overhead(arm: Turns, beside: Turns) -> float:
    """Median over rounds of the time that an arm took beyond another in the same round, as a fraction."""
    return statistics.median(ours / other - 1 for ours, other in zip(arm.seconds, beside.seconds, strict=True))


def queued(call: Callable[[], object], num: int = QUEUED) -> Callable[[], None]:
    """``num`` calls, one behind the other: what one costs where the host runs ahead of the GPU."""

    def calls() -> None:
        for _ in range(num):
            call()

    return calls


def copy_gb_s(device: torch.device) -> float | None:
    """Measured bandwidth of a large copy on a GPU, bytes read and written together."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * QUEUED * source.nbytes / median_ms(queued(lambda: target.copy_(source)), 4, device) / 1e6


def peak_extra_mib(function: Callable[[], object], device: torch.device, after: Callable[[], object]) -> float | None:
    """MiB that a call needs at its peak beyond what was allocated before it, its result included.

    On CUDA the allocator's own count; on Linux the process's largest resident size, which counts
    every temporary, numpy's too; None elsewhere. The least of three calls, each followed by ``after``:
    what else the process touches can only add. Builds of torch for ARM keep freed memory, which hides it from this
    count; the environment variable MIMALLOC_PURGE_DELAY=0 makes them return it.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu and said_by_linux("self/status", "VmHWM") is None:
        return None
    peaks = []
    for _ in range(3):
        gc.collect()
        if not on_gpu:
            ctypes.CDLL(None).malloc_trim(0)
        reset_peak_memory(device)
        base = torch.cuda.memory_allocated() if on_gpu else said_by_linux("self/status", "VmRSS") or 0
        timed(queued(function, 1), device)
        peaks.append((peak_memory(device) - base) / 2**20)
        after()
    return min(peaks)
