"""A Pruner's state as it is saved, and masks in an optimizer's state as whoever saves that needs them.

In memory a mask is one bit a weight, on each rank those of its part. ``torch.distributed.checkpoint`` reshards
what has a weight's shape and placement, so that is what it is handed: zeros and ones, a byte a weight.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .gradients import Movement
from .mask import saved_bits
from .ops import bits
from .ops.part import Part
from .shard import is_dtensor, like, local, taken

Weights = Mapping[str, nn.Parameter]


def unpacked(weight: Tensor, packed: Tensor | None) -> Tensor:
    """A mask as zeros and ones in the weight's shape and placement; all ones where there are no bits yet."""
    here = local(weight)
    keep = torch.ones_like(here, dtype=torch.bool) if packed is None else bits.unpack(packed, here.shape)
    return like(keep.to(torch.uint8), weight)


def saved_masks(weights: Weights, packed: Mapping[str, Tensor], whole: bool) -> dict[str, Tensor]:
    """Masks to save: packed bits of those that exist, or with ``whole`` all of them in their weights' shapes."""
    if whole:
        return {name: unpacked(weight, packed.get(name)) for name, weight in weights.items()}
    return {name: mask.clone() for name, mask in packed.items()}


def is_resharded(weight: Tensor) -> bool:
    """Whether a checkpoint of this weight may be loaded by another number of ranks."""
    return is_dtensor(weight) or (dist.is_available() and dist.is_initialized())


def reshard_masks(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put masks that can be resharded into an optimizer's state dict in place of packed bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        kept = state["state"].get(index, {})
        if "mask" in kept and is_resharded(parameter):
            state["state"][index] = {**kept, "mask": unpacked(parameter, kept["mask"])}


def checked_masks(
    state: Mapping[str, Any], weights: Weights, movement: Movement | None, parts: Mapping[str, Part] | None
) -> dict[str, Tensor]:
    """Packed masks of a state that fits these weights and sums; else one line and nothing changed."""
    kinds = {"step": int, "due": bool, "masks": dict, "movement": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise ValueError(f"this is not a Pruner's state: it lacks {', '.join(wrong)}")
    for kind in ("masks", "movement"):
        if unknown := set(state[kind]) - set(weights):
            raise ValueError(f"the state has {kind} of {min(unknown)}, which is no prunable weight of this model")
    if set(state["movement"]) != set(movement.sums if movement else ()):
        raise ValueError("the state was saved with another score: one of the two is movement, which keeps sums")
    for name, sums in state["movement"].items():
        if not isinstance(sums, Tensor) or sums.shape != weights[name].shape:
            raise ValueError(f"the state's movement of {name} does not fit its shape {tuple(weights[name].shape)}")
    here = parts or {}
    return {name: saved_bits(name, mask, weights[name], here.get(name)) for name, mask in state["masks"].items()}


def taken_sums(sums: Mapping[str, Tensor], weights: Weights, parts: Mapping[str, Part] | None) -> dict[str, Tensor]:
    """This rank's parts of movement sums."""
    return {name: taken(value, weights[name], (parts or {}).get(name)) for name, value in sums.items()}
