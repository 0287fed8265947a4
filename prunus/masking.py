"""Gradients of pruned weights count as zero, whatever optimizer reads them."""

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .ops import bits
from .ranks import local, waits_for_copy


class Movement:
    """``-sum lr g w`` of each weight over the steps so far, with the gradient as the update sees it."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in weights.items()}
        self._names = {id(p): name for name, p in weights.items()}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        for name, values in sums.items():
            local(self.sums[name]).copy_(values)

    def add(self, parameter: Tensor, grad: Tensor, lr: float) -> None:
        if (name := self._names.get(id(parameter))) is not None:
            local(self.sums[name]).addcmul_(local(grad), local(parameter), value=-lr)

    def add_all(self, optimizer: Optimizer) -> None:
        """Add the update that ``optimizer`` is about to make, without a GradScaler's factor."""
        if is_skipped(optimizer):
            return
        grad_scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if grad_scale is None else 1 / grad_scale.item()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.add(parameter, parameter.grad, float(group["lr"]) * scale)


class MaskedGradients:
    """Masks gradients by hooks: as they are accumulated, so that clipping sees them masked, and before the step.

    The second time costs nothing where nothing has written to the gradient since the first. (A
    write through ``grad.data`` hides itself from autograd, and from this.) Gradients that FSDP2 still copies
    to the CPU when it accumulates them are masked before the step alone.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], packed: Mapping[str, Tensor], is_off: Callable[[], bool]
    ) -> None:
        self.weights, self.packed, self.is_off = weights, packed, is_off
        self._seen: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # gradients masked, and their version then

    def attach(self, optimizer: Optimizer, movement: Movement | None) -> list[RemovableHandle]:
        """Register the hooks; ``movement`` is told of each update."""

        @torch.no_grad()
        def before_update() -> None:
            self.mask_all()
            if movement:
                movement.add_all(optimizer)

        def before_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                return before_update()
            return (args[0],), {**kwargs, "closure": _followed(closure, before_update)}

        handles = [optimizer.register_step_pre_hook(before_step)]  # which keeps this alive
        # a tensor's hook that held its tensor would never be freed: the collector does not see through it
        mask = weakref.WeakMethod(self.mask)
        for name, parameter in self.weights.items():
            if not waits_for_copy(parameter):
                handles.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: call(mask, name)))
        return handles

    def mask_all(self) -> None:
        for name in self.packed:
            self.mask(name)

    @torch.no_grad()
    def mask(self, name: str) -> None:
        grad, seen = self.weights[name].grad, self._seen.get(name)
        if grad is None or name not in self.packed or self.is_off():
            return
        grad = local(grad)
        if seen is None or seen[0]() is not grad or seen[1] != grad._version:
            bits.zero_(grad, self.packed[name])
            self._seen[name] = weakref.ref(grad), grad._version

    def forget(self, name: str) -> None:
        """The mask of ``name`` has changed."""
        self._seen.pop(name, None)


def call(method: "weakref.WeakMethod[Any]", name: str) -> None:
    if alive := method():
        alive(name)


def check_captured(weights: Collection[str], packed: Collection[str], regrowing: bool) -> None:
    """Refuse a graph of a step that would know nothing of the masks, or that the ramp's end makes wrong."""
    if any(name not in packed for name in weights):
        raise ValueError(
            "a graph of this step would not hold the masks, since there are none yet; "
            "capture it after the first event, or use AdamWPrune"
        )
    if regrowing:
        raise ValueError(
            "a graph of this step would not mask gradients after the ramp; with regrow, capture it after that"
        )


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether a GradScaler lets a fused optimizer skip this step because of infinite gradients."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose step is taken, without wrappers such as Accelerate's, which know no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_initialising(optimizer: Optimizer) -> bool:
    """Whether this is no step but ``torch.distributed.checkpoint`` making room for a state: no rate, no gradient."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    if any((isinstance(rate, Tensor) and rate.is_cuda) or float(rate) for rate in rates):
        return False
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    return not any(bool(local(grad).any()) for grad in grads if grad is not None)


def _followed(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        loss = closure()
        then()
        return loss

    return both
