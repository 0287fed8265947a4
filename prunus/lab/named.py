"""A training's state by the names of its weights, which is the same for any number of ranks, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ops import bits
from ..ranks import is_dtensor

State = dict[str, Any]


def to_names(state: State, model: nn.Module, optimizer: Optimizer) -> State:
    """The state with what the optimizer keeps under the weights' names, and each tied weight once.

    Masks leave the optimizer's part, where they are a rank's own: the pruner's part has those of whole weights.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    ties = {name: first[id(p)] for name, p in every if first[id(p)] != name}
    names = [first[id(p)] for group in optimizer.param_groups for p in group["params"]]
    rows = {names[i]: _without(row, "mask") for i, row in state["optimizer"]["state"].items()}
    groups = {
        str(number): group | {"params": [names[i] for i in group["params"]]}
        for number, group in enumerate(state["optimizer"]["param_groups"])
    }
    cuda = state["cuda_rng"]
    return state | {
        "model": _without(state["model"], *ties),
        "ties": ties,
        "optimizer": {"state": rows, "groups": groups},
        "cuda_rng": torch.stack(cuda) if cuda else torch.empty(0, 0, dtype=torch.uint8),
    }


def from_names(named: State, whole: bool = False) -> State:
    """The state as the optimizer numbers its weights.

    A ``whole`` one is that of one process: masks are packed bits, and the optimizer's rows have them too.
    """
    groups = [named["optimizer"]["groups"][key] for key in sorted(named["optimizer"]["groups"], key=int)]
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    masks: dict[str, Tensor] = {}
    if whole and named["pruner"]:
        masks = {name: bits.pack(mask != 0) for name, mask in named["pruner"]["masks"].items()}
        named = named | {"pruner": named["pruner"] | {"masks": masks}}
    rows = {
        number[name]: row | ({"mask": masks[name]} if name in masks else {})
        for name, row in named["optimizer"]["state"].items()
    }
    numbered = [group | {"params": [number[name] for name in group["params"]]} for group in groups]
    tensors = named["model"] | {alias: named["model"][name] for alias, name in named["ties"].items()}
    return _without(named, "ties") | {
        "model": tensors,
        "optimizer": {"state": dict(sorted(rows.items())), "param_groups": numbered},
        "cuda_rng": list(named["cuda_rng"].unbind()),
    }


def cut_as(state: State, model: nn.Module, optimizer: Optimizer) -> State:
    """A whole state with each tensor cut over ranks as its weight is."""
    like = model.state_dict()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {
        i: {key: _cut(value, weights[i]) for key, value in row.items() if key != "mask" or not is_dtensor(weights[i])}
        for i, row in state["optimizer"]["state"].items()
    }
    return state | {
        "model": {name: _cut(value, like[name]) if name in like else value for name, value in state["model"].items()},
        "optimizer": state["optimizer"] | {"state": rows},
    }


def _cut(value: Any, weight: Any) -> Any:
    if not is_dtensor(weight) or not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


def _without(values: Mapping[str, Any], *names: str) -> State:
    return {name: value for name, value in values.items() if name not in names}
