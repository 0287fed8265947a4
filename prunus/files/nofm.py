"""N:M: where the n kept of every m stand, as indices of a few bits instead of one bit a weight.

A byte of mask bits is 8 / m whole groups, so that a table of 256 rows turns it into its indices, and one of
the codes back. A group with fewer than n non-zeros keeps some of its zeros, the first ones.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

# those whose indices take no more bits than the mask would: 4:8 for one would take 12 bits for 8
PATTERNS = ((1, 8), (1, 4), (1, 2), (2, 8), (2, 4))


@dataclass(frozen=True)
class Pattern:
    """``n`` of every ``m`` consecutive elements of the flattened tensor."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def width(self) -> int:
        """Bits of an index."""
        return (self.m - 1).bit_length()

    @property
    def code_bits(self) -> int:
        """Bits of all indices of eight elements."""
        return 8 // self.m * self.n * self.width

    def num_values(self, numel: int) -> int:
        return numel // self.m * self.n

    def num_bytes(self, numel: int) -> int:
        """Bytes of the indices, whole words of 64 bits."""
        return 8 * -(-(numel // 8 * self.code_bits) // 64)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether groups fill rows exactly, and the mask fills whole bytes."""
        numel = math.prod(shape)
        return bool(shape) and shape[-1] % self.m == 0 and numel % 8 == 0 and numel > 0


NOFM = {f"{n}:{m}": Pattern(n, m) for n, m in PATTERNS}


@cache
def tables(pattern: Pattern) -> tuple[Tensor, Tensor, Tensor]:
    """For each byte: with zeros kept so that every group has n, and its code; for each code: its byte, or 0.

    A byte with a group of more than n has no row of its own: it stays 0 in the first table.
    """
    full, codes = [0] * 256, [0] * 256
    for byte in range(256):
        groups = [_kept(byte >> start, pattern) for start in range(0, 8, pattern.m)]
        if all(len(group) == pattern.n for group in groups):
            full[byte] = sum(1 << at + g * pattern.m for g, group in enumerate(groups) for at in group)
            indices = [at for group in groups for at in group]
            codes[byte] = sum(at << i * pattern.width for i, at in enumerate(indices))
    bytes_of = [0] * (1 << pattern.code_bits)
    for byte in range(256):
        if full[byte]:
            bytes_of[codes[byte]] = full[byte]
    return tuple(torch.tensor(table, dtype=torch.uint8) for table in (full, codes, bytes_of))  # type: ignore


def _kept(bits: int, pattern: Pattern) -> list[int]:
    """Ascending positions of a group's non-zeros and, up to n, of its first zeros."""
    ones = [at for at in range(pattern.m) if bits >> at & 1]
    zeros = [at for at in range(pattern.m) if not bits >> at & 1]
    return sorted(ones + zeros[: max(0, pattern.n - len(ones))])


def obeys(bits: Tensor, pattern: Pattern) -> bool:
    """Whether no group of a mask on the CPU keeps more than n; mostly the first bytes tell."""
    full, mask = tables(pattern)[0].numpy(), bits.numpy()
    step = 1 << 16
    return all(full[mask[start : start + step]].all() for start in range(0, len(mask), step))


def padded(bits: Tensor, pattern: Pattern) -> Tensor:
    """The mask with zeros kept so that every group has n; the mask must obey the pattern."""
    return tables(pattern)[0].to(bits.device)[bits.int()]


def indices_of(bits: Tensor, pattern: Pattern) -> Tensor:
    """Packed indices, whole words, of a mask on the CPU that ``padded`` returned."""
    codes = tables(pattern)[1].numpy()[bits.numpy()]
    if pattern.code_bits < 8:
        digits = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, : pattern.code_bits]
        codes = np.packbits(digits, bitorder="little")
    packed = np.zeros(pattern.num_bytes(8 * len(bits)), np.uint8)
    packed[: len(codes)] = codes
    return torch.from_numpy(packed)


def mask_of_indices(indices: Tensor, pattern: Pattern, numel: int) -> Tensor:
    """The mask from its packed indices, on the CPU; ValueError where they do not ascend within a group."""
    size, count = pattern.code_bits, numel // 8
    if size == 8:
        codes = indices.numpy()[:count]
    else:
        digits = np.unpackbits(indices.numpy(), count=count * size, bitorder="little").reshape(count, size)
        codes = np.packbits(digits, axis=1, bitorder="little")[:, 0]
    bits = tables(pattern)[2].numpy()[codes]
    if not bits.all():
        raise ValueError(f"its {pattern} indices are not in ascending order within a group")
    return torch.from_numpy(bits)
