"""How many samples fit into a pass, and what to do when they do not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..ops.machine import said_by_linux
from .offload import Offload, saving

SHARE = {"cpu": 0.25, "cuda": 0.7}  # of the free memory that a pass may take
CACHED = 1 << 28  # bytes of a pass on a CPU beyond which larger batches only leave the cache
SLACK = {"cpu": 2.5, "cuda": 1.6}  # a pass takes this many times what it saves for its backward


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on ``device``."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return said_by_linux("meminfo", "MemAvailable") or 1 << 32


def batch_size(saved_bytes: int, device: torch.device) -> int:
    """Samples a pass, from what one sample saves for its backward."""
    room = SHARE.get(device.type, 0.25) * free_bytes(device) / SLACK.get(device.type, 2.5)
    if device.type == "cpu":
        room = min(room, CACHED)
    return max(1, int(room / max(1, saved_bytes)))


@contextmanager
def counted_saves(model: nn.Module, offload: Offload | None = None) -> Iterator[list[int]]:
    """A list whose sum is the bytes that autograd saves meanwhile, the model's own tensors aside."""
    sizes: list[int] = []
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def count(tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in seen:
            seen.add(address)
            sizes.append(tensor.untyped_storage().nbytes())

    with saving(offload, count):
        yield sizes


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release(device: torch.device) -> None:
    """Give back what the allocator holds for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak:
    """Most bytes in use: on CUDA the allocator's since this was made, elsewhere the process's since it began."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return said_by_linux("self/status", "VmHWM") or 0
