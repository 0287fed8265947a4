"""What learns of a weight on a grid of few bits: its scales, while its codes stay as they are."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..grids import OnGrid, check_on_grid, on_grids, put_on_grid_
from ..ops.grid import Grid
from ..ops.lazy import as_rows
from ..ranks import is_dtensor

FARTHEST = math.log(4)  # that the logarithm of a scale may move


class LearnedScale:
    """Scales (row, group) that are ``first * exp(log)``: ``log`` learns from 0, so that steps are shares of a scale.

    The weight stays a parameter that has a gradient, and follows its scales after each step. Its codes are kept
    nowhere: they are read from the weight and the scales that it has.
    """

    def __init__(self, module: nn.Module, key: str, on_grid: OnGrid, dtype: torch.dtype) -> None:
        self.module, self.key, self.grid, self.dtype = module, key, on_grid.grid, dtype
        self.weight = module.get_parameter(key)
        self.first = self.now = on_grid.scales.to(self.weight.device, torch.float32, copy=True)
        self.log = nn.Parameter(torch.zeros_like(self.first))

    @torch.no_grad()
    def take_gradient_(self) -> None:
        """Turn the gradient of the weight into that of ``log``: ``sum of gradient * weight`` over each group."""
        grad = self.weight.grad
        self.log.grad = None if grad is None else group_sums(grad * self.weight, self.grid)
        self.weight.grad = None

    @torch.no_grad()
    def follow_(self) -> None:
        """Give the weight the values of its codes with the scales that ``log`` says."""
        # codes cannot be read from weights that are not finite
        self.log.nan_to_num_(0.0).clamp_(-FARTHEST, FARTHEST)
        scales = (self.first * self.log.exp()).clamp(max=self.grid.most(self.weight.dtype))
        self._set_(scales, self.weight.dtype)

    @torch.no_grad()
    def finish_(self) -> None:
        """Round scales that moved to bfloat16 and the weight to its own dtype, and keep the scales beside it."""
        self._set_(torch.where(self.log == 0, self.first, self.grid.allowed(self.now, self.dtype)), self.dtype)
        put_on_grid_(self.module, self.key, OnGrid(self.grid, self.now))

    def _set_(self, scales: Tensor, dtype: torch.dtype) -> None:
        values = self.grid.values(self.grid.codes(self.weight, self.now), scales, dtype)
        self.weight.copy_(torch.where(self.weight == 0, self.weight, values.to(self.weight.dtype)))
        self.now = scales


def group_sums(values: Tensor, grid: Grid) -> Tensor:
    """Sums over the groups of columns, (row, group), of values in the shape of a weight."""
    rows = as_rows(values, grid.outputs).float()
    num_groups = grid.num_groups(rows.shape[1])
    padded = F.pad(rows, (0, num_groups * grid.group - rows.shape[1]))
    return padded.view(len(rows), num_groups, grid.group).sum(2)


def check_codes(model: nn.Module, *, is_sharded: bool) -> None:
    """ValueError where codes cannot stay: of a weight that has left its grid, and of sharded weights."""
    for name, on_grid in on_grids(model).items():
        if is_sharded or is_dtensor(weight := model.get_parameter(name)):
            raise ValueError(
                f"{name} has {on_grid.grid.bits}-bit codes, whose scales cannot learn under FSDP; recover on one "
                "process, with DDP, or before quantising"
            )
        check_on_grid(name, weight, on_grid)


def learned_scales(model: nn.Module, dtypes: Mapping[nn.Parameter, torch.dtype]) -> list[LearnedScale]:
    """One for each weight that is on a grid and learns; ``dtypes`` are those that parameters end in."""
    scales: dict[nn.Parameter, LearnedScale] = {}
    for name, on_grid in on_grids(model).items():
        prefix, _, key = name.rpartition(".")
        parameter = model.get_parameter(name)
        if parameter.requires_grad and parameter.numel():
            scales[parameter] = LearnedScale(model.get_submodule(prefix), key, on_grid, dtypes[parameter])
    return list(scales.values())
