"""How sparse a model is, counted from its zeros."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from .eligible import Eligible, plain_name
from .ranks import Ranks, local, shard_of


@dataclass(frozen=True)
class Event:
    """What an event did, as given to ``on_event``."""

    step: int
    sparsity: float  # of the schedule
    seconds: float
    newly_pruned: int
    regrown: int = 0  # weights that came back
    bytes_exchanged: int = 0  # sent by this rank in sums over ranks
    rates: tuple[float, ...] = ()  # factor on the learning rate of each prunable weight, if rates follow densities


@dataclass(frozen=True)
class Layer:
    """One weight: its size, its zeros, and the reason if it is not pruned."""

    name: str
    shape: tuple[int, ...]
    num_weights: int
    num_zeros: int
    dense: str | None = None
    rate: float = 1.0  # factor on its learning rate

    @property
    def sparsity(self) -> float:
        return self.num_zeros / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True)
class Report:
    """Sparsity counted from the zeros: by weight, over prunable weights, and over all parameters."""

    layers: list[Layer]
    num_parameters: int

    @property
    def num_prunable(self) -> int:
        return sum(layer.num_weights for layer in self.layers if layer.dense is None)

    @property
    def num_zeros(self) -> int:
        return sum(layer.num_zeros for layer in self.layers if layer.dense is None)

    @property
    def sparsity(self) -> float:
        """Over prunable weights."""
        return self.num_zeros / self.num_prunable

    @property
    def sparsity_of_all(self) -> float:
        """Pruned weights over all parameters of the model."""
        return self.num_zeros / self.num_parameters

    def __str__(self) -> str:
        rows = [
            f"{layer.name:50} {'x'.join(map(str, layer.shape)):>16} {layer.sparsity:8.2%}"
            + (f"  dense: {layer.dense}" if layer.dense else "")
            + (f"  rate x {layer.rate:.3f}" if layer.rate != 1 else "")
            for layer in self.layers
        ]
        total = (
            f"{self.sparsity:.4%} of {self.num_prunable} prunable weights, {self.sparsity_of_all:.4%} of all are zero"
        )
        return "\n".join([*rows, total])


def report(
    model: nn.Module, found: Eligible, ranks: Ranks | None = None, rates: Mapping[str, float] = MappingProxyType({})
) -> Report:
    """Zeros of every weight matrix, pruned or not, with the reason for those that are not.

    Collective over ``ranks``, which hold shards of the weights.
    """
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    reasons = {weight.name: None for weight in found.weights} | found.dense
    named = {name: p for name, p in parameters.items() if name in reasons}
    zeros = torch.tensor([local(p).numel() - int(local(p).count_nonzero()) for p in named.values()])
    if ranks:
        zeros = ranks.total(zeros * torch.tensor([shard_of(name, p, ranks).is_owner for name, p in named.items()]))
    layers = [
        Layer(name, tuple(p.shape), p.numel(), num_zeros, reasons[name], rates.get(name, 1.0))
        for (name, p), num_zeros in zip(named.items(), zeros.tolist(), strict=True)
    ]
    return Report(layers, sum(p.numel() for p in parameters.values()))
