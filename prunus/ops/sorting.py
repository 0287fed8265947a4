"""Scores in order: sorted, or as integers whose digits are counted, which is what a radix descent reads."""

import numpy as np
import torch
from torch import Tensor

DIGIT = 16  # bits fixed by one pass; 2^16 counts fit the cache, and float32 needs two passes


def ascending(values: Tensor) -> Tensor:
    """``values`` sorted along the last dimension; numpy's vectorised sort serves the CPU."""
    if values.is_cpu:
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def kth_smallest(values: Tensor, k: int) -> Tensor:
    """The ``k``-th smallest along the last dimension, as one column; numpy's selection serves the CPU."""
    if values.is_cpu:
        return torch.from_numpy(np.partition(values.numpy(), k - 1, axis=-1)[..., k - 1 : k].copy())
    return ascending(values)[..., k - 1 : k]


def sortable(scores: Tensor) -> Tensor:
    """Signed integers of the width of ``scores`` that stand in the same order; -0.0 equals 0.0."""
    if not scores.is_floating_point():
        return scores.long()
    width = {4: torch.int32, 8: torch.int64}[scores.element_size()]
    words = (scores + 0.0).view(width)
    return words ^ ((words >> (8 * words.element_size() - 1)) & torch.iinfo(width).max)


def from_sortable(key: int, dtype: torch.dtype) -> float | int:
    """The score whose sortable integer is ``key``."""
    if not dtype.is_floating_point:
        return key
    width = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    word = key if key >= 0 else key ^ torch.iinfo(width).max
    return torch.tensor(word, dtype=width).view(dtype).item()


def digit_counts(keys: Tensor, prefix: int | None, shift: int) -> Tensor:
    """How often each 16-bit digit stands at bit ``shift`` of the keys whose higher bits are ``prefix``.

    The top digit (``prefix`` is None) carries the sign: it is shifted so that counts stand in the
    order of the keys.
    """
    if prefix is None:
        digits = (keys >> shift) + (1 << DIGIT - 1)
    else:
        digits = (keys >> shift)[keys >> (shift + DIGIT) == prefix] & ((1 << DIGIT) - 1)
    return torch.bincount(digits, minlength=1 << DIGIT)
