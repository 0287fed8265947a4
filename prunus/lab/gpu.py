"""GPU utilisation, read while something runs."""

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

GIB = 2**30


@dataclass
class Sampler:
    """Reads a number at intervals while something runs."""

    read: Callable[[], float] | None
    interval: float = 0.25
    values: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["Sampler"]:
        stop = threading.Event()
        thread = threading.Thread(target=self._loop, args=(stop,), daemon=True)
        if self.read is not None:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            if self.read is not None:
                thread.join()

    def _loop(self, stop: threading.Event) -> None:
        while self.read is not None and not stop.wait(self.interval):
            try:
                self.values.append(self.read())
            except (OSError, ValueError, RuntimeError, subprocess.SubprocessError):
                return  # a missing figure must not end the run

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.values) if self.values else None


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
