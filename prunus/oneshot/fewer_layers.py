"""How a model differs from one with fewer layers, found by building both from a configuration, without memory.

A list of modules that becomes shorter with a field of the configuration is a list of blocks. Nothing rests on the names
of a family's modules: a model without some blocks is the one that its new configuration builds.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .built_twice import PLAIN, built_from, unlike
from .units import Number

COUNTS = re.compile("layer|depth|block")  # in the names of fields that may say how many blocks there are
PLACES = re.compile("layers|indices|indexes")  # of lists that hold numbers of layers
PERIODS = re.compile("period|interval|offset|every|freq|first_k|_step|window_layers|sparse")  # which layer is which
Gone = Mapping[str, Collection[int]]  # by name of a list of blocks, which of them go


@dataclass(frozen=True)
class _Field:
    """Where a configuration says a number of blocks: an attribute, or a place in the list that it is."""

    path: tuple[str, ...]  # from the configuration to the one inside it
    key: str
    place: int | None = None

    def __str__(self) -> str:
        return ".".join((*self.path, self.key)) + ("" if self.place is None else f"[{self.place}]")


@dataclass(frozen=True)
class BlockList:
    """Blocks of one list, and the field of the configuration that says their number."""

    name: str
    num: int
    field: _Field | None = None  # None where the model has no configuration


@dataclass(frozen=True)
class FewerLayers:
    """Lists of blocks, and what changes where some of them are gone."""

    model: nn.Module
    lists: list[BlockList]
    _same: nn.Module | None = field(default=None, repr=False)  # as the configuration builds it

    @property
    def periods(self) -> str:
        """What the configuration says about layers by their numbers, to end a sentence."""
        configs = _configs(getattr(self.model, "config", None))
        keys = [key for _, inner in configs for key, value in vars(inner).items() if PERIODS.search(key) and value]
        return f"; its config says by number which layer is which: {', '.join(keys)}" if keys else ""

    def modules(self, blocks: BlockList) -> list[nn.Module]:
        return [*self.model.get_submodule(blocks.name).children()]

    def numbers(self, gone: Gone) -> list[Number]:
        """Attributes of modules and configurations that change where the blocks ``gone`` are gone.

        ValueError where the class does not build what stays, at the places where it stays.
        """
        if self._same is None:
            return []
        config = deepcopy(self._same.config)
        for blocks in self.lists:
            _shorten(config, blocks, gone.get(blocks.name, ()))
        less, names = _built(self.model, config), _names(self._same, gone)
        if reason := _difference(self._same, less, names):
            raise ValueError(reason + self.periods)
        numbers: list[Number] = []
        seen: set[int] = set()
        modules = dict(self.model.named_modules())
        for old, new in names.items():
            own = self.model.get_submodule(old)
            _check_computed(old, own, modules.get(new) if new != old else None)
            _compare(own, self._same.get_submodule(old), less.get_submodule(new), numbers, seen)
        return numbers


def fewer_layers(model: Any, blocks: Sequence[nn.Module]) -> FewerLayers:
    """The lists of blocks of a model; without a configuration, the one that holds ``blocks``.

    ValueError where there is none, or where the model is not what its configuration builds.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        lists = [
            BlockList(name, len(blocks)) for name, module in _lists(model).items() if [*module.children()] == [*blocks]
        ]
        if not blocks or not lists:
            raise ValueError(f"{type(model).__name__} has no list of blocks, so that no layer can be removed")
        return FewerLayers(model, lists[:1])
    same = _built(model, config)
    if name := unlike(model, same):
        raise ValueError(f"{name} has not the shape that the model's config says; no layer can be removed")
    lists, reasons = {}, []
    for counts in _fields(config, {len(module) for module in _lists(model).values()}):
        try:
            names = _shorter(model, same, counts)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if len(names) > 1:
            reasons.append(f"a layer is in {len(names)} lists, {names[0]} to {names[-1]}, and no module of its own")
        elif names:
            lists.setdefault(names[0], BlockList(names[0], len(_lists(same)[names[0]]), counts))
    if not lists:
        why = reasons[0] if reasons else "its config sets the length of no list of blocks; one may run many times"
        raise ValueError(f"no layer of {type(model).__name__} can be removed: {why}")
    return FewerLayers(model, _apart([*lists.values()]), same)


def _apart(lists: list[BlockList]) -> list[BlockList]:
    """Lists of which none is in another: blocks of stages go before stages, and blocks before what is in them."""
    of_stages = {blocks.name for blocks in lists if blocks.field is not None and blocks.field.place is not None}
    lists = [blocks for blocks in lists if not any(name.startswith(f"{blocks.name}.") for name in of_stages)]
    return [a for a in lists if not any(a.name.startswith(f"{b.name}.") for b in lists)]


def _lists(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)}


def _configs(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A configuration and those inside it, with their paths."""
    if hasattr(config, "to_dict"):
        yield path, config
        for key, inner in list(vars(config).items()):
            yield from _configs(inner, (*path, key))


def _inner(config: Any, path: Sequence[str]) -> Any:
    for key in path:
        config = getattr(config, key)
    return config


def _fields(config: Any, lengths: Collection[int]) -> list[_Field]:
    """Fields that may say how long a list of modules is."""
    fields = []
    for path, inner in _configs(config):
        for key, value in vars(inner).items():
            if COUNTS.search(key) is None:
                continue
            if type(value) is int and value > 1 and value in lengths:
                fields.append(_Field(path, key))
            elif isinstance(value, list | tuple) and all(type(num) is int for num in value):
                fields += [_Field(path, key, place) for place, num in enumerate(value) if num > 1 and num in lengths]
    return fields


def _shorten(config: Any, blocks: BlockList, gone: Collection[int]) -> None:
    """Take the blocks ``gone`` out of a configuration: of the number, and of lists by layer and of layers."""
    if not gone or blocks.field is None:
        return
    inner, key, place = _inner(config, blocks.field.path), blocks.field.key, blocks.field.place
    kept = [i for i in range(blocks.num) if i not in gone]
    if place is not None:
        values = list(getattr(inner, key))
        values[place] = len(kept)
        setattr(inner, key, values)
        return
    public = {other: value for other, value in vars(inner).items() if not other.startswith("_")}
    for other, value in public.items():
        if isinstance(value, list | tuple) and len(value) == blocks.num:
            setattr(inner, other, type(value)(value[i] for i in kept))
        elif PLACES.search(other) and _are_indices(value, blocks.num):
            setattr(inner, other, type(value)(kept.index(i) for i in value if i in kept))
    setattr(inner, key, len(kept))
    stages = getattr(inner, "stage_names", None) or ()  # of backbones: what comes before the blocks, and each of them
    if len(stages) == blocks.num + 1:
        inner.stage_names = stages[: len(kept) + 1]
        if inner.out_features == stages[-1:]:
            inner.out_features = inner.stage_names[-1:]


def _are_indices(value: Any, num: int) -> bool:
    if not isinstance(value, list | tuple) or not value or not all(type(i) is int for i in value):
        return False
    return len({*value}) == len(value) and 0 <= min(value) <= max(value) < num


def _built(model: Any, config: Any) -> Any:
    """The model that a configuration builds once it was saved and loaded."""
    return built_from(model, lambda: type(config).from_dict(deepcopy(config.to_dict())), "the changed configuration")


def _shorter(model: nn.Module, same: Any, counts: _Field) -> list[str]:
    """Names of the lists that are one shorter where the field is one less."""
    value = getattr(_inner(same.config, counts.path), counts.key)
    num = value if counts.place is None else value[counts.place]
    config = deepcopy(same.config)
    _shorten(config, BlockList("", num, counts), [num - 1])
    less = _lists(_built(model, config))
    return [
        name for name, module in _lists(same).items() if name in less and len(less[name]) == len(module) - 1 == num - 1
    ]


def new_keys(blocks: nn.Module, gone: Collection[int]) -> dict[str, str]:
    """The keys of the blocks that stay, and their new ones: numbers follow one another, names stay."""
    kept = [key for place, key in enumerate(blocks._modules) if place not in gone]
    return {key: str(place) if key.isdecimal() else key for place, key in enumerate(kept)}


def _names(same: nn.Module, gone: Gone) -> dict[str, str]:
    """For each module that stays its new name."""
    keys = {name: new_keys(same.get_submodule(name), places) for name, places in gone.items() if places}
    names = {}
    for old, _ in same.named_modules(remove_duplicate=False):
        new = old
        for name, kept in keys.items():
            if old.startswith(f"{name}."):
                key, dot, rest = old.removeprefix(f"{name}.").partition(".")
                new = f"{name}.{kept[key]}{dot}{rest}" if key in kept else ""
        if new or not old:
            names[old] = new
    return names


def _kind(module: nn.Module | None) -> tuple[str, str]:
    """Its class by name: parametrizations make a class for each module."""
    return type(module).__module__, type(module).__qualname__


def _difference(same: nn.Module, less: nn.Module, names: Mapping[str, str]) -> str:
    """In what the modules that stay are not those that the class builds; empty where they are."""
    built = dict(less.named_modules(remove_duplicate=False))
    for old, new in names.items():
        module, other = same.get_submodule(old), built.pop(new, None)
        if _kind(module) != _kind(other):
            return f"{old} is {type(module).__name__}, but its new configuration builds {type(other).__name__} there"
        for kind in ("_parameters", "_buffers"):
            shapes = [{k: v if v is None else v.shape for k, v in getattr(m, kind).items()} for m in (module, other)]
            if shapes[0] != shapes[1]:
                return f"the tensors of {old or type(same).__name__} are others with fewer layers"
    return f"the new configuration builds {next(iter(built))} too" if built else ""


def _check_computed(name: str, own: nn.Module, other: nn.Module | None) -> None:
    """Refuse to move a module to the place of another where their class computes buffers that no folder holds."""
    for key in own._non_persistent_buffers_set if other is not None else ():
        a, b = (module._buffers.get(key) for module in (own, other) if module is not None)
        if a is not None and b is not None and not torch.equal(a, b):
            raise ValueError(f"{name}.{key} is computed from the number of the layer")


def _compare(own: Any, same: Any, less: Any, numbers: list[Number], seen: set[int]) -> None:
    """Collect the attributes that differ between two modules or configurations, and those of configurations in them."""
    if id(own) in seen:
        return
    seen.add(id(own))
    for key in vars(same).keys() & vars(less).keys() & vars(own).keys():
        before, value, other = (vars(each)[key] for each in (own, same, less))
        if all(hasattr(each, "to_dict") for each in (before, value, other)):
            _compare(before, value, other, numbers, seen)
        elif isinstance(value, PLAIN) and isinstance(other, PLAIN) and value != other:
            numbers.append((own, key, other))
