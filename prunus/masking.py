"""How pruned weights stay zero: inside the optimizer's step, by masked gradients, or by zeroing after each step."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .masks import MaskStore
from .ops import bits
from .optim import AdamWPrune, before_update
from .ranks import is_offloaded, local
from .statistics import Movement

# torch's optimizers whose update of an element depends on its own gradient and state alone
_NAMES = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES}


@dataclass
class Progress:
    """How far a training is; before step ``regrow_until`` pruned weights may come back."""

    regrow_until: float | None = None
    step: int = 0
    is_due: bool = False  # an event was put off, or failed: it follows the next step

    @property
    def is_regrowing(self) -> bool:
        """Whether pruned weights may still come back, so that their gradients and moments are kept."""
        return self.regrow_until is not None and (self.is_due or self.step < self.regrow_until)


class Masking(ABC):
    """Keeps pruned weights and their state at zero; while they may come back, the weights alone, after each step."""

    def __init__(self, store: MaskStore, progress: Progress, movement: Movement | None) -> None:
        self.store, self.optimizer = store, store.optimizer
        self.progress, self.movement = progress, movement
        self._hooks = ExitStack()
        self._masked: dict[str, tuple[weakref.ref[Tensor], int, int]] = {}  # gradient, its version, the mask's version

    @abstractmethod
    def attach(self) -> None:
        """Hook into the optimizer's step."""

    def detach(self) -> None:
        self._hooks.close()

    def start(self, masks: Mapping[str, Tensor] | Literal["zeros"] | None) -> bool:
        """Begin with these masks, the zeros of the weights or (None) those in the optimizer: True if it had some."""
        check_state(self.store.weights, self.optimizer)
        if masks is None:
            return self.store.read_state()
        self.apply_(self.store.packed(masks))
        self.store.count()
        return False

    @torch.no_grad()
    def apply_(self, packed: Mapping[str, Tensor]) -> None:
        """Make these the masks, and zero what they prune in weights and, unless it may come back, in their state."""
        known = self.store.bits
        if isinstance(self.optimizer, torch.optim.LBFGS) and any(
            name not in known or not torch.equal(known[name], mask) for name, mask in packed.items()
        ):
            for state in self.optimizer.state.values():
                if "n_iter" in state:
                    state["n_iter"] = 0  # begin anew: the curvature of weights that are gone would make it diverge
        pairs = []
        for name, mask in packed.items():
            parameter = self.store.weights[name]
            self.store.set(name, mask)
            state = {} if self.progress.is_regrowing else _states(parameter, self.optimizer)
            pairs += [(local(tensor), mask) for tensor in (parameter, *state.values())]
        bits.zero_each_(pairs)

    def mask_gradients(self) -> None:
        for name in self.store.bits:
            self.mask_gradient(name)

    @torch.no_grad()
    def mask_gradient(self, name: str) -> None:
        """Zero the gradient of the pruned elements, unless autograd has counted no write to it since then."""
        mask = self.store.bits.get(name)
        if mask is None or self.progress.is_regrowing or (grad := self.store.weights[name].grad) is None:
            return
        grad, known = local(grad), self._masked.get(name)
        if known is None or known[0]() is not grad or known[1:] != (grad._version, mask._version):
            bits.zero_(grad, mask)
            self._masked[name] = weakref.ref(grad), grad._version, mask._version

    def check_captured(self, masks_change: bool) -> None:
        """Refuse a graph of a step that would leave out masks which come later, or never mask gradients."""
        if masks_change and any(name not in self.store.bits for name in self.store.weights):
            problem = "a graph of this step would miss the masks, which do not exist yet"
            raise ValueError(f"{problem}; capture it after the first event, or use AdamWPrune")
        if self.progress.is_regrowing:
            raise ValueError("a graph of this step would not mask gradients after the ramp; capture it after the ramp")

    def _zero_after_steps(self, always: bool) -> None:
        """Zero pruned weights after each step: always, or while they may come back."""

        @torch.no_grad()
        def after_step(*_: object) -> None:
            for name, mask in self.store.bits.items() if always or self.progress.is_regrowing else ():
                bits.zero_(local(self.store.weights[name]), mask)

        if always or self.progress.regrow_until is not None:
            self._hooks.callback(self.optimizer.register_step_post_hook(after_step).remove)


class InsideStep(Masking):
    """``AdamWPrune`` masks gradients in its own step, by the masks that it finds in its state."""

    optimizer: AdamWPrune  # pyrefly: ignore[bad-override-mutable-attribute]

    def attach(self) -> None:
        optimizer, weights = self.optimizer, frozenset(self.store.weights.values())
        self.store.fill(name for name, p in self.store.weights.items() if p.is_cuda)  # a graph must find its masks
        names = {p: name for name, p in self.store.weights.items()}

        def put_mask(parameter: nn.Parameter) -> None:
            if (name := names.get(parameter)) in self.store.bits:
                optimizer.state[parameter]["mask"] = self.store.bits[name]

        watches = (self.movement.add,) if self.movement else ()
        optimizer.on_new_state += (put_mask,)
        optimizer.watch += watches

        def stop_watching() -> None:
            optimizer.on_new_state = tuple(put for put in optimizer.on_new_state if put != put_mask)
            optimizer.watch = tuple(watch for watch in optimizer.watch if watch not in watches)

        self._hooks.callback(stop_watching)

        def before_step(*_: object) -> None:
            optimizer.unmasked |= weights if self.progress.is_regrowing else frozenset()

        def after_step(*_: object) -> None:
            optimizer.unmasked -= weights

        if self.progress.regrow_until is not None:
            self._hooks.callback(optimizer.register_step_pre_hook(before_step).remove)
            self._hooks.callback(optimizer.register_step_post_hook(after_step).remove)
        self._zero_after_steps(always=type(optimizer) is not AdamWPrune)  # a subclass may step otherwise


class ByHooks(Masking):
    """Gradients are masked as they are accumulated, so that clipping sees them masked, and again before the step.

    That is enough for optimizers that move no element whose gradient and state are zero. With those that mix the
    elements of a weight, as Muon and LBFGS do, and with unknown ones, weights are zeroed after each step too.
    Gradients that FSDP2 still copies to the CPU when it accumulates them are masked before the step alone.
    """

    def attach(self) -> None:
        # torch's own are known by exact type: a subclass may step otherwise
        self._zero_after_steps(always=type(self.optimizer) not in ELEMENTWISE)

        @torch.no_grad()
        def mask_and_add(stepping: Optimizer) -> None:
            self.mask_gradients()
            if self.movement:
                self.movement.add_all(stepping)

        self._hooks.callback(self.optimizer.register_step_pre_hook(before_update(mask_and_add)).remove)
        # a tensor's hook that held its tensor would never be freed: the garbage collector does not see through it
        weak = weakref.WeakMethod(self.mask_gradient)

        def accumulated(name: str) -> None:
            if mask_gradient := weak():
                mask_gradient(name)

        for name, parameter in self.store.weights.items():
            if not is_offloaded(parameter):
                handle = parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated(name))
                self._hooks.callback(handle.remove)


def check_state(weights: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Refuse state of a weight's shape that is not plain numbers: in 8-bit codes 0 seldom stands for zero."""
    for name, parameter in weights.items():
        for key, value in _states(parameter, optimizer).items():
            value = local(value)
            is_plain = type(value) in (Tensor, nn.Parameter)
            if not is_plain or not value.is_floating_point():
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {value.dtype if is_plain else type(value)}, "
                    "which cannot be zeroed where weights are pruned; use AdamW, AdamWPrune or another optimizer with "
                    "plain floating-point state"
                )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's, whose steps call no hooks of their own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_initialising(optimizer: Optimizer) -> bool:
    """Whether this step is ``torch.distributed.checkpoint`` creating the state: every lr and gradient is zero."""
    lrs = [group.get("lr", 1.0) for group in optimizer.param_groups]
    if any((isinstance(lr, Tensor) and lr.is_cuda) or float(lr) for lr in lrs):
        return False
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    return not any(bool(local(grad).any()) for grad in grads if grad is not None)


def has_trained(weights: Mapping[str, nn.Parameter], optimizer: Optimizer) -> bool:
    """Whether the optimizer's state of these weights comes from steps; plain SGD keeps none."""
    states = (value for parameter in weights.values() for value in _states(parameter, optimizer).values())
    return any(group.get("num_steps") for group in optimizer.param_groups) or any(bool(local(v).any()) for v in states)


def _states(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """Optimizer state of the parameter's shape."""
    state = optimizer.state.get(parameter, {})
    tensors = {key: value for key, value in state.items() if key != "mask" and isinstance(value, Tensor)}
    return {key: value for key, value in tensors.items() if value.shape == parameter.shape}
