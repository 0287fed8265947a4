"""Learning rates for what is left: a weight matrix that lost most of its weights takes larger steps.

With a fraction d of its weights left a matrix adds up fewer terms, and with the rate of the dense model its outputs
move only d times as far a step. A factor ``d^(-power)`` on its rate makes up for some of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .eligible import eligible
from .ops.machine import is_capturing
from .optim import AdamWPrune
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
    """Factor on the learning rate of a pruned weight of density d: ``max(d, floor)^(-power)``.

    Decoupled weight decay keeps the rate without the factor. ``power=0`` changes nothing. Power 1, that of the rule for
    sparse layers (https://arxiv.org/abs/2405.15743), did best or as well as any on the models of docs/results.md.
    """

    power: float = 1.0
    floor: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.power, int | float) or not 0 <= self.power <= 2:
            raise ValueError(f"power must lie in [0, 2], got {self.power!r}; 0 leaves rates alone, 1 is 1/density")
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor is the least density that counts, in (0, 1], got {self.floor}")

    def __call__(self, density: float) -> float:
        return max(density, self.floor) ** -self.power


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Groups for an optimizer: each prunable weight alone, other matrices together, norms and biases without decay.

    Make the optimizer from them, then its scheduler, then ``Pruner(..., rate=Rate())``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"parameter_groups takes the model itself, got {type(model).__name__}")
    alone = [weight.parameter for weight in eligible(model, include, exclude).weights]
    taken = {id(p) for p in alone}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [{"params": [p], "weight_decay": weight_decay} for p in alone]
    for params, decay in (([p for p in rest if p.ndim > 1], weight_decay), ([p for p in rest if p.ndim < 2], 0.0)):
        if params:
            groups.append({"params": params, "weight_decay": decay})
    return groups


class StepRates:
    """Factors that ``AdamWPrune`` reads in its own step, on the device: a graph of the step sees them change."""

    def __init__(self, optimizer: AdamWPrune, weights: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.factors = dict.fromkeys(weights, 1.0)
        self._tensors = {n: torch.ones((), dtype=torch.float64, device=local(w).device) for n, w in weights.items()}
        self._weights = dict(weights)

    def set(self, factors: Mapping[str, float]) -> None:
        self.factors.update(factors)
        for name, factor in factors.items():
            self._tensors[name].fill_(factor)

    def attach(self) -> None:
        self.optimizer.rates = {**self.optimizer.rates, **{self._weights[n]: t for n, t in self._tensors.items()}}

    def detach(self) -> None:
        ours = set(self._weights.values())
        self.optimizer.rates = {p: rate for p, rate in self.optimizer.rates.items() if p not in ours}


class GroupRates:
    """Factors on the rates of an optimizer's groups, there only while it steps: schedulers see the rates they set."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        name = type(optimizer).__name__
        if why := UNFIT.get(name):
            raise ValueError(f"{name} {why}, so rate= has no effect there; use AdamWPrune or torch.optim.AdamW")
        self.optimizer = optimizer
        self.places = {name: place_of(name, weight, optimizer) for name, weight in weights.items()}  # in param_groups
        groups = optimizer.param_groups
        self.decouples = {name: is_decoupled(optimizer, groups[place]) for name, place in self.places.items()}
        self.factors = dict.fromkeys(weights, 1.0)
        self._scaled: list[tuple[int, Any, Any, float]] = []  # group; its rate before and now; its decay before
        self._handles: list[RemovableHandle] = []

    def set(self, factors: Mapping[str, float]) -> None:
        self.factors.update(factors)

    def attach(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._scale),
            self.optimizer.register_step_post_hook(self._put_back),
            self.optimizer.register_state_dict_pre_hook(self._recover),
        ]

    def detach(self) -> None:
        self._recover()
        for handle in self._handles:
            handle.remove()

    def _scale(self, *_: object) -> None:
        if is_capturing():
            raise ValueError(
                "a graph of this step would keep the rates of today's densities; use AdamWPrune with rate="
            )
        self._recover()
        seen: set[int] = set()
        for group in self.optimizer.param_groups:  # each needs a rate of its own, where one tensor was given for all
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].clone() if id(group["lr"]) in seen else group["lr"]
                seen.add(id(group["lr"]))
        for name, place in self.places.items():
            group, factor = self.optimizer.param_groups[place], self.factors[name]
            if factor == 1.0:
                continue
            lr, decay = group["lr"], group.get("weight_decay", 0.0)
            self._scaled.append((place, lr, lr * factor, decay))
            group["lr"] = lr * factor
            if decay and self.decouples[name]:
                group["weight_decay"] = decay / factor

    def _put_back(self, *_: object) -> None:
        for place, lr, _, decay in self._scaled:
            group = self.optimizer.param_groups[place]
            group["lr"] = lr
            if "weight_decay" in group:
                group["weight_decay"] = decay
        self._scaled.clear()

    def _recover(self, *_: object) -> None:
        """Put back what a step that failed has left scaled, unless somebody has set another value since."""
        groups = self.optimizer.param_groups
        self._scaled = [one for one in self._scaled if float(groups[one[0]]["lr"]) == float(one[2])]
        self._put_back()


def place_of(name: str, weight: nn.Parameter, optimizer: Optimizer) -> int:
    """Which group holds this weight and nothing else; a group that holds more is refused."""
    groups = [group["params"] for group in optimizer.param_groups]
    place = next(i for i, params in enumerate(groups) if any(p is weight for p in params))
    if len(groups[place]) > 1:
        raise ValueError(
            f"rate= needs every prunable weight in a parameter group of its own, but {name} shares one with "
            f"{len(groups[place]) - 1} more; make the optimizer as "
            f"{type(optimizer).__name__}(prunus.parameter_groups(model, weight_decay=...), lr=...), or use AdamWPrune"
        )
    return place


def is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the group's weight decay shrinks weights by lr * weight_decay; refused where that is not known."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")}
    if kinds & DECOUPLED:
        return True
    if kinds & BY_GROUP:
        return bool(group.get("decoupled_weight_decay", False))
    if kinds & COUPLED or not group.get("weight_decay"):
        return False
    raise ValueError(
        f"rate= must leave weight decay as it is, but how {type(optimizer).__name__} decays is not known here; "
        "give its pruned weights weight_decay=0, or use AdamWPrune or torch.optim.AdamW"
    )


def rates_of(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> StepRates | GroupRates:
    """How factors reach the step of this optimizer."""
    return StepRates(optimizer, weights) if isinstance(optimizer, AdamWPrune) else GroupRates(optimizer, weights)
