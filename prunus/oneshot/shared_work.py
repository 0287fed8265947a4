"""One call on several ranks: each runs a share of the samples and solves a share of the rows, and all end alike.

Every rank holds the same model and makes the same call. The first one reads and writes files and shows progress.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..ops.bits import sum_of_bits
from ..ranks import Ranks
from .built_twice import tensors_of
from .disk_offload import disk_offload_of
from .identity import identity
from .samples import Samples, Stack, rows

# arguments of a rank's own
OWN = ("model", "batches", "offload", "batch_size", "memory", "progress", "group", "state", "out")
T = TypeVar("T")
RankGroup = ProcessGroup | bool | None  # True: all ranks; None: this process alone


def joined(group: RankGroup, arguments: Mapping[str, Any]) -> Ranks | None:
    """The ranks of a group, after a check that all got the same arguments, but their own; None if it is one."""
    if group is None or group is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        problem = "group divides the work among ranks, but there is no process group: start the program with torchrun"
        raise ValueError(f"{problem} and call torch.distributed.init_process_group() first, or leave out group")
    members = dist.group.WORLD if group is True else group
    if not isinstance(members, ProcessGroup):
        raise ValueError(f"group must be a process group that has this rank, or True for all ranks, got {group!r}")
    if dist.get_world_size(members) == 1:
        return None
    ranks = Ranks([members], [members])
    known = {name: _digest(value) for name, value in arguments.items() if name not in OWN}
    check_same(ranks, known | {name: str(arguments.get(name) is None) for name in ("state", "out")})
    return ranks


def _digest(value: Any) -> str:
    try:
        return hashlib.sha256(identity(value).encode()).hexdigest()
    except ValueError:  # a function without source
        return type(value).__qualname__


def check_same(ranks: Ranks, digests: Mapping[str, str]) -> None:
    first, *others = all_of(ranks, dict(digests))
    for number, other in enumerate(others, 1):
        if differing := [name for name in first if other.get(name) != first[name]]:
            problem = f"rank {number} and rank 0 have different {differing[0]}"
            raise ValueError(f"{problem}; give all ranks the same model, batches and options")


def check_same_inputs(ranks: Ranks, model: nn.Module, samples: Callable[[], Samples] | None) -> None:
    """Raise on all ranks if weights or samples differ, or if there are fewer samples than ranks."""

    def digests() -> tuple[dict[str, str], int]:
        read = None if samples is None else samples()
        return {"weights": _sums_of(model)} | ({} if read is None else {"samples": read.digest()}), len(read or ())

    said, num = agreed(ranks, digests)
    check_same(ranks, said)
    if samples is not None and num < ranks.size:
        raise ValueError(f"each of {ranks.size} ranks needs at least one sample, but there are {num}; use fewer ranks")


def _sums_of(model: nn.Module) -> str:
    """What tells a model from one with other names, shapes or values."""
    sha, disk = hashlib.sha256(), disk_offload_of(model)
    for name, tensor in tensors_of(model).items():
        with nullcontext() if disk is None else disk.holding([name]):
            values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            total = None if tensor.is_meta else sum_of_bits(values)
        sha.update(repr((name, tensor.dtype, tuple(tensor.shape), total)).encode())
    return sha.hexdigest()


def share_of(samples: Samples, ranks: Ranks) -> Samples:
    """Every so many samples, beginning with that of this rank's number."""
    stacks, first = [], 0
    for stack in samples.stacks:
        own = range((ranks.rank - first) % ranks.size, stack.size, ranks.size)
        first += stack.size
        if own:
            stacks.append(Stack(rows(stack.tree, slice(own.start, own.stop, own.step), stack.size), len(own)))
    return Samples(stacks, ranks.rank, ranks.size)


def agreed(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """The result of ``work`` on this rank; an error on one rank is raised on all."""
    if ranks is None:
        return work()
    try:
        result, failed = work(), None
    except Exception as error:
        result, failed = None, error
    ranks.agree(failed)
    return result  # pyrefly: ignore[bad-return]


def of_first(ranks: Ranks | None, work: Callable[[], T], device: torch.device | None = None) -> T:
    """What ``work`` returns, or raises, on the first rank, where alone it is called; its tensors on ``device``."""
    if ranks is None:
        return work()
    return same(ranks, agreed(ranks, lambda: work() if ranks.rank == 0 else None), device)  # pyrefly: ignore


def same(ranks: Ranks | None, value: T, device: torch.device | None = None) -> T:
    if ranks is None:
        return value
    box = [_packed(value) if ranks.rank == 0 else b""]
    dist.broadcast_object_list(box, dist.get_global_rank(ranks.groups[0], 0), ranks.groups[0])
    return _unpacked(box[0], device)


def all_of(ranks: Ranks, value: T, device: torch.device | None = None) -> list[T]:
    boxes = [b""] * ranks.size
    dist.all_gather_object(boxes, _packed(value), ranks.groups[0])
    return [_unpacked(box, device) for box in boxes]


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes, device: torch.device | None) -> Any:
    return torch.load(io.BytesIO(packed), map_location=device or "cpu", weights_only=False)


def divided(ranks: Ranks | None, num: int, work: Callable[[int], T], device: torch.device) -> list[T]:
    """What ``work`` returns for each of ``num`` parts, which ranks take in turn."""
    if ranks is None:
        return [work(part) for part in range(num)]
    own = agreed(ranks, lambda: {part: work(part) for part in range(ranks.rank, num, ranks.size)})
    parts = {part: result for results in all_of(ranks, own, device) for part, result in results.items()}
    return [parts[part] for part in range(num)]


@contextmanager
def silent(ranks: Ranks | None) -> Iterator[bool]:
    """While this is open, only the first rank warns; True on the others."""
    is_other = ranks is not None and ranks.rank > 0
    if not is_other:
        yield False
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield True
