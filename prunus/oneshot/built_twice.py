"""A model beside one that its class builds from a changed configuration, without memory for weights.

Tensors and numbers in which the two differ are what the change is about. Nothing rests on a family's names of modules,
and a model that is cut accordingly is the one that its new configuration builds.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
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


def new_config(model: Any, values: Mapping[str, Any]) -> Any:
    """The model's configuration with other values, by path, as it is read back from a folder."""
    config = deepcopy(model.config)
    for path, value in values.items():
        *outer, key = path.split(".")
        inner = config
        for name in outer:
            inner = getattr(inner, name)
        setattr(inner, key, value)
    return type(config).from_dict(config.to_dict())


def built(model: Any, values: Mapping[str, Any], change: str) -> nn.Module:
    """The model that its class builds from a configuration with other values; ``change`` is for the error's text."""
    return built_from(model, lambda: new_config(model, values), change)


def built_from(model: Any, config: Callable[[], Any], change: str) -> Any:
    """The model that its class builds from a configuration, without memory for its weights."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return type(model)(config())
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{type(model).__name__} cannot be built with {change}: {reason}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def unlike(model: nn.Module, other: nn.Module) -> str | None:
    """The first tensor that only one of two models has, or that has another shape in them."""
    own, others = tensors_of(model), tensors_of(other)
    for name in {**own, **others}:
        if name not in own or name not in others or own[name].shape != others[name].shape:
            return name
    return None


def changed_numbers(model: nn.Module, same: nn.Module, less: nn.Module) -> list[Number]:
    """Attributes of the model's modules and of their configurations that differ between two built models."""
    numbers: dict[tuple[int, str], Number] = {}
    for name, module in same.named_modules():
        own, other = model.get_submodule(name), less.get_submodule(name)
        for owner, before, after in [(own, module, other), *_configs_of(own, module, other)]:
            for key in {**vars(before), **vars(after)}:
                values = [vars(each).get(key, MISSING) for each in (before, after)]
                is_plain = all(value is MISSING or isinstance(value, PLAIN) for value in values)
                if is_plain and values[0] != values[1] and values[1] is not MISSING:
                    numbers[id(owner), key] = (owner, key, values[1])
    return list(numbers.values())


def _configs_of(*modules: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Configurations that the counterparts of a module hold, with those inside them."""
    for key, value in vars(modules[0]).items():
        if hasattr(value, "to_dict"):
            inner = [dict(configs(vars(module).get(key))) for module in modules]
            yield from ((inner[0][path], inner[1][path], inner[2][path]) for path in inner[0] if path in inner[2])
