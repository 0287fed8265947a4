"""Names and shapes in which transformers stores the tensors of a model, where these differ from the model's own.

From version 5 on transformers converts what it reads: names differ, and experts that are stored one by one become one
stacked tensor. Here a tensor of the model is made from stored ones, and back, without the others.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..files.safetensors_header import DTYPES, NAMES
from ..files.writer import TensorSource, TensorSpec

Read = Callable[[str], Tensor]


def is_known() -> bool:
    """Whether transformers says how it converts files: before version 5 it renamed tensors, at most."""
    return find_spec("transformers.core_model_loading") is not None


class Unfit(Exception):
    """Why the model of a folder must be held in memory as a whole."""


@dataclass(frozen=True)
class Maker:
    """Makes tensors of a model from stored ones; without a converter it is the one that is stored."""

    name: str  # of the model's tensor, the first if there are several
    converter: Any | None
    stored: list[tuple[str, str]] = field(default_factory=list)  # the converter's pattern and the stored name

    def make(self, model: Any, read: Read) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.name: read(self.stored[0][1])}
        converter = deepcopy(self.converter)
        for pattern, stored in self.stored:
            converter.add_tensor(self.name, stored, pattern, read(stored))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def makers(model: Any, stored: Mapping[str, TensorSpec]) -> tuple[dict[str, Maker], list[str]]:
    """What makes each tensor of a model on meta, which then knows how it is stored, and stored names of no use."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    known, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = {p: one for one in mapping if isinstance(one, WeightConverter) for p in one.source_patterns}
    distinct = list(dict.fromkeys(converters.values()))
    made: dict[str, Maker] = {}
    strange = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, distinct, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target in known:
            maker = made.setdefault(target, Maker(target, converters.get(pattern or "")))
            maker.stored.append((pattern or name, name))
        else:
            strange.append(name)
    model._weight_conversions = [one for one in mapping if one.was_used()]
    by_name: dict[str, Maker] = {}
    for maker in made.values():
        for name, value in maker.make(model, lambda name: _empty(stored[name])).items():
            if name not in known:
                raise Unfit(f"{maker.stored[0][1]} becomes {name}, which the model does not have")
            if (expected := known[name].shape) != value.shape:
                raise ValueError(f"the shape of {name} is {list(value.shape)} in files, {list(expected)} in the model")
            by_name[name] = maker
    return by_name, strange


def as_stored(model: Any, source: TensorSource) -> TensorSource:
    """The same tensors under the names and in the shapes in which ``save_pretrained`` stores them."""
    if not is_known():
        return replace(source, aliases={}, order=list(source.specs))
    from transformers.core_model_loading import revert_weight_conversion

    specs: dict[str, TensorSpec] = {}
    homes: dict[str, list[str]] = {}  # the model's tensors from which a stored one is made
    for names in _together(model, source.specs):
        made = revert_weight_conversion(model, {name: _empty(source.specs[name]) for name in names})
        specs |= {name: TensorSpec(NAMES[value.dtype], tuple(value.shape)) for name, value in made.items()}
        homes |= dict.fromkeys(made, names)
    last: list[tuple[list[str], dict[str, Tensor]]] = []

    def fetch(name: str) -> Tensor:
        if not last or last[0][0] is not homes[name]:
            last.clear()
            last.append((homes[name], revert_weight_conversion(model, {n: source.fetch(n) for n in homes[name]})))
        return last[0][1][name].contiguous()

    return replace(source, specs=specs, aliases={}, fetch=fetch, order=list(specs))


def _together(model: Any, names: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Names of tensors that are converted together when they are stored."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = getattr(model, "_weight_conversions", None)
    mapping = get_model_conversion_mapping(model, add_legacy=False) if mapping is None else mapping
    backward = [one.reverse_transform() for one in mapping[::-1] if hasattr(one, "operations")]
    groups: dict[str, list[str]] = {}
    for name in names:
        renamed = (converter.rename_source_key(name) for converter in backward)
        target = next((target for target, pattern in renamed if pattern is not None), name)
        groups.setdefault(target, []).append(name)
    return list(groups.values())


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
