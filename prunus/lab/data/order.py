"""The order of training: an endless run of permutations, one an epoch, each a pure function of seed and epoch.

Nothing here remembers what was drawn before, so a resumed run sees what an unbroken one would have seen, and
a rank that asks for a part of a batch gets that part: batch ``2 s + r`` of size n is half r of batch s of size 2 n.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets


def mixed(*words: int | str) -> int:
    """64 bits in which every word counts: (seed 1, epoch 0) has nothing in common with (seed 0, epoch 1)."""
    return int.from_bytes(blake2b("/".join(map(str, words)).encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=4)  # a batch may lie across two epochs, and there may be two datasets
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Every index below ``count`` once, in the order of this seed and epoch; read-only, for it is shared."""
    generator = torch.Generator("cpu").manual_seed(mixed("order", seed, epoch))
    order = torch.randperm(count, generator=generator, device="cpu").numpy()
    order.flags.writeable = False
    return order


def pieces(count: int, start: int, size: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, indices) for the places ``start`` to ``start + size`` of the endless run, cut where an epoch ends."""
    while size > 0:
        epoch, offset = divmod(start, count)
        indices = permutation(count, seed, epoch)[offset : offset + size]
        yield epoch, indices
        start, size = start + len(indices), size - len(indices)
