"""What this machine has: devices that are really there, what they have under way, threads and main memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def device_of(name: torch.device | str) -> torch.device:
    """The device of that name; a ValueError if this machine has none that holds values."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):  # torch says it in either way
        why = "" if torch.version.cuda or torch.version.hip else f" (torch {torch.__version__} is a build without GPUs)"
        raise ValueError(f"there is no device {str(name)!r} here{why}; use cpu, or a device that torch finds") from None
    return device


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def said_by_linux(file: str, key: str) -> int | None:
    """Bytes that ``/proc/meminfo`` or ``/proc/self/status`` gives for ``key``; None where it does not."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), None)


def give_back() -> None:
    """Give back to the system what glibc holds free: tensors of up to 32 MB leave holes in its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[work(item) for item in items]``; the functions must let go of the interpreter, as numpy's do."""
    import torch

    num_threads = min(torch.get_num_threads(), len(items))
    if num_threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))


def is_capturing() -> bool:
    """Whether this step is recorded into a CUDA graph, not run; a process that uses no GPU is left without one."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
