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
class Part:
    """The block of ``size`` at ``start`` of a tensor of shape ``whole``, in each dimension.

    ``counts`` says whether this rank speaks for the block: of several ranks that hold the same one, one does.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    counts: bool
    ranks: Sums

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.whole)

    def along(self, dims: Sequence[int]) -> "Part":
        """The part seen along some dimensions only."""
        picked = ([values[dim] for dim in dims] for values in (self.whole, self.start, self.size))
        whole, start, size = map(tuple, picked)
        return Part(whole, start, size, self.counts, self.ranks)

    def positions(self, local: Tensor) -> Tensor:
        """Positions in the flattened whole of elements given by their positions in the flattened part."""
        if self.whole[1:] == self.size[1:]:
            return local + self.start[0] * math.prod(self.whole[1:]) if self.whole else local
        found, stride = local.new_zeros(local.shape), 1
        for whole, start, size in zip(self.whole[::-1], self.start[::-1], self.size[::-1], strict=True):
            found += (local % max(1, size) + start) * stride
            local, stride = local // max(1, size), stride * whole
        return found

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that broadcasts to the whole."""
        for dim in range(1, tensor.ndim + 1):
            if tensor.shape[-dim] == self.whole[-dim]:
                tensor = tensor.narrow(-dim, self.start[-dim], self.size[-dim])
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
