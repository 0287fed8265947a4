"""A model beside one that its class builds from a changed configuration, without memory for weights.

Tensors and numbers in which the two differ are what the change is about; a list of modules that becomes shorter with a
field is a list of blocks. Nothing rests on a family's names of modules, and a model that is cut accordingly is the one
that its new configuration builds.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from .cuts import Cuts
from .units import MISSING, Number

PLAIN = (bool, int, float, str, list, tuple, type(None))


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


# Fewer layers

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
    others = dict(less.named_modules(remove_duplicate=False))
    for old, new in names.items():
        module, other = same.get_submodule(old), others.pop(new, None)
        # by name, since parametrizations make a class for each module
        if len({(type(one).__module__, type(one).__qualname__) for one in (module, other)}) > 1:
            return f"{old} is {type(module).__name__}, but its new configuration builds {type(other).__name__} there"
        for kind in ("_parameters", "_buffers"):
            shapes = [{k: v if v is None else v.shape for k, v in getattr(m, kind).items()} for m in (module, other)]
            if shapes[0] != shapes[1]:
                return f"the tensors of {old or type(same).__name__} are others with fewer layers"
    return f"the new configuration builds {next(iter(others))} too" if others else ""


def _check_computed(name: str, own: nn.Module, other: nn.Module) -> None:
    """Refuse to move a module to the place of another where their class computes buffers that no folder holds."""
    for key in own._non_persistent_buffers_set:
        a, b = (module._buffers.get(key) for module in (own, other))
        if a is not None and b is not None and not torch.equal(a, b):
            raise ValueError(f"{name}.{key} is computed from the number of the layer")
