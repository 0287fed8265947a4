"""Tensors to be written: in memory, or read one at a time from files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import packed_masks
from ..ops import bits
from .reader import Tensors
from .safetensors_header import check_names, dtype_name


@dataclass(frozen=True)
class Spec:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Types and shapes of tensors by name, other names of some, and the function that fetches one."""

    specs: dict[str, Spec]
    aliases: dict[str, str]  # another name to the name that is in ``specs``
    fetch: Callable[[str], Tensor]
    order: list[str]  # all names as they were given
    metadata: dict[str, str]


def in_memory(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Source:
    """The tensors of a mapping; those that share all their memory are stored once."""
    check_names(tensors)
    first: dict[tuple, str] = {}
    specs: dict[str, Spec] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        specs[name] = Spec(dtype_name(name, tensor.dtype), tuple(tensor.shape))

    def fetch(name: str) -> Tensor:
        return tensors[name].detach().resolve_conj().resolve_neg()

    return Source(specs, aliases, fetch, list(tensors), dict(metadata or {}))


def from_files(tensors: Tensors) -> Source:
    """The tensors of open files, read when they are fetched."""
    records = tensors.records
    specs = {name: Spec(r.dtype, r.layout.shape) for name, r in records.items() if r.same_as is None}
    aliases = {name: record.same_as for name, record in records.items() if record.same_as is not None}
    return Source(specs, aliases, tensors.read, list(records), tensors.metadata)


def check_masks(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Refuse a weight that is not zero where its boolean mask says pruned; a zero that is kept is legal."""
    for name, packed in packed_masks(masks, tensors).items():
        check_pruned(name, tensors[name], packed)


def check_pruned(name: str, tensor: Tensor, packed: Tensor) -> None:
    wrong = (tensor.detach() != 0) & ~bits.unpack(packed.to(tensor.device), tensor.shape)
    if count := int(wrong.sum()):
        raise ValueError(
            f"{name} has {count} non-zero weights where its mask says pruned; apply the mask, or leave it off"
        )


def _check(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type == "meta" or hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is no ordinary tensor in memory; gather it or make it dense first")
