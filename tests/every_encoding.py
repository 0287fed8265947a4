"""Small tensors of every encoding that a sparse file has."""

import torch
from torch import Tensor

from prunus.grids import OnGrid
from prunus.ops.grid import Grid

GRIDS = {"d": ((12, 20), Grid(4, group=8)), "e": ((16, 10), Grid(3, outputs=(1,)))}


def tensors() -> dict[str, Tensor]:
    """Of every encoding: sparse, 2:4, dense, empty, a scalar, one that is another's, and two that have ``grids``."""
    torch.manual_seed(0)
    sparse, groups, half = torch.randn(24, 16), torch.randn(8, 16), torch.zeros(4, 16, dtype=torch.bfloat16)
    sparse[torch.rand(sparse.shape) < 0.6] = 0
    groups.view(-1, 4)[:, :2] = 0
    half[:, ::8] = 3
    rest = {"bias": torch.randn(9), "count": torch.tensor(7), "none": torch.empty(0, 2), "tied": sparse}
    coded = {"d": on_grid("d", torch.bfloat16), "e": on_grid("e", torch.float32)}
    return {"a": sparse, "b": groups, "c": half, **rest, **coded}


def grids(factor: int = 1) -> dict[str, OnGrid]:
    """The grids of those that are stored as codes, if all tensors are multiplied by a power of two."""
    return {name: OnGrid(grid, _scales(grid, shape) * factor) for name, (shape, grid) in GRIDS.items()}


def on_grid(name: str, dtype: torch.dtype) -> Tensor:
    """Random values of a grid, of which six tenths are zero."""
    (shape, grid), rng = GRIDS[name], torch.Generator().manual_seed(1)
    codes = torch.randint(0, 2**grid.bits, shape, generator=rng, dtype=torch.uint8)
    weight = grid.values(codes, _scales(grid, shape), dtype)
    return weight.masked_fill(torch.rand(shape, generator=rng) < 0.6, 0)


def _scales(grid: Grid, shape: tuple[int, ...]) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return (torch.rand(grid.scales_shape(shape), generator=rng) + 0.01).to(torch.bfloat16)
