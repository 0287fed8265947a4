"""What a Pruner is asked for: refused at once where it cannot be meant, and counted."""

import math
from collections.abc import Sequence

from .allocate import allocate
from .eligible import Weight
from .select import NofM, PerLayer, PerRow, Selector


def num_asked(select: Selector, weights: Sequence[Weight], sparsity: float) -> int:
    """How many of all elements ``select`` drops at ``sparsity``, if no more of them are pruned already."""
    if isinstance(select, PerLayer):
        return sum(allocate({w.name: w.parameter.shape for w in weights}, sparsity, select.allocate).values())
    sizes = [w.parameter.numel() for w in weights]
    if isinstance(select, NofM):
        return sum(size // select.m * (select.m - select.n) for size in sizes) if sparsity else 0
    if isinstance(select, PerRow):
        lengths = [_row_length(weight) for weight in weights]
        return sum(size // length * round(sparsity * length) for size, length in zip(sizes, lengths, strict=True))
    return round(sparsity * sum(sizes))


def _row_length(weight: Weight) -> int:
    return math.prod(size for dim, size in enumerate(weight.parameter.shape) if dim not in (weight.outputs or ()))
