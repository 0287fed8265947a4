"""What a path holds: names and shapes first, values one tensor at a time."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..masks import position_sum
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
        return self.dtype.startswith(("float", "bfloat"))

    @classmethod
    def of(cls, name: str, tensor: Tensor, file: str) -> "StoredTensor":
        """A tensor that is in memory, or mapped into it."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype), file, lambda: tensor.detach())


@dataclass
class Contents:
    """What a path holds; ``findings`` and ``notes`` are those of reading it."""

    path: Path
    kind: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    masks: dict[str, StoredTensor] = field(default_factory=dict)  # boolean, or packed bits
    config: dict[str, Any] = field(default_factory=dict)  # config.json of Hugging Face
    run: dict[str, Any] = field(default_factory=dict)  # options of ``prunus train``
    state: dict[str, Any] = field(default_factory=dict)  # the pruner's step and due
    moments: list[dict[str, Any]] = field(default_factory=list)  # optimizer state of weights that have a mask
    digests: dict[str, str] = field(default_factory=dict)  # by the place that stores them
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)  # files that stay open until all is read

    def find(self, kind: str, where: str, what: str, todo: str) -> None:
        self.findings.append(Finding(kind, where, what, todo))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mask_of(stored: StoredTensor, shape: tuple[int, ...]) -> Tensor | None:
    """The boolean mask of a tensor of ``shape``, from booleans, numbers or packed bits; None if it does not fit."""
    mask = stored.load()
    if tuple(mask.shape) == shape and (mask.dtype != torch.uint8 or not mask.numel() or int(mask.max()) <= 1):
        return mask != 0
    numel = torch.Size(shape).numel()
    if mask.shape != (bits.num_bytes(numel),):
        return None
    packed = mask.to(torch.uint8).contiguous()
    if numel % 8 and int(packed[-1]) >> (numel % 8):
        return None  # bits beyond the end: of another tensor
    return bits.unpack(packed, shape)


def digest_of(masks: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> str:
    """``masks.digest`` of stored masks, with one of them in memory at a time."""
    sums = []
    for name in sorted(masks):
        shape = tensors[name].shape if name in tensors else masks[name].shape
        mask = mask_of(masks[name], shape)
        sums.append((name, list(shape), position_sum(mask) if mask is not None else -1))
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
