"""Learning rates for what is left: a weight matrix that lost most of its weights takes larger steps.

With a fraction d of its weights left a matrix adds up fewer terms, and with the rate of the dense model its outputs
move only d times as far a step. A factor ``d^(-power)`` on its rate makes up for some of that.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .eligible import eligible
from .ops.machine import is_capturing
from .optim import AdamWPrune, before_update
from .ranks import local

UNFIT = {
    "LBFGS": "takes one group only",
    "Rprop": "does not step by its learning rate",
    "Adafactor": "limits its steps by its own rule",
    "ASGD": "steps by a rate that it derived one step before",
}
COUPLED = {"Adadelta", "Adagrad", "Adamax", "RMSprop", "SGD"}  # weight decay is part of the gradient
DECOUPLED = {"AdamW", "Muon"}  # the weight shrinks by lr * weight_decay
BY_GROUP = {"Adam", "NAdam", "RAdam"}  # as the group's decoupled_weight_decay says


@dataclass(frozen=True)
class Rate:
    """Multiplies the learning rate of a weight matrix of density d by ``max(d, floor)^(-power)``.

    Decoupled weight decay keeps the rate without this factor. ``power=0`` changes nothing. Power 1, the rule for
    sparse layers of https://arxiv.org/abs/2405.15743, did best or as well as any in docs/evidence/results.md.
    """

    power: float = 1.0
    floor: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.power, int | float) or not 0 <= self.power <= 2:
            problem = f"power must lie in [0, 2], got {self.power!r}"
            raise ValueError(f"{problem}; 0 leaves learning rates alone, 1 divides them by the density")
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor, the lowest density that counts, must lie in (0, 1], got {self.floor}")

    def __call__(self, density: float) -> float:
        return max(density, self.floor) ** -self.power


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each prunable weight, one for other matrices, one for the rest.

    The rest, norms and biases, gets no weight decay. ``Pruner(..., rate=Rate())`` needs these groups with optimizers
    other than torch's and ``AdamWPrune``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"parameter_groups takes the model, got {type(model).__name__}")
    alone = [weight.parameter for weight in eligible(model, include, exclude, only).weights]
    taken = {id(p) for p in alone}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [{"params": [p], "weight_decay": weight_decay} for p in alone]
    for params, decay in (([p for p in rest if p.ndim > 1], weight_decay), ([p for p in rest if p.ndim < 2], 0.0)):
        if params:
            groups.append({"params": params, "weight_decay": decay})
    return groups


class StepLrFactors:
    """Factors that ``AdamWPrune`` reads in its own step, on the device: a graph of the step sees them change."""

    def __init__(self, optimizer: AdamWPrune, weights: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.factors = dict.fromkeys(weights, 1.0)
        self._weights = dict(weights)
        by_device: dict[torch.device, list[str]] = {}
        for name, weight in weights.items():
            by_device.setdefault(local(weight).device, []).append(name)
        # of each device the names, and their factors side by side
        self._stored = [(ns, torch.ones(len(ns), dtype=torch.float64, device=d)) for d, ns in by_device.items()]
        self._tensors = {
            n: one for names, stored in self._stored for n, one in zip(names, stored.unbind(), strict=True)
        }

    def set(self, factors: Mapping[str, float]) -> None:
        self.factors.update(factors)
        for names, stored in self._stored:
            new = torch.tensor([self.factors[name] for name in names], dtype=torch.float64)
            stored.copy_(new.pin_memory() if stored.is_cuda else new, non_blocking=True)

    def attach(self) -> None:
        ours = {self._weights[name]: factor for name, factor in self._tensors.items()}
        self.optimizer.lr_factors = {**self.optimizer.lr_factors, **ours}

    def detach(self) -> None:
        ours = set(self._weights.values())
        self.optimizer.lr_factors = {p: factor for p, factor in self.optimizer.lr_factors.items() if p not in ours}


class GroupLrFactors:
    """Factors inside an optimizer's step alone, which runs on a shallow copy with a group for each factor."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        name = type(optimizer).__name__
        if why := UNFIT.get(name):
            raise ValueError(f"{name} {why}, so rate= has no effect there; use AdamWPrune or torch.optim.AdamW")
        self.optimizer = optimizer
        self.factors = dict.fromkeys(weights, 1.0)
        self._names = {weight: name for name, weight in weights.items()}
        is_torchs = bool(known_kinds(optimizer) & (DECOUPLED | BY_GROUP | COUPLED))  # others may count by group
        for group in optimizer.param_groups:
            names, others = [self._names[p] for p in group["params"] if p in self._names], len(group["params"]) - 1
            if names:
                is_decoupled(optimizer, group)
            if names and others and not is_torchs:
                problem = f"rate= needs every prunable weight in its own parameter group, but {names[0]} shares one"
                advice = f"use {name}(prunus.parameter_groups(model, weight_decay=...), lr=...), or AdamWPrune"
                where = "a Trainer takes either as optimizers=(optimizer, None)"
                raise ValueError(f"{problem} with {others} more; {advice} ({where})")
        self._source = self._stepping = optimizer  # what the step was called on, and the copy of it that steps
        self._before: dict[str, Any] = {}  # the copy's attributes as they were
        # a group of the source, a part of it, that part before the step, and the factors in it
        self._parts: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, float]]] = []
        self._handles: list[RemovableHandle] = []

    def set(self, factors: Mapping[str, float]) -> None:
        self.factors.update(factors)

    def attach(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        # what was copied last is written back first
        hooks: OrderedDict[int, Any] = self.optimizer._optimizer_step_post_hooks  # pyrefly: ignore[bad-assignment]
        hooks.move_to_end(self._handles[1].id, last=False)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if optimizer is not self.optimizer:  # the copy, whose step calls that of a parent class
            return None
        if is_capturing():
            problem = "a graph of this step would freeze the learning rates at the current densities"
            raise ValueError(f"{problem}; use AdamWPrune with rate=")
        self._source, self._stepping = args[0], object.__new__(type(optimizer))
        self._before = {**vars(self._source)}
        vars(self._stepping).update(self._before)
        args = (self._stepping, *args[1:])
        return before_update(self._split)(optimizer, args, kwargs) or (args, kwargs)

    def _split(self, stepping: Optimizer) -> None:
        """Groups of one factor each for the copy; where decay is decoupled, lr * weight_decay stays as it is."""
        self._parts = []
        for group in self._source.param_groups:
            factors = {p: self.factors[self._names[p]] for p in group["params"] if p in self._names}
            rest = [p for p in group["params"] if factors.get(p, 1.0) == 1.0]
            decays = bool(group.get("weight_decay")) and is_decoupled(self.optimizer, group)
            alone = [([p], factor) for p, factor in factors.items() if factor != 1.0]
            for params, factor in [(rest, 1.0), *alone] if rest else alone:
                scales = {"lr": factor} | ({"weight_decay": 1 / factor} if decays else {})
                scaled = {key: group[key] * scale for key, scale in scales.items()} if factor != 1.0 else {}
                part = {**group, "params": params, **scaled}
                self._parts.append((group, part, {**part}, scales))
        stepping.param_groups = [part for _, part, _, _ in self._parts]

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Write into the optimizer and its groups what the step has written into the copy."""
        if optimizer is not self.optimizer:
            return
        for group, part, before, scales in self._parts:
            written = {key: value for key, value in part.items() if key not in before or value is not before[key]}
            group.update({k: value / scales[k] if k in scales else value for k, value in written.items()})
        after = {key: value for key, value in vars(self._stepping).items() if key != "param_groups"}
        vars(self._source).update({k: v for k, v in after.items() if k not in self._before or v is not self._before[k]})
        self._source, self._stepping, self._before, self._parts = self.optimizer, self.optimizer, {}, []


def known_kinds(optimizer: Optimizer) -> set[str]:
    """Names of torch's optimizers that it is, or extends."""
    return {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")}


def is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the group's weight decay shrinks weights by lr * weight_decay; refused where that is not known."""
    kinds = known_kinds(optimizer)
    if kinds & DECOUPLED:
        return True
    if kinds & BY_GROUP:
        return bool(group.get("decoupled_weight_decay", False))
    if kinds & COUPLED or not group.get("weight_decay"):
        return False
    problem = f"rate= must not change weight decay, but it is unknown how {type(optimizer).__name__} decays"
    raise ValueError(f"{problem}; set weight_decay=0 for the pruned weights, or use AdamWPrune or torch.optim.AdamW")


def lr_factors_of(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> StepLrFactors | GroupLrFactors:
    if isinstance(optimizer, AdamWPrune):
        return StepLrFactors(optimizer, weights)
    return GroupLrFactors(optimizer, weights)
