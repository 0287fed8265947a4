"""Units of a model: neurons and head groups, and which places of which tensors belong to each of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["neurons", "heads"]
Number = tuple[Any, str, Any]  # a module or configuration, its attribute, and the new value


@dataclass(frozen=True, eq=False)
class Slices:
    """The places along ``dim`` of a tensor that belong to each unit: (units, places), all different."""

    dim: int
    places: Tensor


@dataclass(frozen=True, eq=False)
class UnitLayer:
    """The units whose outputs one weight reads: neurons of an MLP, or head groups of an attention.

    A head group is a key and value head with the query heads that read it. Layers of one ``field`` must keep equally
    many units: it is a field of the configuration, or the consumer's name where each layer has a width of its own.
    """

    kind: Kind
    field: str
    consumer: str  # name of the weight
    slices: Mapping[str, Slices]  # by name of a parameter or buffer; the consumer is among them

    @property
    def num(self) -> int:
        return len(self.slices[self.consumer].places)


@dataclass(frozen=True)
class Plan:
    """The units of a model, how many of a field are ``allowed`` to stay, and the ``numbers`` that change with them."""

    layers: Sequence[UnitLayer]
    reasons: Mapping[Kind, str]  # why units of a kind cannot go, where they cannot: sentences
    allowed: Callable[[str], Sequence[int]]
    numbers: Callable[[Mapping[str, int]], list[Number]]
    left_out: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)  # fields whose units cannot go, and why


def home_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module holds a parameter or buffer, and its name there."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if key in module._parameters else module._buffers), key


def tensor_of(model: nn.Module, name: str) -> Tensor:
    home, key = home_of(model, name)
    return home[key]


def role(name: str) -> str:
    """What the module of a tensor is in every layer alike: its name without numbers."""
    path, _, key = name.rpartition(".")
    return re.sub(r"\d+", "*", path if key in ("weight", "bias") else name)


def places_of(num: int, parts: Sequence[int]) -> Tensor:
    """Places (unit, place) in a dimension that consists of parts, each with so many places a unit, unit by unit."""
    starts = [num * sum(parts[:number]) for number in range(len(parts))]
    units = torch.arange(num)[:, None]
    runs = [start + units * size + torch.arange(size) for start, size in zip(starts, parts, strict=True)]
    return torch.cat(runs, dim=1)
