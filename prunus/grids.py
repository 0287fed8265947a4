"""Weights of a model that are on grids of few bits: where their scales are kept, and what their codes are.

A weight on its grid stays an ordinary parameter. Beside a parameter ``weight`` its module has the scales, as the buffer
``weight_scales`` that no checkpoint holds, and the grid, as ``weight_grid``. Codes follow from the three.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .ops.grid import Grid


@dataclass(frozen=True)
class OnGrid:
    """A grid and the scales (rows, groups) of one weight, in bfloat16."""

    grid: Grid
    scales: Tensor


def put_on_grid_(module: nn.Module, key: str, on_grid: OnGrid) -> None:
    """Note that the parameter ``key`` of a module is on a grid; its values are not changed, nor needed."""
    parameter = module.get_parameter(key)
    scales = on_grid.scales.to(None if parameter.is_meta else parameter.device, torch.bfloat16)
    if scales.shape != on_grid.grid.scales_shape(parameter.shape):
        wanted = on_grid.grid.scales_shape(parameter.shape)
        raise ValueError(f"a weight {tuple(parameter.shape)} needs scales of shape {wanted}, got {tuple(scales.shape)}")
    module.register_buffer(f"{key}_scales", scales, persistent=False)
    setattr(module, f"{key}_grid", on_grid.grid)


def take_off_grid_(module: nn.Module, key: str) -> None:
    """Forget the grid of a parameter, if it has one."""
    module._buffers.pop(f"{key}_scales", None)
    module._non_persistent_buffers_set.discard(f"{key}_scales")
    vars(module).pop(f"{key}_grid", None)


def grid_of(module: nn.Module, key: str = "weight") -> OnGrid | None:
    grid, scales = vars(module).get(f"{key}_grid"), module._buffers.get(f"{key}_scales")
    return None if grid is None or scales is None else OnGrid(grid, scales)


def on_grids(model: nn.Module) -> dict[str, OnGrid]:
    """The grids of a model by the names of their weights."""
    return {
        f"{prefix}.{key}" if prefix else key: on_grid
        for prefix, module in model.named_modules()
        for key in module._parameters
        if (on_grid := grid_of(module, key)) is not None
    }


def check_on_grid(name: str, weight: Tensor, on_grid: OnGrid) -> None:
    """ValueError that names a weight which has left its grid, as training or a cast make it do."""
    off = ~on_grid.grid.holds(weight, on_grid.scales)
    if count := int(off.sum()):
        raise ValueError(
            f"{name} has {count:,} weights off its {on_grid.grid.bits}-bit grid: the model was trained, cast or "
            "changed after quantisation; call quantize(model, batches) again"
        )
