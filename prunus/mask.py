"""Masks by name, kept as packed bits: look-up, overlap and a digest that needs no gather."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .ops import bits
from .ops.hash import mixed


class Masks(Mapping[str, Tensor]):
    """Boolean masks by name, True where the weight stays; unpacked when looked up.

    A name without bits is all True.
    """

    def __init__(self, weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.packed = packed

    def __getitem__(self, name: str) -> Tensor:
        weight = self.weights[name]
        if name not in self.packed:
            return torch.ones_like(weight, dtype=torch.bool)
        return bits.unpack(self.packed[name], weight.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __repr__(self) -> str:
        return f"Masks({', '.join(f'{name}: {tuple(weight.shape)}' for name, weight in self.weights.items())})"


def digest(masks: Mapping[str, Tensor]) -> str:
    """Hex string that is the same for the same masks, however they are stored.

    For each mask the sum of a hash of every kept position, modulo 2^64: a sum over parts of a
    tensor is the sum of the parts. Names and shapes are hashed with them.
    """
    sums = [(name, list(mask.shape), position_sum(mask)) for name, mask in sorted(masks.items())]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def position_sum(mask: Tensor) -> int:
    """``sum of hash(position)`` over the True elements, modulo 2^64."""
    flat, total = mask.reshape(-1), 0
    for start in range(0, len(flat), bits.PIECE):
        kept = flat[start : start + bits.PIECE].nonzero().squeeze(1) + start
        total += int(mixed(kept + 1).sum())
    return total % (1 << 64)


def overlap(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Jaccard index of the kept weights: 1 for equal masks, 0 for disjoint ones."""
    both = sum(int((first[name] & second[name]).sum()) for name in first)
    either = sum(int((first[name] | second[name]).sum()) for name in first)
    return both / either if either else 1.0


def packed_masks(masks: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Packed bits of boolean masks given by a user, checked against the weights they are for."""
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(
                f"there is a mask for {name!r}, which is no prunable weight; those are: {', '.join(weights)}"
            )
        if mask.shape != weights[name].shape:
            raise ValueError(
                f"the mask of {name} must have the weight's shape {tuple(weights[name].shape)}, got {tuple(mask.shape)}"
            )
    return {name: bits.pack(mask.to(weights[name].device).bool()) for name, mask in masks.items()}


def saved_bits(name: str, value: Any, weight: Tensor) -> Tensor:
    """Packed bits read back from a checkpoint, which may have cast them to the weight's dtype."""
    if not isinstance(value, Tensor) or value.shape != (bits.num_bytes(weight.numel()),):
        raise ValueError(
            f"the saved mask of {name} does not fit its shape {tuple(weight.shape)}; was the model changed?"
        )
    return value.to(device=weight.device, dtype=torch.uint8)
