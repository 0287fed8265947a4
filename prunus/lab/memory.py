"""The most memory that a run took: what CUDA allocated, or what the process held of the machine's memory."""

import contextlib
import sys
from pathlib import Path

import torch

from ..ops.machine import said_by_linux


def reset_peak(device: torch.device) -> None:
    """Begin to measure anew, so that a run does not answer for the one before it in the same process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux alone can; elsewhere the peak is the whole process's
            Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Bytes at the peak since ``reset_peak``; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (found := said_by_linux("self/status", "VmHWM")) is not None:
        return found
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
