"""Digests: recomputed from masks, one mask at a time, and held against those that are stored."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from ..masks import position_sum
from ..ops import bits
from .source import Source, Stored


def mask_of(stored: Stored, shape: tuple[int, ...]) -> Tensor | None:
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


def digest_of(masks: Mapping[str, Stored], tensors: Mapping[str, Stored]) -> str:
    """``mask.digest`` of stored masks, with one of them in memory at a time."""
    sums = []
    for name in sorted(masks):
        shape = tensors[name].shape if name in tensors else masks[name].shape
        mask = mask_of(masks[name], shape)
        sums.append((name, list(shape), position_sum(mask) if mask is not None else -1))
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def check_digests(source: Source) -> str | None:
    """Digest of the source's masks; stored ones that differ from it, or from each other, are findings."""
    own = digest_of(source.masks, source.tensors) if source.masks else None
    stored = source.digests
    expected = own or next(iter(stored.values()), None)
    told = "the masks" if own else next(iter(stored), "")
    for place, value in stored.items():
        if value != expected:
            source.find(
                "digest",
                place,
                f"{value[:16]} is stored, but {told} give {str(expected)[:16]}" if own else f"it differs from {told}",
                "the ranks' masks have parted or the file was changed: go back to a checkpoint before it",
            )
    return own
