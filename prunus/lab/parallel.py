"""One process or many under torchrun: ``Team`` is this process among them, and what they do together.

Every rank runs the same loop. The global batch of a step is a function of seed and step; a rank takes its slice
of it. Only the first rank writes files and shows progress.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from .run import Parallel, Run

T = TypeVar("T")
BatchSums = tuple[float, int, int]  # of a batch: summed loss, right predictions, targets


@dataclass(frozen=True)
class Team:
    """This process's place among ``size``; with kind "none" it is alone, and nothing here communicates."""

    kind: Parallel = "none"
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def place(self, device: torch.device) -> torch.device:
        if self.kind == "none" or device.type != "cuda":
            return device
        if device.index is not None and self.size > 1:
            raise ValueError(f"every rank needs its own GPU, but device is {device}; pass --device cuda")
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if own.index >= torch.cuda.device_count():
            num = torch.cuda.device_count()
            raise ValueError(
                f"every rank needs its own GPU, but rank {self.rank} sees only {num}; pass torchrun --nproc-per-node "
                f"{num}"
            )
        torch.cuda.set_device(own)
        return own

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """What to call for the model's output: the model itself, sharded in place under fsdp, or DDP around it."""
        if self.kind == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=ids)
        if self.kind == "fsdp":
            return _sharded(model, device, self.size)
        return model

    def syncing(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Where a forward and a backward pass run: gradients are summed over ranks in the ``last`` of a step."""
        if self.kind == "fsdp":
            wrapped.set_requires_gradient_sync(last)  # pyrefly: ignore[not-callable]
        elif self.kind == "ddp" and not last:
            return wrapped.no_sync()  # pyrefly: ignore[not-callable]
        return nullcontext()

    def shared(self, batches: Iterable[T], measure: Callable[[Iterator[T]], list[BatchSums]]) -> list[BatchSums]:
        """The rows that ``measure`` gives for the batches, in their order; ranks take turns at the batches.

        All ranks must make the same number of forward passes, since they gather sharded weights together: in a
        short last round some take the first batch again, and its row is left out.
        """
        if self.kind == "none":
            return measure(iter(batches))
        num_batches = 0

        def dealt() -> Iterator[T]:
            nonlocal num_batches
            spare = None
            for num_batches, batch in enumerate(batches, 1):
                spare = spare or batch
                if (num_batches - 1) % self.size == self.rank:
                    yield batch
            if spare is not None and -num_batches % self.size >= self.size - self.rank:
                yield spare

        rows = torch.tensor(measure(dealt()), dtype=torch.float64)
        every = self.rows(rows).unflatten(0, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return [(loss, int(right), int(total)) for loss, right, total in every[:num_batches].tolist()]

    def gpus(self, device: torch.device) -> list[torch.device]:
        """GPUs whose random state belongs to this process."""
        if device.type != "cuda":
            return []
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if self.kind == "none" else [device]

    def rows(self, own: Tensor) -> Tensor:
        """The ranks' tensors one after the other, (size * n, ...) of n each."""
        if self.kind == "none":
            return own
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own)
        return torch.cat(gathered)

    @torch.no_grad()
    def average_buffers_(self, model: nn.Module) -> None:
        """Give every rank the mean of the batch norms' statistics; each saw its own part of the batches."""
        if self.kind != "none":
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= self.size

    def first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the first rank, on all of them; its ValueError or OSError is raised on all."""
        if self.kind == "none":
            return make()
        box = [_tried(make) if self.is_first else (None, None)]
        dist.broadcast_object_list(box)
        value, error = box[0]
        if error is not None:
            raise error
        return value  # pyrefly: ignore[bad-return]

    def each(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on this rank; a ValueError or OSError of any rank is raised on all of them."""
        if self.kind == "none":
            return make()
        value, error = _tried(make)
        errors: list[Exception | None] = [None] * self.size
        dist.all_gather_object(errors, error)
        for rank, said in enumerate(errors):
            if said is not None:
                raise type(said)(f"rank {rank}: {said}" if rank else str(said))
        return value  # pyrefly: ignore[bad-return]


def _tried(make: Callable[[], T]) -> tuple[T | None, ValueError | OSError | None]:
    """What ``make`` gives, or its error in a form that every rank can read."""
    try:
        return make(), None
    except OSError as error:
        return None, OSError(str(error))
    except ValueError as error:
        return None, ValueError(str(error))


@contextmanager
def team_of(run: Run) -> Iterator[Team]:
    """The ranks that ``run`` asks for, joined while the context lasts; a launch that does not fit is a ValueError."""
    run.check_launch()
    if run.parallel == "none":
        yield Team()
        return
    joined = dist.is_initialized()
    if not joined:
        join(on_gpu=torch.cuda.is_available() and not run.device.startswith("cpu"))
    yield Team(run.parallel, dist.get_rank(), dist.get_world_size())
    if not joined:  # not after an error: other ranks may still wait in a collective
        dist.destroy_process_group()


def join(on_gpu: bool, patience: timedelta | None = None) -> None:
    """Meet the other ranks in a store of this attempt: torchrun's own keeps old addresses over its restarts."""
    store, rank, size = next(rendezvous("env://"))
    attempt = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=patience)


def _sharded(model: nn.Module, device: torch.device, size: int) -> nn.Module:
    """The model with its weights cut over ranks in place, each block of a list of blocks gathered on its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (size,))
    for module in [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
