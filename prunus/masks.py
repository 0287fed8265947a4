"""Masks by name as packed bits: look-up, overlap, and a digest that gathers nothing."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .ops import bits
from .ops.hash import mixed
from .ops.shard import Shard
from .ranks import Ranks, gather, is_dtensor, is_replicated, local_block


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


def full_masks(masks: Mapping[str, Tensor], shards: Mapping[str, Shard] | None) -> dict[str, Tensor]:
    """Boolean masks of the full weights, gathered from all ranks; collective if there are ``shards``."""
    if shards is None:
        return dict(masks)
    return {name: gather(mask.to(torch.uint8), shards[name]).bool() for name, mask in masks.items()}


def digest(masks: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None) -> str:
    """Hex string that is equal for equal masks, held by one process or by many.

    It hashes names, shapes and for each mask the sum of a hash of every kept position, modulo 2^64: such
    sums add up over shards. Collective if there are ``shards``.
    """
    names = sorted(masks)
    if shards is None:
        shapes, sums = [list(masks[name].shape) for name in names], [position_sum(masks[name]) for name in names]
    else:
        shapes, sums = [list(shards[name].global_shape) for name in names], _sums_of_ranks(names, masks, shards)
    return hashlib.sha256(json.dumps(list(zip(names, shapes, sums, strict=True))).encode()).hexdigest()


def position_sum(mask: Tensor, shard: Shard | None = None) -> int:
    """``sum of hash(position)`` over the True elements, modulo 2^64, by their positions in the full tensor."""
    flat, total = mask.reshape(-1), 0
    for start in range(0, len(flat), bits.PIECE):
        kept = flat[start : start + bits.PIECE].nonzero().squeeze(1) + start
        total += int(mixed((shard.positions(kept) if shard else kept) + 1).sum())
    return total % (1 << 64)


def _sums_of_ranks(names: list[str], masks: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> list[int]:
    sums = [position_sum(masks[name], shards[name]) if shards[name].is_owner else 0 for name in names]
    halves = torch.tensor([(number >> 32, number & 0xFFFFFFFF) for number in sums])  # sums of halves do not overflow
    totals = shards[names[0]].ranks.total(halves).tolist()
    return [((high << 32) + low) % (1 << 64) for high, low in totals]


def check_copies(ranks: Ranks | None, weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> None:
    """Raise a ValueError on all ranks if ranks that hold copies of a weight found different masks for it."""
    if ranks is None:
        return
    prints = dict(zip(packed, torch.stack([fingerprint(mask) for mask in packed.values()]).tolist(), strict=True))

    def folded(names: list[str]) -> int:
        return int.from_bytes(hashlib.sha256(json.dumps([prints[n] for n in names]).encode()).digest()[:7])

    axes = range(len(ranks.copies))
    if not ranks.differ([folded([name for name in packed if is_replicated(weights[name], axis)]) for axis in axes]):
        return
    whose = ranks.each(folded(list(packed)))
    odd = [rank for rank, number in enumerate(whose) if whose.count(number) == 1]
    where = f" (rank {', '.join(map(str, odd))})" if 0 < len(odd) < len(whose) else ""
    raise ValueError(
        f"ranks that hold copies of the weights found different masks{where}: their weights or optimizer states "
        "have drifted apart, or they train different models: then pass group= the ranks that train one; "
        "nothing was pruned"
    )


def fingerprint(packed: Tensor) -> Tensor:
    """A 64-bit hash of packed bits, on their device: the sum of a hash of each word and its position."""
    words = torch.zeros(-(-len(packed) // 8), dtype=torch.int64, device=packed.device)
    words.view(torch.uint8)[: len(packed)] = packed
    return mixed(words + mixed(torch.arange(1, len(words) + 1, device=words.device))).sum()


def overlap(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Jaccard index of the kept weights: 1 for equal masks, 0 for disjoint ones."""
    both = sum(int((first[name] & second[name]).sum()) for name in first)
    either = sum(int((first[name] | second[name]).sum()) for name in first)
    return both / either if either else 1.0


def packed_masks(
    masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None
) -> dict[str, Tensor]:
    """Packed bits of a user's boolean masks, which must fit the weights."""
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(
                f"there is a mask for {name!r}, which is no prunable weight; those are: {', '.join(weights)}"
            )
        if mask.shape != weights[name].shape:
            raise ValueError(
                f"the mask of {name} must have the weight's shape {tuple(weights[name].shape)}, got {tuple(mask.shape)}"
            )
    blocks = {name: local_block(mask, weights[name], shards[name] if shards else None) for name, mask in masks.items()}
    return {name: bits.pack(block.to(weights[name].device).bool()) for name, block in blocks.items()}


def restore_bits(name: str, value: Any, weight: Tensor, shard: Shard | None = None) -> Tensor:
    """This rank's packed bits from a checkpoint, which may have cast them to the weight's dtype.

    A checkpoint holds packed bits of the full weight or of this rank's shard, or zeros and ones in the weight's
    shape, as a tensor or as a DTensor of any placement.
    """
    if isinstance(value, Tensor) and value.shape == weight.shape:
        block = local_block(value, weight, shard).to(weight.device)
        if not ((block == 0) | (block == 1)).all():
            raise ValueError(f"the saved mask of {name} has other values than 0 and 1")
        return bits.pack(block != 0)
    if isinstance(value, Tensor) and not is_dtensor(value):
        packed = value.to(device=weight.device, dtype=torch.uint8)
        if shard and value.shape == (bits.num_bytes(shard.global_numel),):
            return bits.pack(shard.of(bits.unpack(packed, shard.global_shape)))
        if value.shape == (bits.num_bytes(math.prod(shard.shape) if shard else weight.numel()),):
            return packed
    raise ValueError(f"the saved mask of {name} does not fit its shape {tuple(weight.shape)}; was the model changed?")
