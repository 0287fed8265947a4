"""SparseGPT (Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774) as a step of our loop, for comparisons.

Columns are pruned one after the other, and each error is spread over the columns that follow. Which weights go is
chosen for 128 columns at a time, by ``w^2 / [H^-1]^2`` over all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prunus.oneshot import Result
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.level import Level
from prunus.oneshot.loop import Loop
from prunus.oneshot.step import Change, Layers, keep_all_but
from prunus.oneshot.steps import Mask
from prunus.ops import bits

BLOCK = 128  # columns
DAMPING = 0.01  # of the mean of the Gram matrix's diagonal


@dataclass(frozen=True)
class SparseGPT:
    sparsity: float

    @property
    def targets(self) -> Literal["own"]:
        return "own"

    def __call__(self, layers: Layers) -> dict[str, Change]:
        (moments,) = layers.moments
        if moments is None:
            return {}
        factor = inverse_factor(moments.gram)
        return {name: self.pruned(weight, factor) for name, weight in layers.weights.items()}

    def pruned(self, dense: Tensor, factor: Tensor) -> Change:
        weight, keep = dense.float().clone(), torch.ones_like(dense, dtype=torch.bool)
        for first in range(0, weight.shape[1], BLOCK):
            inner = slice(first, min(first + BLOCK, weight.shape[1]))
            part, scale = weight[:, inner], factor.diagonal()[inner]
            until = round(self.sparsity * len(weight) * inner.stop)  # exact over all columns so far
            going = (part / scale).abs().flatten().argsort()[: until - int((~keep).sum())]
            keep[:, inner] = keep[:, inner].flatten().index_fill(0, going, False).view_as(part)
            errors = torch.zeros_like(part)
            for column in range(inner.start, inner.stop):
                values, at = weight[:, column], column - first
                errors[:, at] = values.masked_fill(keep[:, column], 0) / factor[column, column]
                weight[:, column : inner.stop] -= errors[:, at, None] * factor[column, column : inner.stop]
            weight[:, inner.stop :] -= errors @ factor[inner, inner.stop :]
        return Change(keep, (weight * keep).to(dense.dtype))


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Gram matrix."""
    gram = gram.clone().float()
    gram.diagonal().add_(DAMPING * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)


def sparsegpt(model: nn.Module, batches: Sequence[Any], sparsity: float) -> Result:
    """Prune a model in place, each layer to the same sparsity."""
    calibration = Calibration(model, batches)
    weights = {name: weight.parameter for name, weight in calibration.weights.items()}
    choose = keep_all_but({name: round(sparsity * weight.numel()) for name, weight in weights.items()})
    level = Level(calibration.weights, live={name: bits.pack(weight != 0) for name, weight in weights.items()})
    with calibration.open(), torch.no_grad():
        Loop(calibration, level, Mask(choose)).run(SparseGPT(sparsity), finished=lambda names: None)
    return Result(level, model)
