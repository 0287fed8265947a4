"""How sparse a model is: zeros of every weight matrix, and the reason where one stays dense."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import MappingProxyType

import torch
from torch import nn

from .eligible import Eligible, plain_name
from .plot import Figure, layers_chart, notebook_html
from .ranks import Ranks, local, shard_of


@dataclass(frozen=True)
class LayerSparsity:
    """One weight: its size, its zeros, and the reason if it is not pruned."""

    name: str
    shape: tuple[int, ...]
    num_weights: int
    num_zeros: int
    dense: str | None = None
    lr_factor: float = 1.0  # on its learning rate

    @property
    def sparsity(self) -> float:
        return self.num_zeros / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True, repr=False)
class SparsityReport:
    """Sparsity counted from the zeros: by weight, over prunable weights, and over all parameters."""

    layers: list[LayerSparsity]
    num_parameters: int
    progress: str | None = None  # where a run is in its schedule

    def __repr__(self) -> str:
        return f"SparsityReport({self._summary}, {len(self.layers)} weights; print it for all of them)"

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
            + (f"  lr x {layer.lr_factor:.3f}" if layer.lr_factor != 1 else "")
            for layer in self.layers
        ]
        return "\n".join([*rows, self._summary, *([self.progress] if self.progress else [])])

    @property
    def _summary(self) -> str:
        share, of_all = f"{self.sparsity:.4%}", f"{self.sparsity_of_all:.4%}"
        return f"{share} of {self.num_prunable} prunable weights, {of_all} of all are zero"

    def plot(self) -> Figure:
        return layers_chart([asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers])

    def _repr_html_(self) -> str:
        rows = [
            (layer.name, "x".join(map(str, layer.shape)), f"{layer.sparsity:.2%}", layer.dense or "")
            for layer in self.layers
        ]
        title = self._summary + (f"; {self.progress}" if self.progress else "")
        return notebook_html(title, self.plot, ("weight", "shape", "sparsity", "why dense"), rows)


def report(
    model: nn.Module,
    chosen: Eligible,
    ranks: Ranks | None = None,
    lr_factors: Mapping[str, float] = MappingProxyType({}),
    progress: str | None = None,
    holding: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda names: nullcontext(),
) -> SparsityReport:
    """Zeros of every weight matrix, and why it is dense, over all ``ranks``; ``holding`` brings it into memory."""
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    reasons = {weight.name: None for weight in chosen.weights} | chosen.dense
    named = {name: p for name, p in parameters.items() if name in reasons}
    counts = []
    for name, p in named.items():
        with holding([name]):
            counts.append(local(p).numel() - int(local(p).count_nonzero()))
    zeros = torch.tensor(counts)
    if ranks:
        zeros = ranks.total(zeros * torch.tensor([shard_of(name, p, ranks).is_owner for name, p in named.items()]))
    layers = [
        LayerSparsity(name, tuple(p.shape), p.numel(), num_zeros, reasons[name], lr_factors.get(name, 1.0))
        for (name, p), num_zeros in zip(named.items(), zeros.tolist(), strict=True)
    ]
    return SparsityReport(layers, sum(p.numel() for p in parameters.values()), progress)
