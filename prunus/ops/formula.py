"""How kernels compute a score, and the hash of positions that random scores are. Loads without torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """A name that kernels know, what their registers hold, two constants, and whether roots may be approximate."""

    name: str
    registers: Mapping[str, str]  # "w", "m", "v" to what the score reads
    a: float = 0.0
    b: float = 0.0
    has_fast_roots: bool = False


def mixed(words: Tensor) -> Tensor:
    """A well mixed int64 for each int64 (the finaliser of splitmix64; products wrap)."""
    words = words * -7046029254386353131
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * -4658895280553007687
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return words ^ (words >> 31 & (1 << 33) - 1)


def start_of(name: str, seed: int) -> int:
    """What is added to the positions of a weight, so that those of another name or seed have other hashes."""
    return zlib.crc32(name.encode()) << 31 ^ (seed * 0x9E3779B1 & 0x7FFFFFFF)
