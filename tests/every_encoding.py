"""Small tensors of every encoding that a sparse file has."""

import torch
from torch import Tensor


def tensors() -> dict[str, Tensor]:
    """Of every encoding: sparse, 2:4, dense, empty, a scalar, and one that is another's."""
    torch.manual_seed(0)
    sparse, groups, half = torch.randn(24, 16), torch.randn(8, 16), torch.zeros(4, 16, dtype=torch.bfloat16)
    sparse[torch.rand(sparse.shape) < 0.6] = 0
    groups.view(-1, 4)[:, :2] = 0
    half[:, ::8] = 3
    rest = {"bias": torch.randn(9), "count": torch.tensor(7), "none": torch.empty(0, 2), "tied": sparse}
    return {"a": sparse, "b": groups, "c": half, **rest}
