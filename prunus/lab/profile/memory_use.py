"""What holds memory between steps, at the peak of a step and in an event; each adds up to what was measured."""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from ...ops.machine import wait_for
from ..tracking import peak_memory
from ..trainer import Training
from .trace import allocated, traced

READY = "prunus gradients of bytes: "

CATEGORIES = {
    "weights": "parameters and buffers",
    "moments": "the optimizer's state",
    "masks": "one bit a weight",
    "movement": "sums that the score movement keeps",
    "gradients": "those that exist at that moment",
    "activations": "what the passes keep and what they compute with",
    "event scratch": "what an event needs beside all that",
    "rest": "what else the allocator holds: batches, tables, libraries' workspace",
}
HOW = {
    "cuda": "by the caching allocator of torch",
    "cpu": "tensors that stay, and on top of them what torch allocated in a step, tracked by its profiler; "
    "memory of Python and numpy is not in it",
}


@dataclass(frozen=True)
class Moment:
    """The highest memory of a stretch of a step, and the gradients that existed then."""

    part: str
    gradients: int
    peak: int


@dataclass(frozen=True)
class Memory:
    """Bytes by category in three moments; ``part`` is where the peak was."""

    steady: dict[str, int]
    peak: dict[str, int]
    event: dict[str, int] | None
    part: str
    how: str
    limits: dict[str, int] = field(default_factory=dict)  # what the device has, and what the allocator reserved of it


def steady_bytes(training: Training) -> dict[str, int]:
    """Bytes of the tensors that stay from step to step, by category."""
    pruner, state = training.pruner, training.optimizer.state.values()
    moments = [value for own in state for key, value in own.items() if key != "mask" and isinstance(value, Tensor)]
    sums = pruner.state_dict()["movement"].values() if pruner else ()
    sizes = {
        "weights": _bytes([*training.model.parameters(), *training.model.buffers()], training.device),
        "moments": _bytes(moments, training.device),
        "masks": _bytes(pruner.masks.packed.values() if pruner else (), training.device),
        "movement": _bytes(sums, training.device),
    }
    return {name: size for name, size in sizes.items() if size}


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages under the tensors on this device, each counted once."""
    there = [t.untyped_storage() for t in tensors if t.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def measured_memory(training: Training, before_event: Callable[[], None] | None) -> Memory:
    """Memory of one ordinary step and, where there are events, of one with an event after it."""
    gc.collect()
    wait_for(training.device)
    on_gpu = training.device.type == "cuda"
    fixed = steady_bytes(training)
    total = torch.cuda.memory_allocated(training.device) if on_gpu else sum(fixed.values())
    steady = fixed | {"rest": total - sum(fixed.values())}
    moments_of = _by_allocator if on_gpu else _by_trace
    moments = moments_of(training, total)
    top = max(moments, key=lambda moment: moment.peak)
    event = None
    if before_event:
        before_event()
        num_events = len(training.events)
        in_event = [moment for moment in moments_of(training, total) if moment.part == "event"]
        if len(training.events) > num_events:  # SPAM makes events wait
            event = _split(steady, max(in_event, key=lambda moment: moment.peak), "event scratch")
    limits = {"resident": peak_memory(training.device)}
    if on_gpu:
        free, size = torch.cuda.mem_get_info(training.device)
        limits = {"reserved": torch.cuda.max_memory_reserved(training.device), "device": size, "free": free}
    return Memory(steady, _split(steady, top, "activations"), event, top.part, HOW[training.device.type], limits)


def _split(steady: dict[str, int], moment: Moment, what: str) -> dict[str, int]:
    rest = moment.peak - sum(steady.values()) - moment.gradients
    ordered = {**{k: v for k, v in steady.items() if k != "rest"}, "gradients": moment.gradients, what: rest}
    return ordered | {"rest": steady["rest"]}


def _by_trace(training: Training, total: int) -> list[Moment]:
    """The stretches of one step, cut at every part and at every gradient that is ready."""

    def note(num_bytes: int) -> None:
        with record_function(f"{READY}{num_bytes}"):
            pass

    with traced(training.device, memory=True) as entries, _ready(training, note):
        training.train_step()
    names = [(entry["ts"], str(entry["name"])) for entry in entries if entry.get("cat") == "user_annotation"]
    ready = sorted((at, int(name.removeprefix(READY))) for at, name in names if name.startswith(READY))
    times = [at for at, _ in ready]
    moments = [
        Moment(name, ready[index - 1][1] if (index := bisect_right(times, at)) else 0, total + size)
        for name, at, size in allocated(entries)
    ]
    return moments or [Moment("other", 0, total)]


def _by_allocator(training: Training, total: int) -> list[Moment]:
    """The same on a GPU, as torch's allocator says."""
    mark = training.mark
    moments, now, gradients = [], "other", 0

    def cut(name: str, ready: int | None = None) -> None:
        nonlocal now, gradients
        moments.append(Moment(now, gradients, torch.cuda.max_memory_allocated(training.device)))
        torch.cuda.reset_peak_memory_stats(training.device)
        now, gradients = name, gradients if ready is None else ready

    def marked(name: str) -> None:
        cut(name)
        mark(name)

    with _ready(training, lambda num_bytes: cut(now, num_bytes)):
        torch.cuda.reset_peak_memory_stats(training.device)
        training.mark = marked
        try:
            training.train_step()
        finally:
            training.mark = mark
        cut("other")
    return moments


@contextmanager
def _ready(training: Training, seen: Callable[[int], None]) -> Iterator[None]:
    """Call ``seen`` with the bytes of all gradients that exist, whenever there is one more."""
    sizes: dict[int, int] = {}

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            sizes[id(parameter)] = parameter.grad.untyped_storage().nbytes()
            seen(sum(sizes.values()))

    handles = [p.register_post_accumulate_grad_hook(note) for p in training.model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
