"""Where the time and memory of ``prunus prune`` went, and what to change, in words."""

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PARTS = {
    "strategy": "input norms or gradients, and the choice of candidates",
    "inspection": "what may be batched and skipped in this model",
    "records": "gradients before and after the reduction, and the decisions",
    "evaluation": "held-out data",
    "other": "everything else",
}
GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """Seconds by part, and the state of the device."""

    seconds: Mapping[str, float]
    rows: int  # of a pass, at the end; 0 where no gradient was read
    halved: int  # how often memory ran out
    used_bytes: int  # at the peak
    left_bytes: int  # that was free at the peak
    device: str
    schedule: str = "none"
    utilisation: float | None = None  # share of the time in which the GPU ran something
    checkpointing: bool = False  # whether blocks were run again for the backward

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        return self.seconds.get(part, 0.0) / self.total if self.total else 0.0


def split(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds by part in the order of PARTS, with what is in none of them as ``other``."""
    found = {part: parts[part] for part in PARTS if part in parts}
    return found | {"other": max(0.0, total - sum(found.values()))}


def advice(profile: Profile) -> list[str]:
    """What would make the run faster or smaller; one sentence at least."""
    found = []
    if profile.halved:
        times = "once" if profile.halved == 1 else f"{profile.halved} times"
        found.append(f"Memory ran out {times}; --batch {profile.rows} starts with what fitted in the end.")
    if profile.rows == 1 and profile.halved:
        found.append(f"One row a pass is the least there is: {_room(profile)} leave more room.")
    if profile.checkpointing and not profile.halved:
        found.append("Checkpointing was not needed: leave it out, or give it more rows a pass (--batch).")
    roomy = profile.left_bytes > profile.used_bytes
    if profile.device.startswith("cuda") and profile.rows and roomy and not profile.halved:
        found.append(f"More memory is left than was used: --batch {2 * profile.rows} or more fills the GPU better.")
    elif profile.utilisation is not None and profile.utilisation < 0.7:
        found.append("The GPU waits for the host: longer windows (--length) or more rows a pass (--batch) help.")
    if profile.share("evaluation") > 0.5:
        found.append("Most of the time went into held-out data: --eval-windows takes fewer of them.")
    if profile.share("inspection") > 0.25:
        found.append("The inspection of the model shows because the rest is short; it is done once.")
    if profile.share("records") > 0.5 and profile.schedule == "sequential":
        found.append("Gradients are recorded for one weight at a time: --probe block takes far fewer passes, "
                     "and decides a little differently.")  # fmt: skip
    if profile.share("strategy") > 0.5 and profile.schedule == "none":
        found.append("Most of it is passes over the samples: fewer or shorter ones (--samples, --length) cost less.")
    if profile.device == "cpu":
        threads = torch.get_num_threads()
        found.append(f"The passes ran on {threads} CPU thread{'s' * (threads > 1)}: --device cuda where there is one.")
    return found or ["Nothing stands out: time and memory go where they should."]


def _room(profile: Profile) -> str:
    """Ways to have more memory for activations that were not taken."""
    if profile.checkpointing or profile.schedule in ("none", "joint"):
        return "shorter windows (--length) or --offload"
    return "--checkpointing, shorter windows (--length) or --offload"


@dataclass
class Sampler:
    """Reads a number now and then while something runs."""

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
                return  # a figure less, never a run less

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.values) if self.values else None


def utilisation_reader(device: torch.device) -> Callable[[], float] | None:
    """A function that gives the GPU's utilisation in [0, 1]; None without a GPU or a way to ask it."""
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


def table_rows(profile: Profile) -> list[tuple[str, str, str]]:
    """What, how much, and its meaning, for a table."""
    rows = [
        (part, f"{seconds:.2f} s ({profile.share(part):.0%})", PARTS[part]) for part, seconds in profile.seconds.items()
    ]
    rows.append(("memory used", f"{profile.used_bytes / GIB:.2f} GiB", f"at the peak, on {profile.device}"))
    rows.append(("memory left", f"{profile.left_bytes / GIB:.2f} GiB", "at the peak"))
    if profile.rows:
        rows.append(("rows a pass", str(profile.rows), "samples times the weights each is seen with"))
    if profile.checkpointing:
        rows.append(("checkpointing", "yes", "blocks behind the probed one were run again for the backward"))
    if profile.utilisation is not None:
        rows.append(("GPU busy", f"{profile.utilisation:.0%}", "of the time, as the driver says"))
    return rows
