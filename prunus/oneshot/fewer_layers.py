"""How a model differs from one with fewer layers, found by building both from a configuration, without memory.

A list of modules that becomes shorter with a field of the configuration is a list of blocks. Nothing rests on the names
of a family's modules: a model without some blocks is the one that its new configuration builds.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .built_twice import as_built, built_with, changed_numbers, configs, home_of_field
from .cuts import Cuts

COUNTS = re.compile("layer|depth|block")  # in the names of fields that may say how many blocks there are
PLACES = re.compile("layers|indices|indexes")  # of lists that hold numbers of layers
PERIODS = re.compile("period|interval|offset|every|freq|first_k|_step|window_layers|sparse")  # which layer is which


@dataclass(frozen=True)
class BlockList:
    """Blocks of one list, and the field of the configuration, or the place in it, that says their number."""

    name: str
    num: int
    field: str = ""
    place: int | None = None


@dataclass(frozen=True)
class FewerLayers:
    """Lists of blocks, and what changes where some of them are gone."""

    model: nn.Module
    lists: list[BlockList]
    _same: nn.Module | None = field(default=None, repr=False)  # as the configuration builds it

    @property
    def periods(self) -> str:
        """What the configuration says about layers by their numbers, to end a sentence."""
        inner = configs(getattr(self.model, "config", None))
        keys = [key for _, config in inner for key, value in vars(config).items() if PERIODS.search(key) and value]
        return f"; its config says by number which layer is which: {', '.join(keys)}" if keys else ""

    def cuts(self, places: Sequence[tuple[str, int]]) -> Cuts:
        """The model without blocks, by list and place, not applied yet; ValueError if the class builds another."""
        gone = {name: [i for other, i in places if other == name] for name, _ in places}
        kept = {name: _new_keys(self.model.get_submodule(name), those) for name, those in gone.items()}
        if self._same is None:
            return Cuts.of_blocks(self.model, kept, [])
        lists = [(blocks, gone[blocks.name]) for blocks in self.lists if blocks.name in gone]
        less, names = _built_without(self._same, lists), _names(self._same, kept)
        if reason := _difference(self._same, less, names):
            raise ValueError(reason + self.periods)
        modules = dict(self.model.named_modules())
        for old, new in names.items():
            if new != old and new in modules:
                _check_computed(old, self.model.get_submodule(old), modules[new])
        return Cuts.of_blocks(self.model, kept, changed_numbers(self.model, self._same, less, names))


def fewer_layers(model: Any, blocks: Sequence[nn.Module]) -> FewerLayers:
    """The model's lists of blocks, without a configuration the one that holds ``blocks``; ValueError without any."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        lists = [
            BlockList(name, len(blocks)) for name, module in _lists(model).items() if [*module.children()] == [*blocks]
        ]
        if not blocks or not lists:
            raise ValueError(f"{type(model).__name__} has no list of blocks, so that no layer can be removed")
        return FewerLayers(model, lists[:1])
    same = as_built(model, "no layer can be removed")
    found, reasons = {}, []
    for counts in _counts(same.config, {len(module) for module in _lists(model).values()}):
        num = counts.num
        try:
            less = _lists(_built_without(same, [(counts, [num - 1])]))
        except ValueError as error:
            reasons.append(str(error))
            continue
        shorter = {name for name, blocks in less.items() if len(blocks) == num - 1}
        names = [name for name, blocks in _lists(same).items() if len(blocks) == num and name in shorter]
        if len(names) > 1:
            reasons.append(f"a layer is in {len(names)} lists, {names[0]} to {names[-1]}, and no module of its own")
        elif names:
            found.setdefault(names[0], replace(counts, name=names[0]))
    if not found:
        why = reasons[0] if reasons else "its config sets the length of no list of blocks; one may run many times"
        raise ValueError(f"no layer of {type(model).__name__} can be removed: {why}")
    # of lists in one another, blocks of stages go before stages, and blocks before what is in them
    of_stages = [blocks for blocks in found.values() if blocks.place is not None]
    lists = [one for one in found.values() if not any(stage.name.startswith(f"{one.name}.") for stage in of_stages)]
    prefixes = tuple(f"{one.name}." for one in lists)
    return FewerLayers(model, [one for one in lists if not one.name.startswith(prefixes)], same)


def _lists(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)}


def _counts(config: Any, lengths: Collection[int]) -> list[BlockList]:
    """Fields, and places in them, that may say how long a list of modules is, whose name is not known yet."""
    counts: list[BlockList] = []
    for path, inner in configs(config):
        for key, value in vars(inner).items():
            if COUNTS.search(key) is None:
                continue
            if type(value) is int and value > 1 and value in lengths:
                counts.append(BlockList("", value, path + key))
            elif isinstance(value, list | tuple) and all(type(num) is int for num in value):
                places = ((place, num) for place, num in enumerate(value) if num > 1 and num in lengths)
                counts += [BlockList("", num, path + key, place) for place, num in places]
    return counts


def _shorten_(lists: Sequence[tuple[BlockList, Collection[int]]], config: Any) -> None:
    """Take blocks that are gone out of a configuration: of the number, and of lists by layer and of layers."""
    for blocks, gone in lists:
        inner, key = home_of_field(config, blocks.field)
        kept = [i for i in range(blocks.num) if i not in gone]
        if blocks.place is not None:
            values = list(getattr(inner, key))
            values[blocks.place] = len(kept)
            setattr(inner, key, values)
            continue
        public = {k: v for k, v in vars(inner).items() if isinstance(v, list | tuple) and not k.startswith("_")}
        for other, value in public.items():
            places = [i for i in range(blocks.num) if PLACES.search(other) and i in value]
            if len(value) == blocks.num:
                setattr(inner, other, type(value)(value[i] for i in kept))
            elif value and len(places) == len(value):  # numbers of layers, each once
                setattr(inner, other, type(value)(kept.index(i) for i in value if i in kept))
        setattr(inner, key, len(kept))
        stages = getattr(inner, "stage_names", None) or ()  # of backbones: what is before the blocks, and each of them
        if len(stages) == blocks.num + 1:
            inner.stage_names = stages[: len(kept) + 1]
            if inner.out_features == stages[-1:]:
                inner.out_features = inner.stage_names[-1:]


def _built_without(same: nn.Module, lists: Sequence[tuple[BlockList, Collection[int]]]) -> Any:
    return built_with(same, partial(_shorten_, lists), "the changed configuration")


def _new_keys(blocks: nn.Module, gone: Collection[int]) -> dict[str, str]:
    """The keys of the blocks that stay, and their new ones: numbers follow one another, names stay."""
    kept = [key for place, key in enumerate(blocks._modules) if place not in gone]
    return {key: str(place) if key.isdecimal() else key for place, key in enumerate(kept)}


def _names(same: nn.Module, keys: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
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


def _difference(same: nn.Module, less: nn.Module, names: Mapping[str, str]) -> str:
    """In what the modules that stay are not those that the class builds; empty where they are."""
    built = dict(less.named_modules(remove_duplicate=False))
    for old, new in names.items():
        module, other = same.get_submodule(old), built.pop(new, None)
        # by name, since parametrizations make a class for each module
        if len({(type(one).__module__, type(one).__qualname__) for one in (module, other)}) > 1:
            return f"{old} is {type(module).__name__}, but its new configuration builds {type(other).__name__} there"
        for kind in ("_parameters", "_buffers"):
            shapes = [{k: v if v is None else v.shape for k, v in getattr(m, kind).items()} for m in (module, other)]
            if shapes[0] != shapes[1]:
                return f"the tensors of {old or type(same).__name__} are others with fewer layers"
    return f"the new configuration builds {next(iter(built))} too" if built else ""


def _check_computed(name: str, own: nn.Module, other: nn.Module) -> None:
    """Refuse to move a module to the place of another where their class computes buffers that no folder holds."""
    for key in own._non_persistent_buffers_set:
        a, b = (module._buffers.get(key) for module in (own, other))
        if a is not None and b is not None and not torch.equal(a, b):
            raise ValueError(f"{name}.{key} is computed from the number of the layer")
