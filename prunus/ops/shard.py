"""The shard of a tensor that one rank holds, and errors that are raised on all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Sums(Protocol):
    """Sums over the ranks that hold a tensor together."""

    def total(self, counts: Tensor, failed: Exception | None = None) -> Tensor:
        """Element-wise sum over all ranks; if one of them ``failed``, all raise."""
        ...


@dataclass(frozen=True)
class Shard:
    """A block of a tensor of ``global_shape``; of ranks with copies of it one ``is_owner``, who adds to sums."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_owner: bool
    ranks: Sums

    @property
    def global_numel(self) -> int:
        return math.prod(self.global_shape)

    def along(self, dims: Sequence[int]) -> "Shard":
        picked = ([values[dim] for dim in dims] for values in (self.global_shape, self.offset, self.shape))
        global_shape, offset, shape = map(tuple, picked)
        return Shard(global_shape, offset, shape, self.is_owner, self.ranks)

    def positions(self, local: Tensor) -> Tensor:
        """Positions in the flattened tensor of elements at the positions ``local`` of the flattened shard."""
        if self.global_shape[1:] == self.shape[1:]:
            return local + self.offset[0] * math.prod(self.global_shape[1:]) if self.global_shape else local
        positions, stride = local.new_zeros(local.shape), 1
        for length, first, size in zip(self.global_shape[::-1], self.offset[::-1], self.shape[::-1], strict=True):
            positions += (local % max(1, size) + first) * stride
            local, stride = local // max(1, size), stride * length
        return positions

    def of(self, tensor: Tensor) -> Tensor:
        """This shard of ``tensor``, which broadcasts to the global shape."""
        for dim in range(1, tensor.ndim + 1):
            if tensor.shape[-dim] == self.global_shape[-dim]:
                tensor = tensor.narrow(-dim, self.offset[-dim], self.shape[-dim])
        return tensor


def attempt(work: Callable[[], Result]) -> tuple[Result | None, ValueError | None]:
    """The result of ``work``, or its ValueError, to be raised on all ranks."""
    try:
        return work(), None
    except ValueError as failed:
        return None, failed


def together(ranks: Sums | None, work: Callable[[], Result]) -> Result:
    """The result of ``work`` on this rank; a ValueError on one rank is raised on all."""
    if ranks is None:
        return work()
    result, failed = attempt(work)
    ranks.total(torch.zeros(0, dtype=torch.int64), failed)
    assert result is not None
    return result
