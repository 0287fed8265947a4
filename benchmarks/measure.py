"""Time and memory of a function."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from prunus.ops.machine import said_by_linux, wait_for

Result = TypeVar("Result")


def timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of a call that begins and ends with nothing under way on the device, and what it returned."""
    wait_for(device)
    started = time.perf_counter()
    found = work()
    wait_for(device)
    return time.perf_counter() - started, found


def median_ms(
    function: Callable[[], object], repeat: int, device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of ``repeat`` calls after one to warm up; ``before`` runs untimed ahead of each."""
    times: list[float] = []
    while len(times) <= repeat and (len(times) < 4 or sum(times) < 20_000):  # a slow rival is measured fewer times
        before()
        wait_for(device)
        started = time.perf_counter()
        function()  # its result is freed within its time
        wait_for(device)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def median_ms_in_turns(arms: Sequence[Callable[[], object]], repeat: int, device: torch.device) -> list[float]:
    """Median milliseconds of each arm after one call to warm up; the arms take turns."""
    rounds = [[1e3 * timed(arm, device)[0] for arm in arms] for _ in range(repeat + 1)]
    return [statistics.median(times[1:]) for times in zip(*rounds, strict=True)]


def queued_ms(function: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Median milliseconds of a call among ten queued ones: what it costs where the host runs ahead."""
    if device.type != "cuda":
        return median_ms(function, repeat, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(max(4, repeat // 3)):
        begin.record()
        for _ in range(10):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return statistics.median(times[1:])


def copy_gb_s(device: torch.device) -> float | None:
    """Measured bandwidth of a large copy on a GPU, bytes read and written together."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / queued_ms(lambda: target.copy_(source), 9, device) / 1e6


def peak_extra_mib(function: Callable[[], object], device: torch.device, after: Callable[[], object]) -> float | None:
    """MiB that a call needs at its peak beyond what was allocated before it, its result included.

    On CUDA the allocator's own count; on Linux the process's largest resident size, which counts
    every temporary, numpy's too; None elsewhere. The least of three calls, each followed by ``after``:
    what else the process touches can only add. Builds of torch for ARM keep freed memory, which hides it from this
    count; the environment variable MIMALLOC_PURGE_DELAY=0 makes them return it.
    """
    peaks = []
    for _ in range(3):
        peaks.append(_peak_of_call(function, device))
        after()
    return min((peak for peak in peaks if peak is not None), default=None)


def _peak_of_call(function: Callable[[], object], device: torch.device) -> float | None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        result = function()
        wait_for(device)
        del result
        return (torch.cuda.max_memory_allocated() - base) / 2**20
    if said_by_linux("self/status", "VmHWM") is None:
        return None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    base = said_by_linux("self/status", "VmRSS") or 0
    result = function()
    del result
    return ((said_by_linux("self/status", "VmHWM") or 0) - base) / 2**20
