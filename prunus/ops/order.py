"""Sorting values."""

import numpy as np
import torch
from torch import Tensor


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
