"""A rectangular part of a tensor that many ranks hold together, and what is summed over them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Sums(Protocol):
    """What parts ask of the ranks that hold the others."""

    def total(self, counts: Tensor, failed: Exception | None = None) -> Tensor:
        """Element-wise sum over all ranks; a failure of one of them is raised on all."""
        ...


@dataclass(frozen=True)
class Shard:
    """The block of ``size`` at ``start`` of a tensor of shape ``whole``, in each dimension.

    ``counts`` says whether this rank speaks for the block: of several ranks that hold the same one, one does.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_owner: bool
    ranks: Sums

    @property
    def global_numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.global_shape)

    def along(self, dims: Sequence[int]) -> "Shard":
        """The part seen along some dimensions only."""
        picked = ([values[dim] for dim in dims] for values in (self.global_shape, self.offset, self.shape))
        whole, start, size = map(tuple, picked)
        return Shard(whole, start, size, self.is_owner, self.ranks)

    def positions(self, local: Tensor) -> Tensor:
        """Positions in the flattened whole of elements given by their positions in the flattened part."""
        if self.global_shape[1:] == self.shape[1:]:
            return local + self.offset[0] * math.prod(self.global_shape[1:]) if self.global_shape else local
        found, stride = local.new_zeros(local.shape), 1
        for whole, start, size in zip(self.global_shape[::-1], self.offset[::-1], self.shape[::-1], strict=True):
            found += (local % max(1, size) + start) * stride
            local, stride = local // max(1, size), stride * whole
        return found

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that broadcasts to the whole."""
        for dim in range(1, tensor.ndim + 1):
            if tensor.shape[-dim] == self.global_shape[-dim]:
                tensor = tensor.narrow(-dim, self.offset[-dim], self.shape[-dim])
        return tensor


def attempt(work: Callable[[], Result]) -> tuple[Result | None, ValueError | None]:
    """What the work returned, or the error that all ranks shall hear of."""
    try:
        return work(), None
    except ValueError as failed:
        return None, failed


def together(ranks: Sums | None, work: Callable[[], Result]) -> Result:
    """What ``work`` returns on this rank; its ValueError on one rank is raised on all."""
    if ranks is None:
        return work()
    result, failed = attempt(work)
    ranks.total(torch.zeros(0, dtype=torch.int64), failed)
    assert result is not None
    return result
