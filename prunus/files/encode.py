"""A tensor as the fewest bytes that give it back bit for bit: dense, bitmask, N:M, or codes of a weight on a grid."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..grids import OnGrid
from ..ops import bits, codes
from ..ops.bits import words_of
from ..ops.compact import compact, expand, nonzero
from ..ops.grid import Coded, Grid, coded, decoded
from .nofm import NOFM, indices_of, mask_of_indices, obeys, padded

DENSE, BITMASK, CODES, SAME = "dense", "bitmask", "codes", "same"
CODED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What is stored of a tensor: entries by suffix, each with its type (None: the tensor's own) and shape."""

    encoding: str
    shape: Shape
    grid: Grid | None = None  # of codes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def entries(self, num_values: int) -> dict[str, tuple[str | None, Shape]]:
        """Entries in the order of their bytes; an N:M tensor has a fixed number of values, and -1 is any number."""
        if self.encoding == SAME:
            return {}
        if self.encoding == DENSE:
            return {"": (None, self.shape)}
        mask = "U8", (8 * -(-self.numel // 64),)
        if self.encoding == BITMASK:
            return {".bits": mask, ".values": (None, (num_values,))}
        if self.grid is not None:
            scales = "BF16", (4 * -(-math.prod(self.grid.scales_shape(self.shape)) // 4),)
            stream = "U8", (-1 if num_values < 0 else codes.num_bytes(num_values, self.grid.bits),)
            return {".bits": mask, ".scales": scales, ".codes": stream}
        pattern = NOFM[self.encoding]
        indices = (pattern.num_bytes(self.numel),)
        return {".indices": ("U8", indices), ".values": (None, (pattern.num_values(self.numel),))}

    def num_bytes(self, num_values: int, width: int) -> int:
        """Bytes of all entries, of a tensor whose elements are so wide."""
        widths = {None: width, "U8": 1, "BF16": 2}
        return sum(math.prod(shape) * widths[dtype] for dtype, shape in self.entries(num_values).values())


@dataclass(frozen=True)
class Encoded:
    """A tensor's entries by suffix, on the CPU, and how many of its elements are not zero."""

    encoding: str
    entries: dict[str, Tensor]
    num_nonzero: int
    grid: Grid | None = None

    @cached_property
    def parts(self) -> list[Tensor]:
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
        entries = {".bits": _in_words(host), ".values": compact(tensor, mask).cpu()}
    else:
        full = padded(mask, NOFM[encoding])
        entries = {".indices": indices_of(full.cpu(), NOFM[encoding]), ".values": compact(tensor, full).cpu()}
    return Encoded(encoding, entries, num_nonzero)


def encode_codes(kept: Coded) -> Encoded:
    stream = codes.pack(kept.codes, kept.grid.bits).cpu()
    entries = {
        ".bits": _in_words(kept.packed.cpu()),
        ".scales": _in_words(kept.scales.cpu().view(-1)),
        ".codes": stream,
    }
    return Encoded(CODES, entries, len(kept.codes), kept.grid)


def coded_if_smallest(tensor: Tensor, on_grid: OnGrid) -> Coded | None:
    """A weight on a grid by its codes; None if it has no zero, or another form is as small."""
    num_kept, mask = int(tensor.count_nonzero()), nonzero(tensor).cpu()
    num_nonzero, shape, width = int(bits.count(mask)), tuple(tensor.shape), tensor.element_size()
    other = Layout(smallest_encoding(mask, num_nonzero, tensor), shape).num_bytes(num_nonzero, width)
    is_smaller = Layout(CODES, shape, on_grid.grid).num_bytes(num_kept, width) < other
    return coded(tensor, on_grid.scales, on_grid.grid) if is_smaller and num_kept < tensor.numel() else None


def _in_words(entry: Tensor) -> Tensor:
    """Padded with zeros to whole words of 64 bits, so that what follows stays aligned."""
    return torch.nn.functional.pad(entry, (0, -len(entry) % (8 // entry.element_size())))


def smallest_encoding(mask: Tensor, num_nonzero: int, tensor: Tensor) -> str:
    """The encoding with the fewest bytes; on a tie N:M, where a value's position needs no prefix sum."""

    def size(encoding: str) -> int:
        return Layout(encoding, tuple(tensor.shape)).num_bytes(num_nonzero, tensor.element_size())

    for name in sorted((name for name, pattern in NOFM.items() if pattern.fits(tuple(tensor.shape))), key=size):
        if size(name) <= size(BITMASK) and size(name) < tensor.nbytes and obeys(mask, NOFM[name]):
            return name
    return BITMASK if size(BITMASK) < tensor.nbytes else DENSE


def decode(layout: Layout, entries: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor on ``device`` from its entries on the CPU; they travel packed and are expanded there."""
    if layout.encoding == DENSE:
        return entries[""].to(device)
    if layout.encoding == CODES:
        return decoded(coded_of(layout, entries, device), dtype)
    return expand(*packed_of(layout, entries, device, dtype), layout.shape)


def packed_of(
    layout: Layout, entries: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The values of a tensor that is not stored dense, and the bits that say where they are."""
    if layout.encoding == CODES:
        kept = coded_of(layout, entries, device)
        return compact(decoded(kept, dtype), kept.packed), kept.packed
    if layout.encoding == BITMASK:
        mask = _mask_of(layout, entries)
    else:
        mask = mask_of_indices(entries[".indices"], NOFM[layout.encoding], layout.numel)
    return entries[".values"].to(device), mask.to(device)


def coded_of(layout: Layout, entries: dict[str, Tensor], device: torch.device) -> Coded:
    assert layout.grid is not None
    mask, stream, shape = _mask_of(layout, entries), entries[".codes"], layout.grid.scales_shape(layout.shape)
    num_kept, num_bits = int(bits.count(mask)), layout.grid.bits
    if len(stream) != (expected := codes.num_bytes(num_kept, num_bits)):
        raise ValueError(f"its mask keeps {num_kept} elements, whose codes take {expected} bytes, not {len(stream)}")
    scales, rest = entries[".scales"].tensor_split([math.prod(shape)])
    check_scales(scales)
    if words_of(rest).any():
        raise ValueError("there are values after its last scale")
    kept = codes.unpack(stream.to(device), num_kept, num_bits)
    return Coded(mask.to(device), kept, scales.view(shape).to(device), layout.grid, layout.shape)


def check_scales(scales: Tensor) -> None:
    if count := int((~((scales > 0) & scales.isfinite())).sum()):
        raise ValueError(f"{count:,} of its {scales.numel():,} scales are not positive and finite")


def _mask_of(layout: Layout, entries: dict[str, Tensor]) -> Tensor:
    mask, rest = entries[".bits"].tensor_split([bits.num_bytes(layout.numel)])
    if rest.any() or (layout.numel % 8 and int(mask[-1]) >> layout.numel % 8):
        raise ValueError("its mask has bits after the last element")
    return mask
