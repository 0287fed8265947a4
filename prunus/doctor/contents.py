"""What a path holds, names and shapes first, values one tensor at a time; and masks however they are stored."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..masks import Masks, digest
from ..ops import bits
from .findings import Finding


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when ``load`` is called, and the file it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    load: Callable[[], Tensor]

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers, not pairs of them as in float4."""
        return self.dtype.startswith(("float", "bfloat")) and not self.dtype.startswith("float4")

    @classmethod
    def of(cls, name: str, tensor: Tensor, file: str) -> "StoredTensor":
        """A tensor that is in memory, or mapped into it."""
        return cls(name, tuple(tensor.shape), plain_dtype(tensor.dtype), file, lambda: tensor.detach())


@dataclass
class Contents:
    """What a path holds; ``findings`` and ``notes`` are those of reading it."""

    path: Path
    kind: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    masks: dict[str, StoredTensor] = field(default_factory=dict)  # boolean, or packed bits
    config: dict[str, Any] = field(default_factory=dict)  # config.json of Hugging Face
    pruned: dict[str, Any] = field(default_factory=dict)  # result.json of ``prunus prune``
    model: str = ""  # of ``prunus train``
    moments: list[dict[str, Tensor]] = field(default_factory=list)  # optimizer state of weights that have a mask
    digests: dict[str, str] = field(default_factory=dict)  # by the place that stores them
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)  # files that stay open until all is read

    def find(self, kind: str, where: str, what: str, todo: str) -> None:
        self.findings.append(Finding(kind, where, what, todo))


def plain_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_mask(stored: StoredTensor, shape: tuple[int, ...]) -> Tensor | None:
    """The boolean mask of a tensor of ``shape``, from booleans, numbers or packed bits; None if it does not fit."""
    mask = widened(stored.load())
    if tuple(mask.shape) == shape and (mask.dtype != torch.uint8 or not mask.numel() or int(mask.max()) <= 1):
        return mask != 0
    numel = math.prod(shape)
    if mask.shape != (bits.num_bytes(numel),):
        return None
    packed = mask.to(torch.uint8).contiguous()
    if numel % 8 and int(packed[-1]) >> (numel % 8):
        return None  # bits beyond the end: of another tensor
    return bits.unpack(packed, shape)


def is_nonzero(tensor: Tensor) -> Tensor:
    """Where a tensor is not zero; -0.0 is zero, NaN is not."""
    return widened(tensor) != 0


def widened(tensor: Tensor) -> Tensor:
    """A float8 as float32, since few operations know it, pairs of float4 as bytes; any other tensor as it is."""
    if plain_dtype(tensor.dtype).startswith("float4"):
        return tensor.view(torch.uint8)
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def digest_of(masks: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> str | None:
    """``masks.digest`` of stored masks, one bit a weight in memory; None if a mask does not fit its tensor."""
    weights, packed = {}, {}
    for name, stored in masks.items():
        shape = tensors[name].shape if name in tensors else stored.shape
        mask = stored_mask(stored, shape)
        if mask is None:
            return None
        weights[name], packed[name] = torch.empty(shape, device="meta"), bits.pack(mask)
    return digest(Masks(weights, packed))
