"""How kernels compute a score."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """A name that kernels know, what each of their registers holds, and two constants.

    ``has_fast_roots`` says that roots may be approximate in the pass: in a product their error stays an error of a
    few units in the last place.
    """

    name: str
    registers: Mapping[str, str]  # "w", "m", "v" to what the score reads
    a: float = 0.0
    b: float = 0.0
    has_fast_roots: bool = False
