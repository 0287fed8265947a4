"""How a model differs from one with fewer experts, found by building both from a configuration, without memory.

Tensors and numbers in which the two differ count experts. Nothing rests on a family's names of modules, and a model
that is cut accordingly is the one that its new configuration builds.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import is_dtensor

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # in configurations
PLAIN = (bool, int, float, str, list, tuple)


@dataclass(frozen=True)
class FewerExperts:
    """What changes where ``num_left`` of ``num_experts`` experts a layer stay."""

    num_experts: int
    num_left: int
    slices: dict[str, tuple[str, int]]  # by name of a tensor: its layer of experts, and the dimension that counts them
    numbers: list[tuple[Any, str, Any]]  # a module or configuration, its attribute, and the new value
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
                f"{num_left} of {num} experts a layer would stay, but each token goes to {top_k}; "
                f"drop at most {(num - top_k) / num:.4g} of them"
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
    fields = [(inner, key) for inner in _configs(getattr(model, "config", None)) for key in COUNTS]
    fields = [(inner, key) for inner, key in fields if _count(inner, key) > 1]
    counts = {_count(inner, key) for inner, key in fields}
    if len(counts) > 1:
        both = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"{type(model).__name__} has parts with {both} experts a layer; only equal numbers can be cut")
    nothing = (
        f"{type(model).__name__} has no experts to drop: it needs a tensor that stacks their matrices, and a config "
        f"that says their number as {', '.join(COUNTS[:-1])} or {COUNTS[-1]}"
    )
    if not counts:
        raise ValueError(nothing)
    (num,) = counts
    num_left = num - round(fraction * num)
    if not 0 < num_left < num:
        raise ValueError(f"{fraction:g} of {num} experts a layer is {'none' if num_left else 'all'} of them")
    same, less = _built(model, num), _built(model, num_left)
    less_tensors = _tensors(less)
    dims = _cut_dims(model, _tensors(same), less_tensors, (num, num_left))
    layers = {name.rpartition(".")[0] for name in dims if less_tensors[name].ndim == 3}
    if not layers:
        raise ValueError(nothing)
    numbers: list[tuple[Any, str, Any]] = [(inner, key, num_left) for inner, key in fields]
    for name, module in same.named_modules():
        other = vars(less.get_submodule(name))
        changed = [key for key, value in vars(module).items() if isinstance(value, PLAIN) and other[key] != value]
        numbers += [(model.get_submodule(name), key, other[key]) for key in changed]
    fewer = FewerExperts(num, num_left, _slices(model, dims, layers), numbers, *_groups(model))
    if fewer.num_dropped % fewer.num_groups:
        raise ValueError(
            f"routing chooses among {fewer.num_groups} groups of as many experts, so that a multiple of "
            f"{fewer.num_groups} can be dropped, not {fewer.num_dropped} of {num}: {fewer.num_groups / num:.4g}, say"
        )
    return fewer


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for inner in list(vars(config).values()):
            yield from _configs(inner)


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if type(value) is int else 0


def _groups(model: Any) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use."""
    for config in _configs(model.config):
        if (num := _count(config, "n_group")) > 1:
            return num, _count(config, "topk_group") or num
    return 1, 1


def _built(model: Any, num: int) -> nn.Module:
    """The model that its configuration builds with ``num`` experts a layer, without memory for its weights."""
    config = deepcopy(model.config)
    for inner in _configs(config):
        for key in COUNTS:
            if _count(inner, key) > 1:
                setattr(inner, key, num)
    try:
        with torch.device("meta"):
            return type(model)(config)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{type(model).__name__} cannot be built with {num} experts a layer: {reason}") from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _cut_dims(
    model: nn.Module, same: Mapping[str, Tensor], less: Mapping[str, Tensor], counts: tuple[int, int]
) -> dict[str, int]:
    """Names of the tensors that have a slice for each expert, and along which dimension."""
    own = _tensors(model)
    for name in {**own, **same}:
        if name not in own or name not in same or own[name].shape != same[name].shape:
            raise ValueError(f"{name} has not the shape that the model's config says; its experts cannot be dropped")
    if set(own) != set(less):
        raise ValueError(
            f"the experts of {type(model).__name__} are modules of their own; only experts that are stacked in one "
            "tensor can be dropped, as most of them are in transformers 5"
        )
    cuts = {}
    for name, tensor in own.items():
        sizes = list(zip(tensor.shape, less[name].shape, strict=True))
        if dims := [dim for dim, (before, after) in enumerate(sizes) if before != after]:
            if len(dims) > 1 or sizes[dims[0]] != counts or is_dtensor(tensor):
                raise ValueError(f"an expert is not one slice of {name}, {list(tensor.shape)}; it cannot be dropped")
            cuts[name] = dims[0]
    return cuts


def _slices(model: nn.Module, dims: Mapping[str, int], layers: set[str]) -> dict[str, tuple[str, int]]:
    """For each tensor that is cut the layer of experts it belongs to: that of the innermost module they share."""
    blocks = {name.rpartition(".")[0]: name for name in layers}
    slices = {}
    for name, tensor in _tensors(model).items():
        block = max((path for path in blocks if name.startswith(f"{path}.")), key=len, default=None)
        if name in dims:
            if block is None or len(blocks) < len(layers):
                raise ValueError(f"{name} has a slice for each expert, but of which layer is not clear")
            slices[name] = blocks[block], dims[name]
        elif block is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} may hold numbers of experts, so that none can be dropped")
    return slices
