"""How a model differs from one with fewer experts, found by building both from a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ranks import is_dtensor
from .built_twice import as_built, built, changed_dims, changed_numbers, configs, tensors_of
from .units import Number, tensor_of

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # in configurations


@dataclass(frozen=True)
class FewerExperts:
    """What changes where ``num_left`` of ``num_experts`` experts a layer stay."""

    num_experts: int
    num_left: int
    slices: dict[str, tuple[str, int]]  # by name of a tensor: its layer of experts, and the dimension that counts them
    numbers: list[Number]
    num_groups: int = 1  # of experts, among which routing chooses first
    num_groups_taken: int = 1

    @property
    def layers(self) -> list[str]:
        """Names of the modules that hold the experts of a layer."""
        return list(dict.fromkeys(layer for layer, _ in self.slices.values()))

    @property
    def num_dropped(self) -> int:
        return self.num_experts - self.num_left

    def check_routing(self, top_k: int) -> None:
        """Refuse to leave fewer experts than a token goes to."""
        num, num_left, in_group = self.num_experts, self.num_left, self.num_left // self.num_groups
        if num_left < top_k:
            raise ValueError(
                f"{num_left} of {num} experts per layer would stay, but each token goes to {top_k}; drop at most "
                f"{(num - top_k) / num:.4g} of them"
            )
        if self.num_groups > 1 and (in_group < 2 or in_group * self.num_groups_taken < top_k):
            raise ValueError(
                f"{in_group} experts would stay in each of {self.num_groups} groups, too few for a token that goes to "
                f"{top_k} experts in {self.num_groups_taken} groups; drop fewer"
            )


def fewer_experts(model: nn.Module, fraction: float) -> FewerExperts:
    """How the model differs from one without ``round(fraction * E)`` of the E experts of each layer.

    ValueError where it has none, or where an expert is not one slice of each tensor.
    """
    inner = configs(getattr(model, "config", None))
    fields = {path + key: num for path, config in inner for key in COUNTS if (num := _count(config, key)) > 1}
    counts = set(fields.values())
    if len(counts) > 1:
        both = " and ".join(map(str, sorted(counts)))
        raise ValueError(
            f"{type(model).__name__} has parts with {both} experts per layer; only equal numbers can be cut"
        )
    nothing = (
        f"{type(model).__name__} has no experts to drop: it needs a tensor that stacks their matrices, and a config "
        f"that says their number as {', '.join(COUNTS[:-1])} or {COUNTS[-1]}"
    )
    if not counts:
        raise ValueError(nothing)
    (num,) = counts
    num_left = num - (int(fraction) if fraction >= 1 else round(fraction * num))
    if not 0 < num_left < num:
        raise ValueError(f"{fraction:g} of {num} experts per layer is {'none' if num_left else 'all'} of them")
    same = as_built(model, "its experts cannot be dropped")
    less = built(model, dict.fromkeys(fields, num_left), f"{num_left} experts a layer")
    dims = _cut_dims(model, less, (num, num_left))
    layers = {name.rpartition(".")[0] for name in dims if tensor_of(model, name).ndim == 3}
    if not layers:
        raise ValueError(nothing)
    fewer = FewerExperts(
        num, num_left, _slices(model, dims, layers), changed_numbers(model, same, less), *_groups(model)
    )
    if fewer.num_dropped % fewer.num_groups:
        raise ValueError(
            f"routing chooses among {fewer.num_groups} equal groups of experts, so drop a multiple of "
            f"{fewer.num_groups}, not {fewer.num_dropped} of {num}; for example {fewer.num_groups / num:.4g}"
        )
    return fewer


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if type(value) is int else 0


def _groups(model: Any) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use."""
    for _, config in configs(model.config):
        if (num := _count(config, "n_group")) > 1:
            return num, _count(config, "topk_group") or num
    return 1, 1


def _cut_dims(model: nn.Module, less: nn.Module, counts: tuple[int, int]) -> dict[str, int]:
    """Names of the tensors that have a slice for each expert, and along which dimension."""
    own, smaller = tensors_of(model), tensors_of(less)
    if set(own) != set(smaller):
        raise ValueError(
            f"the experts of {type(model).__name__} are separate modules; only experts stacked in one tensor can be "
            "dropped, as most are in transformers 5"
        )
    cuts = {}
    for name, (dim, *others) in changed_dims(model, less).items():
        tensor = own[name]
        if others or (tensor.shape[dim], smaller[name].shape[dim]) != counts or is_dtensor(tensor):
            raise ValueError(f"an expert is not one slice of {name}, {list(tensor.shape)}; it cannot be dropped")
        cuts[name] = dim
    return cuts


def _slices(model: nn.Module, dims: Mapping[str, int], layers: set[str]) -> dict[str, tuple[str, int]]:
    """For each tensor that is cut the layer of experts it belongs to: that of the innermost module they share."""
    blocks = {name.rpartition(".")[0]: name for name in layers}
    slices = {}
    for name, tensor in tensors_of(model).items():
        block = max((path for path in blocks if name.startswith(f"{path}.")), key=len, default=None)
        if name in dims:
            if block is None or len(blocks) < len(layers):
                raise ValueError(f"{name} has a slice for each expert, but it is not clear of which layer")
            slices[name] = blocks[block], dims[name]
        elif block is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} may hold the numbers of experts, so none can be dropped")
    return slices
