"""A tensor as the fewest bytes that give it back bit for bit: dense, bitmask, or N:M."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ops import bits
from ..ops.bits import words_of
from ..ops.compact import compact, expand, nonzero
from .nofm import NOFM, Pattern, indices_of, mask_of_indices, obeys, padded

DENSE, BITMASK, SAME = "dense", "bitmask", "same"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What is stored of a tensor: entries by suffix, each with its type (None: the tensor's own) and shape."""

    encoding: str
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def entries(self, num_values: int) -> dict[str, tuple[str | None, Shape]]:
        """Entries in the order of their bytes; an N:M tensor has a fixed number of values."""
        if self.encoding == SAME:
            return {}
        if self.encoding == DENSE:
            return {"": (None, self.shape)}
        if self.encoding == BITMASK:
            return {".bits": ("U8", (8 * -(-self.numel // 64),)), ".values": (None, (num_values,))}
        pattern = NOFM[self.encoding]
        indices = (pattern.num_bytes(self.numel),)
        return {".indices": ("U8", indices), ".values": (None, (pattern.num_values(self.numel),))}


@dataclass(frozen=True)
class Encoded:
    """A tensor's entries by suffix, on the CPU, and how many of its elements are not zero."""

    encoding: str
    entries: dict[str, Tensor]
    num_nonzero: int

    @cached_property
    def parts(self) -> list[Tensor]:
        """The entries' bytes in order."""
        return [words_of(entry).view(torch.uint8) for entry in self.entries.values()]

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


def encode(tensor: Tensor, packs: bool = True) -> Encoded:
    """The smallest form; dense if none is smaller, or without ``packs``."""
    mask = nonzero(tensor)
    host = mask.cpu()
    num_nonzero = int(bits.count(host))
    encoding = smallest_encoding(host, num_nonzero, tensor) if packs else DENSE
    if encoding == DENSE:
        return Encoded(DENSE, {"": tensor.contiguous().cpu()}, num_nonzero)
    if encoding == BITMASK:
        words = torch.nn.functional.pad(host, (0, -len(host) % 8))  # of 64 bits, so that what follows stays aligned
        entries = {".bits": words, ".values": compact(tensor, mask).cpu()}
    else:
        full = padded(mask, NOFM[encoding])
        entries = {".indices": indices_of(full.cpu(), NOFM[encoding]), ".values": compact(tensor, full).cpu()}
    return Encoded(encoding, entries, num_nonzero)


def smallest_encoding(mask: Tensor, num_nonzero: int, tensor: Tensor) -> str:
    """The encoding with the fewest bytes; on a tie N:M, where a value's position needs no prefix sum."""
    shape, width = tuple(tensor.shape), tensor.element_size()
    by_mask = 8 * -(-tensor.numel() // 64) + num_nonzero * width

    def size(pattern: Pattern) -> int:
        return pattern.num_bytes(tensor.numel()) + pattern.num_values(tensor.numel()) * width

    for pattern in sorted((p for p in NOFM.values() if p.fits(shape)), key=size):
        if size(pattern) <= by_mask and size(pattern) < tensor.nbytes and obeys(mask, pattern):
            return str(pattern)
    return BITMASK if by_mask < tensor.nbytes else DENSE


def decode(layout: Layout, entries: dict[str, Tensor], device: torch.device) -> Tensor:
    """The tensor on ``device`` from its entries on the CPU; they travel packed and are expanded there."""
    if layout.encoding == DENSE:
        return entries[""].to(device)
    return expand(*packed_of(layout, entries, device), layout.shape)


def packed_of(layout: Layout, entries: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of a tensor that is not stored dense, and the bits that say where they are."""
    numel = layout.numel
    if layout.encoding == BITMASK:
        mask, rest = entries[".bits"].tensor_split([bits.num_bytes(numel)])
        if rest.any() or (numel % 8 and int(mask[-1]) >> numel % 8):
            raise ValueError("its mask has bits behind the last element")
    else:
        mask = mask_of_indices(entries[".indices"], NOFM[layout.encoding], numel)
    return entries[".values"].to(device), mask.to(device)
