"""What a rank holds of a tensor, and sums over ranks.

Weights of FSDP2 and of tensor parallelism are DTensors: this rank holds a block of each, or a copy.
Weights of DDP are plain tensors, of which every rank holds a copy.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .ops.shard import Shard

MESSAGE = 400  # bytes of an error's message that are sent


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; the module is not loaded to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without autograd and without DTensor's dispatch."""
    if not is_dtensor(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    block = tensor._local_tensor  # pyrefly: ignore[missing-attribute]
    return block.wait() if hasattr(block, "wait") else block


def placed_like(block: Tensor, tensor: Tensor) -> Tensor:
    """``block`` as this rank's shard of a tensor with the mesh and placements of ``tensor``."""
    if not is_dtensor(tensor):
        return block
    layout: Any = tensor
    made = type(layout) if type(layout).__name__ == "DTensor" else sys.modules["torch.distributed.tensor"].DTensor
    where = layout.device_mesh, layout.placements
    form = {"run_check": False, "shape": layout.shape, "stride": layout.stride()}
    return made.from_local(block.view(local(tensor).shape), *where, **form)


class RemoteError(ValueError):
    """The error of one rank, raised on every rank."""


class Ranks:
    """Ranks that hold one model: sums over ``groups`` one after the other; ``copies`` hold copies of weights."""

    def __init__(self, groups: Sequence[ProcessGroup] = (), copies: Sequence[ProcessGroup] = ()) -> None:
        self.groups, self.copies = list(groups), list(copies)
        self.num_bytes = self.num_sums = 0

    @property
    def size(self) -> int:
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def rank(self) -> int:
        number = 0
        for group in self.groups:
            number = number * dist.get_world_size(group) + dist.get_rank(group)
        return number

    def total(self, counts: Tensor, failed: Exception | None = None) -> Tensor:
        """Element-wise sum over all ranks, on the device of ``counts``; if one rank ``failed``, all raise."""
        flag = counts.new_full((1,), 0 if failed is None else 1)
        sums = self._reduced(torch.cat([counts.reshape(-1), flag]), dist.ReduceOp.SUM, self.groups)
        if sums[-1] > 0:
            self._raise(failed)
        return sums[:-1].view(counts.shape)

    def agree(self, failed: Exception | None = None) -> None:
        self.total(torch.zeros(0, dtype=torch.int64), failed)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks, without waiting for the device."""
        return self.sum_(values.clone())

    def sum_(self, values: Tensor) -> Tensor:
        """The same, in the memory of ``values`` where that is on the device of the group."""
        return self._reduced(values, dist.ReduceOp.SUM, self.groups)

    def stacked(self, values: Tensor) -> Tensor:
        """The values of every rank of the only group, which have one shape: (ranks, ...)."""
        [group] = self.groups
        own = _on_device_of(group, values.contiguous().view(-1).view(torch.uint8))
        every = own.new_empty(self.size, len(own))
        dist.all_gather(list(every), own, group)
        self.num_bytes += every.numel()
        return every.to(values.device).view(-1).view(values.dtype).view(self.size, *values.shape)

    def differ(self, numbers: Sequence[int]) -> bool:
        """Whether ``numbers``, one for each group of ``copies``, differ within such a group; the same on all ranks."""
        num_differing = 0
        for group, number in zip(self.copies, numbers, strict=True):
            half = number & (1 << 62) - 1
            most, least = self._reduced(torch.tensor([half, -half]), dist.ReduceOp.MAX, [group]).tolist()
            num_differing += most != -least
        return bool(self.total(torch.tensor([num_differing])))

    def each(self, number: int) -> list[int]:
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        return self.total(numbers).tolist()

    def _reduced(self, tensor: Tensor, op: Any, groups: Sequence[ProcessGroup]) -> Tensor:
        device = tensor.device
        for group in groups:
            tensor = _on_device_of(group, tensor)
            dist.all_reduce(tensor, op, group)
            self.num_bytes += tensor.numel() * tensor.element_size()
            self.num_sums += 1
        return tensor.to(device)

    def _raise(self, failed: Exception | None) -> None:
        """Raise the error of the first rank that has one; all ranks call this."""
        failing = [rank for rank, number in enumerate(self.each(failed is not None)) if number]
        text = torch.zeros(MESSAGE, dtype=torch.int64)
        if self.rank == failing[0]:
            encoded = str(failed).encode()[:MESSAGE]
            text[: len(encoded)] = torch.tensor(list(encoded))
        message = bytes(self.total(text).tolist()).rstrip(b"\0").decode(errors="replace")
        raise RemoteError(
            message if isinstance(failed, RemoteError) else f"{message} (rank {', '.join(map(str, failing))})"
        ) from failed


def _on_device_of(group: ProcessGroup, tensor: Tensor) -> Tensor:
    on_gpu = "nccl" in dist.get_backend(group)
    return tensor.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")


def ranks_of(tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> Ranks | None:
    """Ranks that hold DTensors of one mesh, or copies of plain tensors (``group``), together; None if alone."""
    meshes: list[Any] = []
    for name, tensor in tensors.items():
        if is_dtensor(tensor) and tensor.device_mesh not in meshes:  # pyrefly: ignore[missing-attribute]
            meshes.append(tensor.device_mesh)  # pyrefly: ignore[missing-attribute]
            if len(meshes) > 1:
                problem = f"all weights must be sharded over one mesh, but {name} is on {meshes[1]}"
                raise ValueError(f"{problem}, others on {meshes[0]}; leave it out with exclude=, or use one mesh")
    if meshes:
        [mesh] = meshes
        if mesh.size() == 1:
            return None
        axes = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
            return Ranks([dist.group.WORLD], axes)
        return Ranks([axis for axis in axes if dist.get_world_size(axis) > 1], axes)
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    assert group is not None
    return Ranks([group], [group]) if dist.get_world_size(group) > 1 else None


def shards_of(tensors: Mapping[str, Tensor], ranks: Ranks | None) -> dict[str, Shard] | None:
    """This rank's shard of each weight; None if every rank holds all weights."""
    if ranks is None or not any(map(is_dtensor, tensors.values())):
        return None
    return {name: shard_of(name, tensor, ranks) for name, tensor in tensors.items()}


def local_block(value: Tensor, weight: Tensor, shard: Shard | None) -> Tensor:
    """This rank's shard of ``value``, a full tensor or a DTensor of any placement; collective if it is moved."""
    if is_dtensor(value):
        given: Any = value
        layout: Any = weight
        if is_dtensor(weight) and given.device_mesh == layout.device_mesh:
            return local(given.redistribute(placements=layout.placements))
        value = given.full_tensor()
    return shard.of(value) if shard else value


def shard_of(name: str, tensor: Tensor, ranks: Ranks) -> Shard:
    """This rank's shard of a weight; a plain tensor among DTensors is copied on every rank."""
    global_shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Shard(global_shape, (0,) * len(global_shape), global_shape, ranks.rank == 0, ranks)
    layout: Any = tensor
    mesh, placements, place = layout.device_mesh, layout.placements, layout.device_mesh.get_coordinate()
    offset, shape, is_owner = [0] * len(global_shape), list(global_shape), True
    strided = [axis for axis, placement in enumerate(placements) if _is_strided(placement)]
    if len({placements[axis].dim for axis in strided}) < len(strided):
        raise ValueError(f"{name} has two strided shards of one dimension, {placements}; leave it out with exclude=")
    # FSDP2 over tensor parallelism shards a dimension that is sharded already, and calls it strided: last
    for axis in [axis for axis in range(mesh.ndim) if axis not in strided] + strided:
        if placements[axis].is_replicate():
            is_owner = is_owner and place[axis] == 0
        elif _is_strided(placements[axis]) or placements[axis].is_shard():
            dim = placements[axis].dim
            step = -(-shape[dim] // mesh.size(axis))
            first = min(place[axis] * step, shape[dim])
            offset[dim], shape[dim] = offset[dim] + first, min(step, shape[dim] - first)
        else:
            raise ValueError(f"{name} is placed as {placements}; redistribute it, so that it is sharded or replicated")
    if (here := tuple(local(tensor).shape)) != tuple(shape):
        raise ValueError(f"{name}, placed as {placements}, should be {tuple(shape)} on this rank, but is {here}")
    return Shard(global_shape, tuple(offset), tuple(shape), is_owner, ranks)


def is_replicated(tensor: Tensor, axis: int) -> bool:
    """Whether ranks along an axis of the mesh hold copies, as they do of plain tensors."""
    return not is_dtensor(tensor) or tensor.placements[axis].is_replicate()  # pyrefly: ignore[missing-attribute]


def _is_strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"


def gather(block: Tensor, shard: Shard) -> Tensor:
    """The full tensor of small integers, from the blocks of all ranks."""
    full = block.new_zeros(shard.global_shape)
    if shard.is_owner:
        shard.of(full).copy_(block)
    return shard.ranks.total(full)


def is_offloaded(tensor: Tensor) -> bool:
    """Whether FSDP2 offloads it to the CPU: its gradient is still being copied when it is accumulated."""
    return is_dtensor(tensor) and tensor.device_mesh.device_type != local(tensor).device.type  # pyrefly: ignore
