"""Time and memory of a run: seconds by part, free and peak memory, and the batch size that fits."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..ops.machine import give_back, said_by_linux, wait_for

# how a model fails that cannot be run as was tried; without memory, torch raises a RuntimeError on a GPU
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
Work = Callable[[], object]
SHARE = {"cpu": 0.25, "cuda": 0.7}  # of the free memory that a pass may take
CACHED = 1 << 28  # bytes of a pass on a CPU beyond which larger batches only leave the cache
SLACK = {"cpu": 2.5, "cuda": 1.6}  # a pass takes this many times what it saves for its backward


@dataclass
class Clock:
    """Seconds by part; time in a nested part counts for the inner one only."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, float] = field(default_factory=dict)
    _parts: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._parts.append(name)
        try:
            yield
        finally:
            self._switch()
            self._parts.pop()

    def _switch(self) -> None:
        """Add the time since the last switch to the part that is open."""
        wait_for(self.device)
        now = time.perf_counter()
        if self._parts:
            self.seconds[self._parts[-1]] = self.seconds.get(self._parts[-1], 0.0) + now - self._since
        self._since = now


@dataclass
class Cost:
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part of the call
    passes: int = 0  # forward and backward passes of one sample
    forwards: int = 0  # forward passes of one sample without a backward
    peak_bytes: int = 0
    rows: int = 0  # of a pass with gradients, at the end: samples times variants of the weights
    halved: int = 0  # how often memory ran out
    checkpointing: bool = False  # whether blocks ran again for the backward

    def __str__(self) -> str:
        """Seconds, what most of them went into, and passes of one sample if there were any."""
        longest = sorted(self.parts, key=lambda part: -self.parts[part])[:3]
        parts = ", ".join(f"{part} {self.parts[part]:.1f}" for part in longest)
        passes = {"with gradients": self.passes, "without gradients": self.forwards}
        said = " and ".join(f"{num:,} {which}" for which, num in passes.items() if num)
        return f"{self.seconds:.1f} s{f': {parts}' if parts else ''}{f'; passes of one sample: {said}' if said else ''}"

    def merge_(self, ranks: Sequence["Cost"]) -> None:
        """Become what a call has cost all ranks: the passes of all of them, and the seconds of the first."""
        self.same_as_(ranks)
        self.passes, self.forwards = sum(one.passes for one in ranks), sum(one.forwards for one in ranks)

    def same_as_(self, ranks: Sequence["Cost"]) -> None:
        """Take the seconds of the first rank, and the memory of the one that needs most."""
        self.seconds, self.parts = ranks[0].seconds, ranks[0].parts
        self.peak_bytes = max(one.peak_bytes for one in ranks)

    def add_(self, other: "Cost") -> None:
        self.seconds += other.seconds
        parts = {**other.parts, **self.parts}
        self.parts = {part: self.parts.get(part, 0.0) + other.parts.get(part, 0.0) for part in parts}
        self.passes, self.forwards = self.passes + other.passes, self.forwards + other.forwards
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


class Peak:
    """Peak memory in bytes: on CUDA the allocator's since this was made, elsewhere the process's since it started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return said_by_linux("self/status", "VmHWM") or 0


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return said_by_linux("meminfo", "MemAvailable") or 1 << 32


def batch_size(saved_bytes: int, device: torch.device) -> int:
    """Samples per pass, from the bytes that one sample saves for its backward."""
    room = SHARE.get(device.type, 0.25) * free_bytes(device) / SLACK.get(device.type, 2.5)
    if device.type == "cpu":
        room = min(room, CACHED)
    return max(1, int(room / max(1, saved_bytes)))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def reason_of(error: BaseException, length: int = 200) -> str:
    """Why a model failed, in one line; raises the error where memory ran out, which says nothing of the model."""
    if is_out_of_memory(error):
        raise error
    return " ".join(str(error).split())[:length]


def release(device: torch.device) -> None:
    """Return cached memory to the device, or to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back()


def fits(work: Work, device: torch.device, make_room: Work | None = None, *, or_raise: bool = False) -> bool:
    """Do ``work``. False where memory ran out; what it took is free again, and what ``make_room`` frees."""
    try:
        work()
        return True
    except Exception as error:
        if or_raise or not is_out_of_memory(error):
            raise
    if make_room is not None:  # outside the handler: the error keeps the tensors of the failed work alive
        make_room()
    release(device)
    return False
