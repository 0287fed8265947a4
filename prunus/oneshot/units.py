"""Units of a model: neurons and head groups, what belongs to each of them, and how many stay."""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["neurons", "heads"]
Number = tuple[Any, str, Any]  # a module or configuration, its attribute, and the new value
MISSING = object()  # the value of an attribute that there is not


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


Removed = int | float | None  # a number of units, or a fraction of them above 0 and below 1


@dataclass(frozen=True)
class Wanted:
    """What is to be removed, or ``size``, the share of the weights that stays; then ``heads=0`` keeps all heads."""

    size: float | None = None
    neurons: Removed = None
    heads: Removed = None
    layers: Removed = None
    experts: Removed = None
    multiple: int = 1  # of neurons that stay

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("neurons", "heads", "layers", "experts")}
        by_hand = [name for name, value in given.items() if value is not None]
        if self.keeps_heads:
            by_hand.remove("heads")
        if self.size is None and not by_hand:
            raise ValueError("pass size=, the share that stays, or what goes: neurons=, heads=, layers= or experts=")
        if self.size is not None and not {"neurons", "heads"}.isdisjoint(by_hand):
            problem = "size sets how many neurons and heads stay; give either size, or neurons and heads"
            raise ValueError(f"{problem}; with size, heads=0 keeps all heads")
        if self.size is not None and not (_is_number(self.size) and 0 < self.size < 1):
            raise ValueError(f"size, the share of weights that stays, must be above 0 and below 1, got {self.size!r}")
        for name in by_hand:
            _check_removed(name, given[name])
        if not isinstance(self.multiple, Integral) or isinstance(self.multiple, bool) or self.multiple < 1:
            raise ValueError(f"multiple must be a whole number of at least 1, got {self.multiple!r}")

    @property
    def keeps_heads(self) -> bool:
        return self.size is not None and self.heads == 0 and not isinstance(self.heads, bool)

    @property
    def has_width(self) -> bool:
        return self.size is not None or self.neurons is not None or self.heads is not None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_removed(name: str, value: Removed) -> None:
    is_count = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
    if not is_count and not (_is_number(value) and 0 < float(value or 0) < 1):
        raise ValueError(f"{name} must be a number to remove, at least 1, or a fraction between 0 and 1, got {value!r}")


def num_removed(name: str, wanted: float, num: int) -> int:
    """How many of ``num`` go; at least one stays."""
    _check_removed(name, wanted)
    removed = int(wanted) if isinstance(wanted, Integral) else round(wanted * num)
    if removed >= num:
        raise ValueError(f"{name}={wanted:g} would remove {removed} of {num}; give less, so that at least one stays")
    if not removed:
        raise ValueError(f"{name}={wanted:g} of {num} is less than one; give a larger fraction, or a number")
    return removed


class Widths:
    """The numbers of units that a plan allows, and the weights that are left with them."""

    def __init__(self, model: nn.Module, plan: Plan, weights: Iterable[str]) -> None:
        self.plan = plan
        self.nums: dict[Kind, dict[str, int]] = {"heads": {}, "neurons": {}}  # by kind and field
        for layer in plan.layers:
            self.nums[layer.kind][layer.field] = layer.num
        self._shapes = {name: tuple(tensor_of(model, name).shape) for name in weights}

    def num_weights(self, left: Mapping[str, int]) -> int:
        """Weights of the blocks where ``left`` units of some fields stay."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        for layer in self.plan.layers:
            for name, slices in layer.slices.items():
                if name in shapes:
                    gone = layer.num - left.get(layer.field, layer.num)
                    shapes[name][slices.dim] -= gone * slices.places.shape[1]
        return sum(math.prod(shape) for shape in shapes.values())

    def by_hand(self, wanted: Wanted) -> dict[str, int]:
        left = {}
        for kind in ("neurons", "heads"):
            if (removed := getattr(wanted, kind)) is None:
                continue
            if not self.nums[kind]:
                raise ValueError(self.plan.reasons.get(kind) or f"the model has no {kind} that can be removed")
            for path, num in self.nums[kind].items():
                left[path] = num - num_removed(kind, removed, num)
                if kind == "neurons":
                    left[path] = _rounded(left[path], num, wanted.multiple)
                elif left[path] not in (allowed := self.plan.allowed(path)):
                    removable = ", ".join(str(num - one) for one in reversed(allowed[:-1])) or "none"
                    problem = f"cannot remove {num - left[path]} of {num} head groups: the class refuses what is left"
                    raise ValueError(f"{problem}; numbers that can go: {removable}")
        self._check_multiple(left, wanted.multiple)
        return left

    def _check_multiple(self, left: Mapping[str, int], multiple: int) -> None:
        """Refuse a multiple that cannot be kept; layers that never had so many neurons keep any number of them."""
        nums = {path: num for path, num in self.nums["neurons"].items() if left.get(path, num) < num}
        if nums and max(nums.values()) < multiple:
            problem = f"multiple={multiple} is more than the {max(nums.values())} neurons of a layer"
            raise ValueError(f"{problem}; give a smaller multiple")
        for path, num in nums.items():
            if left[path] < multiple <= num:
                problem = f"{left[path]} of {num} neurons would stay, fewer than multiple={multiple}"
                raise ValueError(f"{problem}; remove less, or give a smaller multiple")

    def of_size(self, most: float, wanted: Wanted) -> dict[str, int]:
        """Units that stay so that the blocks keep the largest number of weights that is not above ``most``."""
        num_now = self.num_weights({})
        if num_now <= most:
            return {}
        if not any(self.nums.values()):
            raise ValueError(". ".join(self.plan.reasons.values()))
        reduced = {} if wanted.keeps_heads else self.nums["heads"]
        heads = {}
        for path, num in reduced.items():  # the smallest number that is not below the share: neurons go instead
            heads[path] = next(left for left in self.plan.allowed(path) if left >= most / num_now * num - 1e-9)
        free, multiple = self.nums["neurons"], wanted.multiple
        if not free and wanted.keeps_heads:
            raise ValueError(self.plan.reasons.get("neurons") or "all heads stay, and the model has no other units")
        if not free:
            free, heads, multiple = self.nums["heads"], {}, 1

        def left(share: float) -> dict[str, int]:
            widths = {path: _rounded(int(share * num + 1e-9), num, multiple) for path, num in free.items()}
            return heads | widths

        shares = sorted({k / num for num in set(free.values()) for k in range(1, num + 1)})
        at = bisect_right(shares, most, key=lambda share: self.num_weights(left(share)))
        if at == 0 or min(left(shares[at - 1]).values()) < 1:
            unit = "neuron" if self.nums["neurons"] else "head group"
            least = next(share for share in shares if min(left(share).values()) >= 1)
            now = f"with the fewest that can stay, {self.num_weights(left(least)):,} of {num_now:,} weights are left"
            problem = f"size={wanted.size:g} leaves no {unit}: {now}, but only {int(most):,} may be"
            raise ValueError(f"{problem}; give a larger size, or also layers= or experts=")
        found = left(shares[at - 1])
        self._check_multiple(found, multiple)
        return found


def _rounded(left: int, num: int, multiple: int) -> int:
    """Down to a multiple, but never to nothing where the multiple is larger."""
    return left if left < min(multiple, num) else left // min(multiple, num) * min(multiple, num)
