"""Masks as packed bits by name: look-up, digest, and the store that keeps a Pruner's in the optimizer's state.

In memory a mask is one bit a weight, on each rank for its shard. ``torch.distributed.checkpoint`` reshards what
has a weight's shape and placement, so it is given zeros and ones, a byte a weight.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .ops import bits
from .ops.compact import nonzero
from .ops.formula import mixed
from .ops.shard import Shard, together
from .ranks import Ranks, is_dtensor, is_replicated, local, local_block, placed_like


class Masks(Mapping[str, Tensor]):
    """Boolean masks by name, True where the weight stays, unpacked when looked up; all True for a name without bits."""

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


def digest(masks: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None) -> str:
    """Hex string, equal for equal masks, by sums of hashes of kept positions: they add up over ``shards``."""
    names = sorted(masks)
    if shards is None:
        shapes, sums = [list(masks[name].shape) for name in names], [position_sum(masks[name]) for name in names]
    else:
        shapes = [list(shards[name].global_shape) for name in names]
        sums = [position_sum(masks[name], shards[name]) if shards[name].is_owner else 0 for name in names]
        halves = torch.tensor([(number >> 32, number & 0xFFFFFFFF) for number in sums])  # their sums do not overflow
        totals = shards[names[0]].ranks.total(halves).tolist()
        sums = [((high << 32) + low) % (1 << 64) for high, low in totals]
    return hashlib.sha256(json.dumps(list(zip(names, shapes, sums, strict=True))).encode()).hexdigest()


def position_sum(mask: Tensor, shard: Shard | None = None) -> int:
    """``sum of hash(position)`` over the True elements, modulo 2^64, by their positions in the full tensor."""
    flat, total = mask.reshape(-1), 0
    for start in range(0, len(flat), bits.CHUNK):
        kept = flat[start : start + bits.CHUNK].nonzero().squeeze(1) + start
        total += int(mixed((shard.positions(kept) if shard else kept) + 1).sum())
    return total % (1 << 64)


def check_copies(ranks: Ranks | None, weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> None:
    """Raise a ValueError on all ranks if ranks that hold copies of a weight found different masks for it."""
    if ranks is None:
        return
    hashes = dict(zip(packed, torch.stack([_hash_of_bits(mask) for mask in packed.values()]).tolist(), strict=True))

    def folded(names: list[str]) -> int:
        return int.from_bytes(hashlib.sha256(json.dumps([hashes[n] for n in names]).encode()).digest()[:7])

    axes = range(len(ranks.copies))
    if not ranks.differ([folded([name for name in packed if is_replicated(weights[name], axis)]) for axis in axes]):
        return
    whose = ranks.each(folded(list(packed)))
    odd = [rank for rank, number in enumerate(whose) if whose.count(number) == 1]
    where = f" (rank {', '.join(map(str, odd))})" if 0 < len(odd) < len(whose) else ""
    problem = f"ranks with copies of the same weights found different masks{where}, and nothing was pruned"
    cause = "their weights or optimizer states have drifted apart, or they train different models"
    raise ValueError(f"{problem}: {cause}; in that case pass group=, the ranks that train one model")


def _hash_of_bits(packed: Tensor) -> Tensor:
    """A 64-bit hash of packed bits, on their device: the sum of a hash of each word and its position."""
    words = torch.zeros(-(-len(packed) // 8), dtype=torch.int64, device=packed.device)
    words.view(torch.uint8)[: len(packed)] = packed
    return mixed(words + mixed(torch.arange(1, len(words) + 1, device=words.device))).sum()


def packed_masks(
    masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None
) -> dict[str, Tensor]:
    """Packed bits of a user's boolean masks, which must fit the weights."""
    for name, mask in masks.items():
        if name not in weights:
            problem = f"there is a mask for {name!r}, which is not a prunable weight"
            raise ValueError(f"{problem}; prunable weights are: {', '.join(weights)}")
        if mask.shape != weights[name].shape:
            raise ValueError(f"the mask of {name} needs shape {tuple(weights[name].shape)}, got {tuple(mask.shape)}")
    blocks = {name: local_block(mask, weights[name], shards[name] if shards else None) for name, mask in masks.items()}
    return {name: bits.pack(block.to(weights[name].device).bool()) for name, block in blocks.items()}


def restore_bits(name: str, value: Any, weight: Tensor, shard: Shard | None = None) -> Tensor:
    """This rank's packed bits from a checkpoint's: packed or in the weight's shape, of the weight or of a shard."""
    if isinstance(value, Tensor) and value.shape == weight.shape:
        block = local_block(value, weight, shard).to(weight.device)
        if not ((block == 0) | (block == 1)).all():
            raise ValueError(f"the saved mask of {name} has values other than 0 and 1")
        return bits.pack(block != 0)
    if isinstance(value, Tensor) and not is_dtensor(value):
        packed = value.to(device=weight.device, dtype=torch.uint8)
        if shard and value.shape == (bits.num_bytes(shard.global_numel),):
            return bits.pack(shard.of(bits.unpack(packed, shard.global_shape)))
        if value.shape == (bits.num_bytes(math.prod(shard.shape) if shard else weight.numel()),):
            return packed
    raise ValueError(f"the saved mask of {name} does not fit its shape {tuple(weight.shape)}; has the model changed?")


class MaskStore:
    """One mask for each weight, as packed bits of what this rank holds; a weight without bits keeps all.

    Bits are also put into the optimizer's state, so that whoever saves the one saves the other. Torch's
    optimizers take a parameter without state for a new one, so theirs comes first unless ``in_empty_state``.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        ranks: Ranks | None,
        shards: Mapping[str, Shard] | None,
        *,
        in_empty_state: bool,
    ) -> None:
        self.weights, self.optimizer, self.shards = weights, optimizer, shards or {}
        self.holders = ranks if shards else None  # of shards, not of copies
        self.bits: dict[str, Tensor] = {}
        self.num_kept = 0  # prunable weights that the masks keep, on all ranks
        self.densities: dict[str, float] = {}  # fraction of each weight that its mask keeps, on all ranks, as counted
        self._in_empty_state = in_empty_state

    def packed(self, masks: Mapping[str, Tensor] | Literal["zeros"]) -> dict[str, Tensor]:
        """Packed bits of a user's masks, or of where the weights are not zero."""
        if isinstance(masks, Mapping):
            return together(self.holders, lambda: packed_masks(masks, self.weights, self.shards))
        if masks != "zeros":
            raise ValueError(f'masks must be boolean tensors by name or "zeros", got {masks!r}')
        return {name: bits.pack(local(p) != 0) for name, p in self.weights.items()}

    def count(self) -> None:
        """Set ``num_kept`` and ``densities`` from the bits; collective if weights are sharded."""
        here = {name: local(weight).numel() for name, weight in self.weights.items()}
        masked = [name for name in here if name in self.bits]
        counts = bits.count_each([self.bits[name] for name in masked], [here[name] for name in masked])
        here |= dict(zip(masked, counts, strict=True))
        numbers = [num if n not in self.shards or self.shards[n].is_owner else 0 for n, num in here.items()]
        if self.holders:
            numbers = self.holders.total(torch.tensor(numbers)).tolist()
        self.num_kept = sum(numbers)
        sizes = [(name, weight.numel()) for name, weight in self.weights.items()]
        self.densities = {
            name: number / size if size else 1.0 for (name, size), number in zip(sizes, numbers, strict=True)
        }

    def set(self, name: str, packed: Tensor) -> None:
        """Write in place where bits exist, so that a captured graph of the step sees the new mask."""
        self.bits[name] = self.bits[name].copy_(packed) if name in self.bits else packed.clone()
        self._put_into_state(name)

    def fill(self, names: Iterable[str]) -> None:
        """Give weights that have no bits a mask that keeps all."""
        for name in names:
            if name not in self.bits:
                self.set(name, self.full(name))

    def share_of_unmasked_zeros(self, most: int) -> float:
        """The share of zeros in no mask, among the first ``most`` (a multiple of 8) of weights that are not all 0."""
        num_zeros = num = 0
        for name, weight in self.weights.items():
            part = local(weight).reshape(-1)[:most]
            is_zero = part == 0
            if not bool(is_zero.all()):
                kept = bits.unpack(self.bits[name][: most // 8], part.shape) if name in self.bits else True
                num_zeros, num = num_zeros + int((is_zero & kept).sum()), num + part.numel()
        return num_zeros / max(1, num)

    def num_not_zeroed(self, most: int | None = None, masks: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """By weight here, how many of the first ``most`` (a multiple of 8) are pruned by a mask but not zero."""
        masks = self.bits if masks is None else masks
        if not masks:
            return {}
        weights = {name: local(self.weights[name]).reshape(-1)[:most] for name in masks}
        odd = {name: nonzero(weight) & ~masks[name][: most and most // 8] for name, weight in weights.items()}
        device = next(iter(odd.values())).device
        numbers = torch.stack([bits.count(each).to(device) for each in odd.values()]).tolist()
        not_zero = {}
        for (name, weight), number in zip(weights.items(), numbers, strict=True):
            if number and (number := int(weight[bits.unpack(odd[name], weight.shape)].count_nonzero())):  # -0.0 is zero
                not_zero[name] = number
        return not_zero

    def read_state(self) -> bool:
        """Take the masks that came with the optimizer's state, if any; loading cast them to the weights' dtype."""
        has_found = False
        for name, parameter in self.weights.items():
            mask = self.optimizer.state.get(parameter, {}).get("mask")
            if mask is not None:
                has_found = True
                self.set(name, restore_bits(name, mask, parameter, self.shards.get(name)))
            elif name in self.bits:
                self._put_into_state(name)
        self.count()
        return has_found

    def write_state(self) -> None:
        """Put the masks into the optimizer's state after a step, which may have created it."""
        for name in self.bits:
            self._put_into_state(name, has_stepped=self.weights[name].grad is not None)

    def before_save(self, *_: object) -> None:
        """Create the masks of weights that may be resharded: loading a checkpoint looks for what exists here."""
        self.fill(name for name, p in self.weights.items() if is_resharded(p))

    def full(self, name: str) -> Tensor:
        block = local(self.weights[name])
        return bits.full(block.numel(), block.device)

    def _put_into_state(self, name: str, has_stepped: bool = False) -> None:
        parameter = self.weights[name]
        if self.optimizer.state.get(parameter) or has_stepped or self._in_empty_state:
            self.optimizer.state[parameter]["mask"] = self.bits[name]


def unpack_like(weight: Tensor, packed: Tensor | None) -> Tensor:
    """A mask as zeros and ones in the weight's shape and placement; all ones where there are no bits yet."""
    block = local(weight)
    keep = torch.ones_like(block, dtype=torch.bool) if packed is None else bits.unpack(packed, block.shape)
    return placed_like(keep.to(torch.uint8), weight)


def is_resharded(weight: Tensor) -> bool:
    """Whether a checkpoint of this weight may be loaded by another number of ranks."""
    return is_dtensor(weight) or (dist.is_available() and dist.is_initialized())


def unpack_saved_masks(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Replace packed bits in an optimizer's state dict by masks that can be resharded, where that may happen."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        own = state["state"].get(index, {})
        if "mask" in own and is_resharded(parameter):
            state["state"][index] = {**own, "mask": unpack_like(parameter, own["mask"])}


def load_masks(state: Mapping[str, Any], store: MaskStore, movement: Collection[str]) -> dict[str, Tensor]:
    """Packed masks from a Pruner's state, checked to fit these weights; ``movement`` names those that have sums."""
    weights, kinds = store.weights, {"step": int, "due": bool, "masks": dict, "movement": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise ValueError(f"this is not a Pruner's state: it lacks {', '.join(wrong)}")
    for kind in ("masks", "movement"):
        if unknown := set(state[kind]) - set(weights):
            raise ValueError(f"the state has {kind} of {min(unknown)}, which is not a prunable weight of this model")
    if set(state["movement"]) != set(movement):
        raise ValueError("the state was saved with another score: one of the two has movement sums, the other does not")
    for name, sums in state["movement"].items():
        if not isinstance(sums, Tensor) or sums.shape != weights[name].shape:
            raise ValueError(f"the state's movement of {name} does not fit its shape {tuple(weights[name].shape)}")
    masks = state["masks"].items()
    return {name: restore_bits(name, mask, weights[name], store.shards.get(name)) for name, mask in masks}
