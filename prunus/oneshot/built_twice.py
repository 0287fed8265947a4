"""A model beside one that its class builds from a changed configuration, without memory for weights.

Tensors and numbers in which the two differ are what the change is about. Nothing rests on a family's names of modules,
and a model that is cut accordingly is the one that its new configuration builds.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from .units import Number

PLAIN = (bool, int, float, str, list, tuple, type(None))
MISSING = object()


def configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and those inside it, each behind its path: ``text_config.``, say."""
    if hasattr(config, "to_dict"):
        yield path, config
        for key, inner in list(vars(config).items()):
            yield from configs(inner, f"{path}{key}.")


def home_of_field(config: Any, path: str) -> tuple[Any, str]:
    """The configuration that has a field, itself or one inside it, and the field's name there."""
    *outer, key = path.split(".")
    return reduce(getattr, outer, config), key


def set_fields_(config: Any, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        setattr(*home_of_field(config, path), value)


def new_config(model: Any, change_: Callable[[Any], None]) -> Any:
    """The model's configuration, changed, as it is read back from a folder."""
    config = deepcopy(model.config)
    change_(config)
    return type(config).from_dict(config.to_dict())


def built(model: Any, values: Mapping[str, Any], said: str) -> Any:
    """The model that its class builds from a configuration with other values; ``said`` is for the error's text."""
    return built_with(model, lambda config: set_fields_(config, values), said)


def built_with(model: Any, change_: Callable[[Any], None], said: str) -> Any:
    """The model that its class builds from a changed configuration, without memory for its weights."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return type(model)(new_config(model, change_))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{type(model).__name__} cannot be built with {said}: {reason}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def unlike(model: nn.Module, other: nn.Module) -> str | None:
    """The first tensor that only one of two models has, or that has another shape in them."""
    own, others = ({name: tensor.shape for name, tensor in tensors_of(one).items()} for one in (model, other))
    return next((name for name in own | others if own.get(name) != others.get(name)), None)


def as_built(model: nn.Module, consequence: str) -> Any:
    """The model that its class builds from its configuration; ValueError where that is another one."""
    same = built(model, {}, "its own configuration")
    if name := unlike(model, same):
        is_shared = name in dict(model.named_parameters(remove_duplicate=False)) and name not in tensors_of(model)
        what = "is shared with another layer" if is_shared else "has not the shape that the model's config says"
        raise ValueError(f"{name} {what}; {consequence}")
    return same


def changed_dims(model: nn.Module, less: nn.Module) -> dict[str, list[int]]:
    """By name of a tensor that is smaller in ``less``, the dimensions in which it is."""
    own, smaller = tensors_of(model), tensors_of(less)
    dims = {name: [d for d, n in enumerate(own[name].shape) if n != smaller[name].shape[d]] for name in own}
    return {name: changed for name, changed in dims.items() if changed}


def changed_numbers(
    model: nn.Module, same: nn.Module, less: nn.Module, names: Mapping[str, str] | None = None
) -> list[Number]:
    """Attributes of modules and configurations that differ between built models; ``names`` has new names of modules."""
    numbers: dict[tuple[int, str], Number] = {}
    for name, new in (names or {name: name for name, _ in same.named_modules()}).items():
        own, module, other = model.get_submodule(name), same.get_submodule(name), less.get_submodule(new)
        for owner, before, after in [(own, module, other), *_configs_of(own, module, other)]:
            for key, value in vars(after).items():
                old = vars(before).get(key, MISSING)
                is_lost = old is not MISSING and key not in vars(owner)  # as by a module that a forward has replaced
                are_plain = isinstance(value, PLAIN) and (old is MISSING or isinstance(old, PLAIN))
                if are_plain and not is_lost and value != old:
                    numbers[id(owner), key] = (owner, key, value)
    return list(numbers.values())


def _configs_of(*modules: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Configurations that the counterparts of a module hold, with those inside them."""
    for key, value in vars(modules[0]).items():
        if hasattr(value, "to_dict"):
            inner = [dict(configs(vars(module).get(key))) for module in modules]
            yield from ((inner[0][path], inner[1][path], inner[2][path]) for path in inner[0] if path in inner[2])
