"""Fields of a configuration that count neurons, heads, or key and value heads, and what changes with them."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .built_twice import built, configs, tensors_of
from .units import Kind

# names of the fields that count neurons, heads, and key and value heads, in all configurations of transformers
NEURONS = re.compile(
    r"(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_?ff|n_inner|d_inner|hidden_dim|mlp_dim)"
)
HEADS = re.compile(r"(num_)?((en|de)coder_)?(num_)?(attention_heads|heads)|n_heads?")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")


@dataclass(frozen=True)
class UnitField:
    """A field of the configuration that counts units, and others that change with it."""

    kind: Kind
    path: str
    num: int
    beside: Mapping[str, int] = field(default_factory=dict)  # by path: how many of these a unit has
    fixed: Mapping[str, int] = field(default_factory=dict)  # by path: a size that is written out
    head_size: int = 1
    group_size: int = 1

    def values(self, left: int) -> dict[str, int]:
        return {self.path: left, **{path: num * left for path, num in self.beside.items()}, **self.fixed}


def unit_fields(model: Any, same: nn.Module) -> Iterator[UnitField]:
    """Fields that may count units, of a configuration and of those inside it."""
    for prefix, config in configs(model.config):
        arguments = _arguments(type(config))
        fields = {key: vars(config)[key] for key in arguments if key in vars(config)}
        for key, num in fields.items():
            if NEURONS.fullmatch(key):
                num = _implied(model, same, prefix + key) if num is None else num
                if type(num) is int and num > 1:
                    yield UnitField("neurons", prefix + key, num)
        numbers = {key: num for key, num in fields.items() if type(num) is int and num > 1}
        for key, num in numbers.items():
            if HEADS.fullmatch(key) and key not in KEY_VALUE_HEADS:
                groups = (name for name in KEY_VALUE_HEADS if num % numbers.get(name, num + 1) == 0)
                yield _head_field(config, prefix, key, next(groups, None))


def _arguments(kind: type) -> list[str]:
    """What the classes of a configuration are made from; what they compute does not come back from a folder."""
    inits = [base.__init__ for base in kind.__mro__ if "__init__" in vars(base)]
    return list(dict.fromkeys(key for init in inits for key in inspect.signature(init).parameters))


def _head_field(config: Any, prefix: str, key: str, groups: str | None) -> UnitField:
    num, width, size = getattr(config, key), getattr(config, "hidden_size", None), getattr(config, "head_dim", None)
    fixed = {} if size or type(width) is not int else {f"{prefix}head_dim": width // num}
    size = size or next(iter(fixed.values()), 1)
    if groups is None:
        return UnitField("heads", prefix + key, num, {}, fixed, size)
    num_groups = getattr(config, groups)
    group = num // num_groups
    return UnitField("heads", prefix + groups, num_groups, {prefix + key: group}, fixed, size, group)


def _implied(model: nn.Module, same: nn.Module, path: str) -> int:
    """The number that a class takes where a field has none; 0 where nothing follows the field."""
    try:
        few, more = (tensors_of(built(model, {path: num}, f"{path} {num}")) for num in (8, 16))
    except ValueError:
        return 0
    for name, tensor in tensors_of(same).items():
        for dim, size in enumerate(tensor.shape):
            if name in few and name in more and (step := more[name].shape[dim] - few[name].shape[dim]) > 0:
                return 8 * size // step
    return 0


def fewer(model: Any, field: UnitField) -> tuple[int, nn.Module]:
    """The model with fewer units of a field, and their number: the largest that the class takes."""
    numbers = [field.num - max(1, field.num // 4), field.num // 2, field.num - 1]
    if field.kind == "heads":
        numbers = list(range(field.num - 1, 0, -1))
    refusals: list[ValueError] = []
    for left in dict.fromkeys(numbers):
        try:
            return left, built(model, field.values(left), f"{field.path} {left}")
        except ValueError as error:
            refusals.append(error)
    raise refusals[0]
