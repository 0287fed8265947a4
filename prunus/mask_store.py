"""Masks that are held: packed bits in the optimizer's state, which weights and moments obey."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .masking import Movement
from .masks import packed_masks, saved_bits
from .ops import bits
from .ops.shard import Shard, together
from .optim import AdamWPrune
from .ranks import Ranks, is_dtensor, like, local, taken

# torch's optimizers that add to a weight nothing but what its own gradient and state say
_NAMES = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES} | {AdamWPrune}

Weights = Mapping[str, nn.Parameter]
_HOLDING: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet["MaskStore"]] = weakref.WeakKeyDictionary()


class MaskStore:
    """One mask a weight, as packed bits of what this rank holds; none before there is one."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        ranks: Ranks | None,
        shards: Mapping[str, Shard] | None,
    ) -> None:
        self.weights, self.optimizer, self.shards = weights, optimizer, shards
        self.holders = ranks if shards else None  # of shards, not of copies
        self.bits: dict[str, Tensor] = {}
        self.num_kept = 0  # prunable weights that the masks keep, on all ranks
        self.forget: Callable[[str], None] = lambda name: None  # told whose mask has changed

    def check_free(self) -> None:
        """Refuse weights that other masks hold in the same optimizer: both would prune, and overwrite each other."""
        taken = {id(p) for other in _HOLDING.get(self.optimizer, ()) for p in other.weights.values()}
        if twice := [name for name, p in self.weights.items() if id(p) in taken]:
            raise ValueError(
                f"{twice[0]} is pruned by another Pruner of this optimizer already; call .remove() on the first, "
                "or leave its weights out by exclude="
            )

    def adopt(self, masks: Mapping[str, Tensor] | Literal["zeros"] | None, warm: bool) -> None:
        """Begin with the masks given, with the zeros there are, or with those in the optimizer's state."""
        if isinstance(masks, str):
            if masks != "zeros":
                raise ValueError(f'masks must be boolean tensors by name or "zeros", got {masks!r}')
            self.hold({name: bits.pack(local(p) != 0) for name, p in self.weights.items()}, warm)
        elif masks is not None:
            self.hold(together(self.holders, lambda: packed_masks(masks, self.weights, self.shards)), warm)
        else:
            self.take_over()
        if isinstance(self.optimizer, AdamWPrune):  # whose step reads masks at no cost: a graph of it must find them
            self._fill(name for name, p in self.weights.items() if p.is_cuda)
        self.count()
        _HOLDING.setdefault(self.optimizer, weakref.WeakSet()).add(self)

    def count(self) -> None:
        """Set ``num_kept`` from the bits."""
        counted = [(n, p) for n, p in self.weights.items() if not self.shards or self.shards[n].is_owner]
        here = sum(int(bits.count(self.bits[n])) if n in self.bits else local(p).numel() for n, p in counted)
        self.num_kept = int(self.holders.total(torch.tensor([here]))) if self.holders else here

    def hold(self, packed: Mapping[str, Tensor], warm: bool) -> None:
        """Make these the masks and zero what they prune in the weights, and in optimizer state unless that is warm."""
        if isinstance(self.optimizer, torch.optim.LBFGS) and self._differ(packed):
            _forget_curvature(self.optimizer)
        for name, new in packed.items():
            parameter = self.weights[name]
            self._set(name, new)
            bits.zero_(local(parameter), new)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "mask" and isinstance(value, Tensor) and value.shape == parameter.shape and not warm:
                    bits.zero_(local(value), new)

    def load(self, packed: Mapping[str, Tensor], warm: bool) -> None:
        """Hold these and nothing else: a weight without one keeps all."""
        self.hold({name: self._full(name) for name in self.bits} | dict(packed), warm)
        self.count()

    def take_over(self, *_: object) -> None:
        """Take the masks that came with an optimizer's state; loading cast them to the weights' dtype."""
        for name, parameter in self.weights.items():
            saved = self.optimizer.state.get(parameter, {}).get("mask")
            if saved is not None:
                self._set(name, saved_bits(name, saved, parameter, self.shards[name] if self.shards else None))
            elif name in self.bits:
                self._store(name)
        self.count()

    def before_save(self, *_: object) -> None:
        """Have a mask for every weight that is resharded: who loads a checkpoint asks for what is there already."""
        self._fill(name for name, p in self.weights.items() if is_resharded(p))

    def store(self) -> None:
        """Have the masks in the optimizer's state after a step, which may have made it."""
        for name in self.bits:
            self._store(name, stepped=self.weights[name].grad is not None)

    @property
    def needs_zeroing(self) -> bool:
        """Whether the step may move a weight whose gradient and state are zero, as Muon's and LBFGS's do.

        The exact type is asked for: a subclass may step as it likes.
        """
        return type(self.optimizer) not in ELEMENTWISE

    @torch.no_grad()
    def zero_weights(self, *_: object) -> None:
        """Set what the masks prune to zero again."""
        for name, packed in self.bits.items():
            bits.zero_(local(self.weights[name]), packed)

    def release(self) -> None:
        """Take the masks out of the optimizer's state, and let others hold the weights."""
        _HOLDING.get(self.optimizer, weakref.WeakSet()).discard(self)
        for parameter in self.weights.values():
            self.optimizer.state.get(parameter, {}).pop("mask", None)

    def _differ(self, packed: Mapping[str, Tensor]) -> bool:
        return any(name not in self.bits or not torch.equal(self.bits[name], new) for name, new in packed.items())

    def _full(self, name: str) -> Tensor:
        part = local(self.weights[name])
        return bits.full(part.numel(), part.device)

    def _fill(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.bits:
                self._set(name, self._full(name))

    def _set(self, name: str, packed: Tensor) -> None:
        """Write in place where bits exist, so that a captured graph of the step sees the new mask."""
        if name in self.bits:
            self.bits[name].copy_(packed)
        else:
            self.bits[name] = packed.clone()
        self.forget(name)
        self._store(name)

    def _store(self, name: str, stepped: bool = False) -> None:
        """Keep the mask in the optimizer's state, so that whoever saves the one saves the other.

        Torch's optimizers take a parameter without state for a new one, so theirs comes first.
        """
        parameter = self.weights[name]
        if self.optimizer.state.get(parameter) or stepped or isinstance(self.optimizer, AdamWPrune):
            self.optimizer.state[parameter]["mask"] = self.bits[name]


def _forget_curvature(optimizer: Optimizer) -> None:
    """Let LBFGS begin anew: what it knows of the weights that were there would make it diverge without them."""
    for state in optimizer.state.values():
        if "n_iter" in state:
            state["n_iter"] = 0


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
    state: Mapping[str, Any], weights: Weights, movement: Movement | None, shards: Mapping[str, Shard] | None
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
    here = shards or {}
    return {name: saved_bits(name, mask, weights[name], here.get(name)) for name, mask in state["masks"].items()}


def taken_sums(sums: Mapping[str, Tensor], weights: Weights, shards: Mapping[str, Shard] | None) -> dict[str, Tensor]:
    """This rank's shards of movement sums."""
    return {name: taken(value, weights[name], (shards or {}).get(name)) for name, value in sums.items()}
