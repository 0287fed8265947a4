"""Masks that are held: packed bits in the optimizer's state, which weights and moments obey."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .mask import packed_masks, saved_bits
from .ops import bits
from .ops.part import Part, together
from .optim import AdamWPrune
from .saved import is_resharded
from .shard import Ranks, local

# torch's optimizers that add to a weight nothing but what its own gradient and state say
_NAMES = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES} | {AdamWPrune}

_HOLDING: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet["HeldMasks"]] = weakref.WeakKeyDictionary()


class HeldMasks:
    """One mask a weight, as packed bits of what this rank holds; none before there is one."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        ranks: Ranks | None,
        parts: Mapping[str, Part] | None,
    ) -> None:
        self.weights, self.optimizer, self.parts = weights, optimizer, parts
        self.holders = ranks if parts else None  # of parts, not of copies
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
            self.hold(together(self.holders, lambda: packed_masks(masks, self.weights, self.parts)), warm)
        else:
            self.take_over()
        if isinstance(self.optimizer, AdamWPrune):  # whose step reads masks at no cost: a graph of it must find them
            self._fill(name for name, p in self.weights.items() if p.is_cuda)
        self.count()
        _HOLDING.setdefault(self.optimizer, weakref.WeakSet()).add(self)

    def count(self) -> None:
        """Set ``num_kept`` from the bits."""
        counted = [(n, p) for n, p in self.weights.items() if not self.parts or self.parts[n].counts]
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
                self._set(name, saved_bits(name, saved, parameter, self.parts[name] if self.parts else None))
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
