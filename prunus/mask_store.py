"""The masks of a Pruner: packed bits in the optimizer's state, and the forms in which checkpoints keep them.

In memory a mask is one bit a weight, on each rank for its shard. ``torch.distributed.checkpoint`` reshards what
has a weight's shape and placement, so it is given zeros and ones, a byte a weight.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .masks import packed_masks, restore_bits
from .ops import bits
from .ops.compact import nonzero
from .ops.shard import Shard, together
from .ranks import Ranks, is_dtensor, local, placed_like

_STORES: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet["MaskStore"]] = weakref.WeakKeyDictionary()


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
        others = {id(p) for store in _STORES.get(optimizer, ()) for p in store.weights.values()}
        if twice := [name for name, p in weights.items() if id(p) in others]:
            raise ValueError(
                f"{twice[0]} is pruned by another Pruner of this optimizer already; call .remove() on the first, "
                "or leave its weights out by exclude="
            )

    def claim(self) -> None:
        """From now on no other store may have these weights in this optimizer."""
        _STORES.setdefault(self.optimizer, weakref.WeakSet()).add(self)

    def release(self) -> None:
        """Take the masks out of the optimizer's state, and leave the weights to other stores."""
        _STORES.get(self.optimizer, weakref.WeakSet()).discard(self)
        for parameter in self.weights.values():
            self.optimizer.state.get(parameter, {}).pop("mask", None)

    def packed(self, masks: Mapping[str, Tensor] | Literal["zeros"]) -> dict[str, Tensor]:
        """Packed bits of a user's masks, or of where the weights are not zero."""
        if isinstance(masks, Mapping):
            return together(self.holders, lambda: packed_masks(masks, self.weights, self.shards))
        if masks != "zeros":
            raise ValueError(f'masks must be boolean tensors by name or "zeros", got {masks!r}')
        return {name: bits.pack(local(p) != 0) for name, p in self.weights.items()}

    def count(self) -> None:
        """Set ``num_kept`` and ``densities`` from the bits; collective if weights are sharded."""
        kept = torch.tensor([self._num_kept_here(name) for name in self.weights])
        kept = self.holders.total(kept) if self.holders else kept
        self.num_kept = int(kept.sum())
        sizes = [p.numel() for p in self.weights.values()]
        self.densities = {
            name: num / size if size else 1.0
            for name, num, size in zip(self.weights, kept.tolist(), sizes, strict=True)
        }

    def _num_kept_here(self, name: str) -> int:
        """Weights that the mask keeps of this rank's shard, if this rank counts for it."""
        if name in self.shards and not self.shards[name].is_owner:
            return 0
        return int(bits.count(self.bits[name])) if name in self.bits else local(self.weights[name]).numel()

    def set(self, name: str, packed: Tensor) -> None:
        """Write in place where bits exist, so that a captured graph of the step sees the new mask."""
        if name in self.bits:
            self.bits[name].copy_(packed)
        else:
            self.bits[name] = packed.clone()
        self._put_into_state(name)

    def fill(self, names: Iterable[str]) -> None:
        """Give weights that have no bits a mask that keeps all."""
        for name in names:
            if name not in self.bits:
                self.set(name, self._full(name))

    def with_all(self, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These masks, and for all other weights that have one a mask that keeps all."""
        return {name: self._full(name) for name in self.bits} | dict(packed)

    def differs(self, packed: Mapping[str, Tensor]) -> bool:
        """Whether one of these masks is not the one that is stored."""
        return any(name not in self.bits or not torch.equal(self.bits[name], new) for name, new in packed.items())

    def num_not_zeroed(self) -> dict[str, int]:
        """Weights on this rank that are not zero although their mask prunes them, by name, where there are any."""
        if not self.bits:
            return {}
        odd = {name: nonzero(local(self.weights[name])) & ~mask for name, mask in self.bits.items()}
        device = next(iter(odd.values())).device
        numbers = torch.stack([bits.count(each).to(device) for each in odd.values()]).tolist()
        found = {}
        for (name, each), number in zip(odd.items(), numbers, strict=True):
            weight = local(self.weights[name])
            if number and (number := int(weight[bits.unpack(each, weight.shape)].count_nonzero())):  # -0.0 is zero
                found[name] = number
        return found

    def read_state(self) -> None:
        """Take the masks that came with the optimizer's state; loading cast them to the weights' dtype."""
        for name, parameter in self.weights.items():
            mask = self.optimizer.state.get(parameter, {}).get("mask")
            if mask is not None:
                self.set(name, restore_bits(name, mask, parameter, self.shards.get(name)))
            elif name in self.bits:
                self._put_into_state(name)
        self.count()

    def write_state(self) -> None:
        """Put the masks into the optimizer's state after a step, which may have created it."""
        for name in self.bits:
            self._put_into_state(name, has_stepped=self.weights[name].grad is not None)

    def before_save(self, *_: object) -> None:
        """Create the masks of weights that may be resharded: loading a checkpoint looks for what exists here."""
        self.fill(name for name, p in self.weights.items() if is_resharded(p))

    def to_save(self, unpacked: bool) -> dict[str, Tensor]:
        """Copies of the packed bits that exist, or all masks as zeros and ones in the weights' shapes."""
        if unpacked:
            return {name: unpack_like(weight, self.bits.get(name)) for name, weight in self.weights.items()}
        return {name: mask.clone() for name, mask in self.bits.items()}

    def _full(self, name: str) -> Tensor:
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
        saved = state["state"].get(index, {})
        if "mask" in saved and is_resharded(parameter):
            state["state"][index] = {**saved, "mask": unpack_like(parameter, saved["mask"])}


def load_masks(state: Mapping[str, Any], store: MaskStore, summed: Collection[str]) -> dict[str, Tensor]:
    """Packed masks from a Pruner's state, checked to fit these weights and the names of the movement sums."""
    weights, kinds = store.weights, {"step": int, "due": bool, "masks": dict, "movement": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise ValueError(f"this is not a Pruner's state: it lacks {', '.join(wrong)}")
    for kind in ("masks", "movement"):
        if unknown := set(state[kind]) - set(weights):
            raise ValueError(f"the state has {kind} of {min(unknown)}, which is no prunable weight of this model")
    if set(state["movement"]) != set(summed):
        raise ValueError("the state was saved with another score: one of the two is movement, which keeps sums")
    for name, sums in state["movement"].items():
        if not isinstance(sums, Tensor) or sums.shape != weights[name].shape:
            raise ValueError(f"the state's movement of {name} does not fit its shape {tuple(weights[name].shape)}")
    shards = store.shards
    return {name: restore_bits(name, mask, weights[name], shards.get(name)) for name, mask in state["masks"].items()}
