"""Neurons and head groups of a Hugging Face model, found by building its class with fewer of them.

No family has code of its own: fields of the configuration say how many units there are, tensors whose shapes follow
them hold the units, and a check on one sample decides where in a fused weight each unit lies.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import Any

from torch import nn

from ..eligible import outputs_of
from ..ranks import is_dtensor
from .built_twice import as_built, built, changed_dims, changed_numbers, configs, new_config, set_fields_, tensors_of
from .calibration import Calibration
from .layers import Reader
from .unit_check import UnitCheck, drawn
from .units import Kind, Number, Plan, Slices, UnitLayer, places_of, role

MOST_LAYOUTS = 32  # that are tried
INSTEAD: dict[Kind, str] = {
    "neurons": "remove heads, experts or layers instead",
    "heads": "remove neurons or layers instead",
}
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


def config_plan(calibration: Calibration) -> Plan:
    """Neurons and head groups of a configured model, checked on the first sample; the model stays as it is."""
    model = calibration.model
    assert not calibration.is_open, "its blocks may be on another device"
    _check_model(model)
    same = as_built(model, "which units it has is not clear")
    check = UnitCheck.of(calibration)
    fields: dict[str, UnitField] = {}
    layers: list[UnitLayer] = []
    refused: dict[Kind, dict[str, str]] = {"neurons": {}, "heads": {}}
    counted: set[Kind] = set()
    for unit_field in unit_fields(model, same):
        counted.add(unit_field.kind)
        try:
            of_field = _layers_of(check, same, unit_field)
        except ValueError as error:
            refused[unit_field.kind].setdefault(unit_field.path, str(error))
            continue
        taken = {name for layer in layers for name in layer.slices}
        if of_field and not any(name in taken for layer in of_field for name in layer.slices):
            fields[unit_field.path] = unit_field
            layers += of_field
    kinds = {layer.kind for layer in layers}
    reasons: dict[Kind, str] = {}
    for kind in (kind for kind in refused if kind not in kinds):
        other = f"no field of the configuration of {type(model).__name__} says how many {kind} a layer has"
        other = _tied(model) if kind in counted and kind == "heads" else other
        reasons[kind] = f"{next(iter(refused[kind].values()), other)}; {INSTEAD[kind]}"
    return Plan(layers, reasons, partial(_allowed, model, fields), partial(_numbers, model, fields), refused)


def _tied(model: nn.Module) -> str:
    name = type(model).__name__
    return f"{name} ties the size of its heads to its width, so that fewer heads do not make it smaller"


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantised; shrink the model in floating point, then quantise it")
    for key, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"{key} is {parameter.dtype}; shrink the model in floating point, then quantise it")
        if is_dtensor(parameter):
            raise ValueError(f"{key} is sharded over ranks; shrink the whole model in one process, then shard it")


def _allowed(model: nn.Module, fields: Mapping[str, UnitField], path: str) -> Sequence[int]:
    """How many units may stay: of heads, some configurations take only divisors of the width."""
    counted = fields[path]
    if counted.kind == "neurons":
        return range(1, counted.num + 1)
    allowed = []
    for left in range(1, counted.num):
        with suppress(Exception):  # what a class may raise is not known
            new_config(model, partial(set_fields_, values=counted.values(left)))
            allowed.append(left)
    return [*allowed, counted.num]


def _numbers(model: nn.Module, fields: Mapping[str, UnitField], left: Mapping[str, int]) -> list[Number]:
    """Attributes of modules and configurations that change where ``left`` units of each field stay."""
    changed = {path: num for path, num in left.items() if num != fields[path].num}
    values = {key: value for path, num in changed.items() for key, value in fields[path].values(num).items()}
    said = " and ".join(f"{key} {value}" for key, value in values.items())
    return changed_numbers(model, built(model, {}, "its own numbers"), built(model, values, said))


def _layers_of(check: UnitCheck, same: nn.Module, field: UnitField) -> list[UnitLayer]:
    """Layers whose units a field counts, none where no tensor follows it; ValueError where they cannot go."""
    model = check.model
    left, less = fewer(model, field)
    dims = _dims(model, same, less, field, left)
    if not dims:
        return []
    owners = _owners(model, dims, field)
    numbers = changed_numbers(model, same, less)
    faults: list[str] = []
    for layers in islice(_candidates(model, dims, owners, field), MOST_LAYOUTS):
        fault = check.fault(drawn(dict.fromkeys(layers, field.num - left)), numbers, less)
        if not fault:
            return layers
        faults.append(fault)
    tried = "" if len(faults) == 1 else f" ({len(faults)} layouts of the weights were tried)"
    raise ValueError(f"{field.kind} of {type(model).__name__} cannot be removed one at a time: {faults[0]}{tried}")


def _layouts(size: int, head_size: int = 1, group_size: int = 1) -> list[tuple[int, ...]]:
    """Parts that a dimension with ``size`` places a unit may consist of, the most frequent ones first.

    One part: the places of a unit are neighbours. Equal parts: [gate | up], [q | k | v], or query heads of which every
    n-th reads the same keys. Unequal ones: [q | k | v] with ``group_size`` query heads for each key and value head.
    """
    num_heads, rest = divmod(size, head_size)
    if rest or num_heads == 1:
        return [(size,)]
    grouped = (group_size * head_size, head_size, head_size)
    equal = [(size // num,) * num for num in (3, 2, num_heads) if num_heads % num == 0]
    unequal = [grouped] if sum(grouped) == size else []
    return list(dict.fromkeys([*unequal, (size,), *equal]))


def _candidates(
    model: nn.Module, dims: Mapping[str, int], owners: Mapping[str, str], field: UnitField
) -> Iterator[list[UnitLayer]]:
    """Layers of units, in every layout that the weights of the same role may have."""
    tensors, choices = tensors_of(model), {}
    for name, dim in dims.items():
        size = tensors[name].shape[dim] // field.num
        choices[role(name)] = _layouts(size, field.head_size, field.group_size)
    for parts in product(*choices.values()):
        by_role = {name: places_of(field.num, part) for name, part in zip(choices, parts, strict=True)}
        slices: dict[str, dict[str, Slices]] = {}
        for name, consumer in owners.items():
            slices.setdefault(consumer, {})[name] = Slices(dims[name], by_role[role(name)])
        yield [UnitLayer(field.kind, field.path, consumer, held) for consumer, held in slices.items()]


def _dims(model: nn.Module, same: nn.Module, less: nn.Module, field: UnitField, left: int) -> dict[str, int]:
    """By name of a tensor that follows the field, the dimension that has equally many places for each unit."""
    own, smaller = tensors_of(same), tensors_of(less)
    if set(own) != set(smaller):
        name = next(iter(set(own) ^ set(smaller)))
        raise ValueError(f"with fewer {field.path}, {type(model).__name__} has other tensors: {name}")
    dims = {}
    for name, changed in changed_dims(model, less).items():
        tensor = own[name]
        size, after = tensor.shape[changed[0]], smaller[name].shape[changed[0]]
        if len(changed) > 1 or size * left != after * field.num or size % field.num:
            why = "" if field.kind == "neurons" else ", or the size of its heads changes with their number"
            raise ValueError(f"{field.path} does not divide {name}, {list(tensor.shape)}, into equal parts{why}")
        if field.kind == "neurons" and tensor.ndim == 3 and not _is_layer(model, name):
            raise ValueError(f"{name} stacks experts, whose neurons stay")
        dims[name] = changed[0]
    return dims


def _is_layer(model: nn.Module, name: str) -> bool:
    path, _, key = name.rpartition(".")
    return key == "weight" and Reader(model.get_submodule(path)).is_known


def _owners(model: nn.Module, dims: Mapping[str, int], field: UnitField) -> dict[str, str]:
    """By name of a tensor, the consumer whose units it holds: the one with which it shares the longest path."""
    consumers = [name for name, dim in dims.items() if _is_layer(model, name) and _reads(model, name, dim)]
    if not consumers and field.kind == "heads":
        raise ValueError(_tied(model))
    if not consumers:
        raise ValueError(f"no layer of {type(model).__name__} reads the units that {field.path} counts")
    persistent, tensors = set(model.state_dict()), tensors_of(model)
    modules = list(model.modules())
    places = Counter(id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
    owners = {}
    for name in dims:
        shared = {consumer: _shared(name, consumer) for consumer in consumers}
        nearest = [consumer for consumer in consumers if shared[consumer] == max(shared.values())]
        if name not in consumers and len(nearest) > 1:
            raise ValueError(f"{name} follows {field.path}, but of which layer is unclear: {' or '.join(nearest[:2])}")
        if places[id(tensors[name])] > 1 or name not in persistent:
            why = "is shared by several layers" if name in persistent else "is computed and not stored"
            raise ValueError(f"{name} follows {field.path}, but {why}")
        owners[name] = name if name in consumers else nearest[0]
    return owners


def _reads(model: nn.Module, name: str, dim: int) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return getattr(module, "groups", 1) == 1 and dim not in (outputs_of(module, weight) or ())


def _shared(name: str, other: str) -> int:
    """How many parts of their paths two names share from the start."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return next((num for num, (a, b) in enumerate(pairs) if a != b), 0)
