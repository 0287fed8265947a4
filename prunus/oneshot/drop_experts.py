"""Whole experts that go: those of each layer that add least to its output, with the router's rows.

How a model differs from one with fewer experts is found by building both from its configuration.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..input_statistics import eagerly, one_by_one
from ..ranks import is_dtensor
from .built_twice import as_built, built, changed_dims, changed_numbers, configs, tensors_of
from .calibration import Calibration
from .cuts import Cuts
from .forward import outputs
from .samples import Chunk, mask_of
from .shared_work import agreed
from .units import Number, tensor_of

SIZE = {"cpu": 4, "cuda": 32}  # samples of a pass
Added = list[tuple[int, Tensor]]  # an expert, and how much it adds to each of its tokens
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
        return list(dict.fromkeys(layer for layer, _ in self.slices.values()))

    @property
    def num_dropped(self) -> int:
        return self.num_experts - self.num_left

    def check_routing(self, top_k: int) -> None:
        num, num_left, in_group = self.num_experts, self.num_left, self.num_left // self.num_groups
        if num_left < top_k:
            problem = f"{num_left} of {num} experts per layer would stay, but each token goes to {top_k}"
            raise ValueError(f"{problem}; drop at most {(num - top_k) / num:.4g} of them")
        if self.num_groups > 1 and (in_group < 2 or in_group * self.num_groups_taken < top_k):
            problem = f"{in_group} experts would stay in each of {self.num_groups} groups, too few for a token"
            raise ValueError(f"{problem} that goes to {top_k} experts in {self.num_groups_taken} groups; drop fewer")


def fewer_experts(model: nn.Module, fraction: float) -> FewerExperts:
    """How the model differs from one without ``round(fraction * E)`` of the E experts of each layer, or ValueError."""
    inner = configs(getattr(model, "config", None))
    fields = {path + key: num for path, config in inner for key in COUNTS if (num := _count(config, key)) > 1}
    counts = set(fields.values())
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
    num_left = num - (int(fraction) if fraction >= 1 else round(fraction * num))
    if not 0 < num_left < num:
        words = "none of them; drop more" if num_left else "all of them; drop fewer"
        raise ValueError(f"{fraction:g} of {num} experts per layer is {words}")
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
        groups = fewer.num_groups
        problem = f"routing chooses among {groups} equal groups of experts, so drop a multiple of {groups}"
        raise ValueError(f"{problem}, not {fewer.num_dropped} of {num}; for example {groups / num:.4g}")
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
        problem = f"the experts of {type(model).__name__} are separate modules"
        raise ValueError(f"{problem}; only experts stacked in one tensor can be dropped, as most are in transformers 5")
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


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer, by their numbers in the dense model.

    ``importance`` is the mean, over the tokens routed to an expert, of its router weight times the norm of its output
    (REAP, Lasby et al. 2025, https://arxiv.org/abs/2510.13999); 0 for an expert that no token reached.
    """

    name: str
    importance: tuple[float, ...]
    num_tokens: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(expert for expert in range(len(self.importance)) if expert not in self.dropped)


def drop_experts_(calibration: Calibration, fraction: float) -> tuple[list[ExpertLayer], Cuts]:
    """Drop a number or fraction of each layer's experts: the least important, equally many of each routing group."""
    plan = fewer_experts(calibration.model, float(fraction))
    with calibration.open(), eagerly(), torch.no_grad():
        importance = _Importance(calibration, plan)
        importance.collect()
    layers = [importance.layer(name) for name in plan.layers]
    cuts = without_experts(calibration.model, plan, layers)
    cuts.apply_()
    return layers, cuts


def without_experts(model: nn.Module, plan: FewerExperts, layers: Sequence[ExpertLayer]) -> Cuts:
    """What takes the place of the model's tensors and numbers where the dropped experts are gone; not applied yet."""
    gone = {layer.name: torch.tensor(layer.dropped) for layer in layers}
    drop = {(name, dim): gone[layer] for name, (layer, dim) in plan.slices.items()}
    return Cuts.of(model, drop, plan.numbers)


class _Importance:
    def __init__(self, calibration: Calibration, plan: FewerExperts) -> None:
        self.calibration, self.plan = calibration.shared(), plan
        # what the experts of a layer add, and their tokens
        self.totals = {name: torch.zeros(2, plan.num_experts, dtype=torch.float64) for name in plan.layers}
        self._added: dict[str, Added] = {}  # in this pass
        self._mask: Tensor | None = None

    def collect(self) -> None:
        size = self.calibration.batch_size or SIZE.get(self.calibration.device.type, 4)
        size = size if self.calibration.can_batch() else 1
        with ExitStack() as stack:
            for name in self.plan.layers:
                module = self.calibration.model.get_submodule(name)
                stack.enter_context(one_by_one(module))
                stack.enter_context(module.register_forward_pre_hook(partial(self._read, name), with_kwargs=True))
            stack.enter_context(self.calibration.reading("importance of experts"))
            agreed(self.calibration.ranks, partial(self.calibration.visit, size, self._pass, self._add))
        if (ranks := self.calibration.ranks) is not None:
            self.totals = {name: ranks.sum(total) for name, total in self.totals.items()}

    def _pass(self, chunk: Chunk) -> list[tuple[str, int, Tensor]]:
        batch = self.calibration.batch(chunk)
        self._added, self._mask = {}, mask_of(batch)
        outputs(self.calibration.model, batch)
        self.calibration.cost.forwards += chunk.size
        return [(name, expert, amounts) for name, parts in self._added.items() for expert, amounts in parts]

    def _add(self, found: tuple[str, int, Tensor]) -> None:
        name, expert, amounts = found
        self.totals[name][0, expert] += amounts.sum(dtype=torch.float64).cpu()
        self.totals[name][1, expert] += len(amounts)

    def _read(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, *routes = (*args, *kwargs.values())
        read = self._routed if routes else self._all_tokens
        self._added.setdefault(name, []).extend(read(module, x.flatten(0, -2), *routes))

    def _routed(self, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Added:
        """Each expert runs by itself on the tokens that ``index`` (token, choice) sends to it."""
        self.plan.check_routing(index.shape[-1])
        index, weights = index.flatten(0, -2), weights.flatten(0, -2)
        counted, added = self._counted(len(x)), []
        for expert in range(self.plan.num_experts):
            token, place = ((index == expert) & counted[:, None]).nonzero(as_tuple=True)
            if len(token):
                alone, one = index.new_full((len(token), 1), expert), weights.new_ones((len(token), 1))
                norms = module.forward(x[token], alone, one).flatten(0, -2).float().norm(dim=-1)
                added.append((expert, norms * weights[token, place].float().abs()))
        return added

    def _all_tokens(self, module: nn.Module, x: Tensor) -> Added:
        """Llama 4: each expert reads every token times its router weight, which is 0 where it is not routed there."""
        x = x.unflatten(0, (self.plan.num_experts, -1))
        norms = module.forward(x.flatten(0, 1)).view(x.shape).float().norm(dim=-1)
        is_routed = x.any(-1)
        self.plan.check_routing(int(is_routed.sum(0).max()))
        return [(expert, norms[expert][where]) for expert, where in enumerate(is_routed & self._counted(x.shape[1]))]

    def _counted(self, num: int) -> Tensor:
        """Which of ``num`` tokens the attention mask admits."""
        if self._mask is None or self._mask.numel() != num:
            return torch.ones(num, dtype=torch.bool, device=self.calibration.device)
        return self._mask.flatten().bool()

    def layer(self, name: str) -> ExpertLayer:
        plan, (added, num_tokens) = self.plan, self.totals[name]
        importance = added / num_tokens.clamp(min=1)
        if not num_tokens.any():
            raise ValueError(f"no sample reached the experts of {name}; give samples that do")
        if not importance.isfinite().all():
            raise ValueError(f"the experts of {name} have outputs that are not finite; check the samples")
        order = importance.view(plan.num_groups, -1).argsort(dim=1, stable=True)
        first = torch.arange(0, plan.num_experts, order.shape[1])[:, None]  # expert of each group
        dropped = (first + order[:, : plan.num_dropped // plan.num_groups]).flatten().sort().values
        return ExpertLayer(name, tuple(importance.tolist()), tuple(map(int, num_tokens)), tuple(dropped.tolist()))
