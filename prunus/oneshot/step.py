"""What a step of the loop is: a function of the layers of one group that returns their new values and masks.

A step is a frozen dataclass with ``__call__``. It knows no block, device, file or progress bar.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..grids import OnGrid
from ..ops import bits
from ..ops.lazy import alike, stored
from ..threshold import cut_each, num_kept_each
from .gram import Moments

Choose = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]  # (scores, live) -> masks


@dataclass(frozen=True)
class Layers:
    """Layers that read the same inputs, as matrices (out, in).

    ``moments`` are those of the inputs, None if no token arrives. If there are several, the rows of every layer divide
    into as many parts of equal size: groups of a convolution, query, key and value, or experts (``are_experts``).
    """

    weights: Mapping[str, Tensor]
    moments: Sequence[Moments | None] = ()
    masks: Mapping[str, Tensor] | None = None  # of the weights that stay, where they are known before
    live: Mapping[str, Tensor] = field(default_factory=dict)  # of those that may; for a missing name all but zeros
    are_experts: bool = False
    is_routed: bool = False  # some tokens only are sent there


@dataclass(frozen=True)
class LayerRepair:
    """How well a step repaired one layer; errors are ``|W' X - W X_d|^2 / |W X_d|^2``, None if they are not known.

    X_d are the inputs in the dense model; with ``targets="own"`` X replaces X_d.
    """

    mask_error: float | None = None  # of the first mask with dense weights
    error: float | None = None
    iterations: int = 0  # of ADMM
    damping: float | None = None  # larger than asked for where the Gram matrix could not be factorised otherwise
    not_repaired: str | None = None  # the reason
    bits_error: float | None = None  # after the weights were put onto a grid of few bits
    only_rounded: str | None = None  # the reason, where no inputs say how to put them there


def mean_error(errors: Sequence[float | None], parts: Sequence["Change"]) -> float | None:
    """Mean over the parts of a layer, weighted by what they should give; None where no error is known."""
    known = [(error, part.energy) for error, part in zip(errors, parts, strict=True) if error is not None]
    total = sum(energy for _, energy in known) or 1.0
    return sum(error * energy for error, energy in known if energy) / total if known else None


@dataclass(frozen=True)
class Change:
    """The new mask and values of one layer (out, in)."""

    mask: Tensor  # True where the weight stays
    weight: Tensor | None = None  # in the dtype of the dense weight; None: the dense values under the mask
    energy: float = 0.0  # |W X_d|^2
    repair: LayerRepair = LayerRepair()
    bias: Tensor | None = None  # (out,): what to add to the bias, so that mean outputs stay
    units: Tensor | None = None  # (units,): True where a unit whose outputs the layer reads stays
    on_grid: OnGrid | None = None  # that the new values are on


class Step(Protocol):
    @property
    def targets(self) -> Literal["dense", "own"]:
        """Whether the step reads the dense model's inputs too, or only those of the compressed model."""

    def __call__(self, layers: Layers) -> dict[str, Change]: ...


def keep_all_but(num_drop: Mapping[str, int]) -> Choose:
    """All but the ``num_drop`` smallest of each layer; weights that are zero already count as dropped."""

    def choose(scores: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if next(iter(scores.values())).is_cuda:
            sources = alike([stored(name, score) for name, score in scores.items()])
            packed = {name: bits.pack(mask) for name, mask in live.items()}
            masks = cut_each(sources, num_drop, packed, num_kept_each(sources, packed))
            return {name: bits.unpack(masks[name], score.shape) for name, score in scores.items()}
        return {name: largest(score, score.numel() - num_drop[name], live.get(name)) for name, score in scores.items()}

    return choose


def largest(scores: Tensor, num_keep: int, live: Tensor | None) -> Tensor:
    """True at the ``num_keep`` largest of the live scores; of equal ones the last in order are kept."""
    if live is not None:
        scores, num_keep = torch.where(live, scores, -torch.inf), min(num_keep, num_true(live))
    flat, keep = scores.reshape(-1), torch.ones_like(scores, dtype=torch.bool)
    if num_keep <= 0:
        keep.fill_(False)
    elif num_keep < len(flat):
        threshold = _kth_smallest(flat, len(flat) - num_keep)
        torch.gt(scores, threshold, out=keep)
        if num_equal := num_keep - num_true(keep):
            keep.view(-1)[(flat == threshold).nonzero().squeeze(1)[-num_equal:]] = True
    return keep


def _kth_smallest(flat: Tensor, k: int) -> Tensor:
    """On the CPU by numpy, which takes a fifth of the time of torch's kthvalue."""
    if flat.is_cpu and flat.dtype in (torch.float32, torch.float64):
        return flat.new_tensor(np.partition(flat.numpy(), k - 1)[k - 1])
    return flat.kthvalue(k).values


def num_true(mask: Tensor) -> int:
    """On the CPU by numpy, which takes a tenth of the time of torch's sum."""
    return int(np.count_nonzero(mask.numpy()) if mask.is_cpu else mask.sum())
