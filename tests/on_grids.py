"""Models with weights on grids, each weight rounded to its nearest value."""

import torch
from torch import nn

from prunus.grids import OnGrid, put_on_grid_
from prunus.ops.grid import Grid
from prunus.ops.lazy import as_rows


def on_grid(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, OnGrid]:
    """The weight, rounded to a grid, and the grid with its scales; zeros stay."""
    rows = as_rows(weight.detach(), grid.outputs).float()
    scales = torch.cat([grid.fitted(part, part != 0) for part in rows.split(grid.group, 1)], 1).to(torch.bfloat16)
    values = grid.values(grid.codes(weight, scales), scales, weight.dtype)
    return torch.where(weight.detach() == 0, torch.zeros_like(weight), values), OnGrid(grid, scales)


def put_on_grids_(model: nn.Module, bits: int = 4, group: int = 16) -> nn.Module:
    """Put every matrix of a model on a grid, but not embeddings and what shares their memory."""
    taken = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is None or weight.ndim < 2 or id(weight) in taken:
                continue
            outputs = (0, 1) if weight.ndim == 3 else (1,) if type(module).__name__ == "Conv1D" else (0,)
            weight.data, found = on_grid(weight, Grid(bits, group, outputs))
            put_on_grid_(module, key, found)
    return model
