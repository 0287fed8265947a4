"""The scores on the device: one formula a name, each tested against its definition.

A formula works on registers: ``w``, ``m`` and ``v`` hold what the score reads, ``a`` and ``b`` are two
constants. ``lower`` says what a score fills them with. ``random`` finds its noise in ``w``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True)
class Formula:
    """A name that ``evaluate`` knows, what its registers hold, and its two constants."""

    name: str
    registers: Mapping[str, str]  # "w", "m", "v" to what the score reads
    a: float = 0.0
    b: float = 0.0

    @property
    def has_fast_roots(self) -> bool:
        """Whether roots may be approximate in the pass: in a product their error stays an error of a few ulp."""
        return self.name not in ("bitter5", "bitter9", "magnitude", "fisher", "wanda", "momentum", "itself", "random")


def lower(score: str, constants: Mapping[str, Any]) -> Formula | None:
    """The formula of a score of the table with its options filled in, or None where there is none."""
    eps, adam_eps = constants.get("eps"), constants.get("adam_eps", 1e-8)
    below = adam_eps if eps is None else eps  # in denominators
    under = eps or 0.0  # under roots
    weight, first, second = {"w": "weight"}, {"m": "exp_avg"}, {"v": "exp_avg_sq"}
    if score == "magnitude":
        return Formula("magnitude", weight)
    if score in ("bitter0", "bitter5", "bitter9"):
        return Formula(score, weight | first | second, below, under)
    if score == "bitter3":
        return Formula("bitter3", weight | first, under, 1.0)
    if score == "bitter6":
        name, a = ("bitter6", below) if eps is None else ("bitter6_eps", eps)
        return Formula(name, weight | first | second, a)
    if score == "bitter7":
        return Formula("bitter7", weight | second, under)
    if score == "bitter8":
        return Formula("bitter8", weight | first, under, 1 - constants.get("beta1", 0.9) ** constants["step"])
    if score == "fisher":
        names = {None: "fisher", 0: "magnitude", 0.25: "fisher_quarter", 0.5: "fisher_half"}
        q, b = constants.get("q"), 1 - constants.get("beta2", 0.999) ** constants["step"]
        return Formula(names[q], weight | (second if q != 0 else {}), 0.0, b) if q in names else None
    if score == "wanda":
        return Formula("wanda", weight | {"v": "input_norm"})
    if score in ("snr", "momentum"):
        return Formula(score, first | (second if score == "snr" else {}), below)
    if score == "gradient":
        return Formula("magnitude", {"w": "grad"})
    if score == "movement":
        return Formula("itself", {"w": "movement"})
    if score == "itself":
        return Formula("itself", {"w": "scores"})
    return Formula("random", {}) if score == "random" else None


@triton.jit
def root(FAST: tl.constexpr, x):
    if FAST:  # the hardware's root takes subnormal numbers for zero: x is brought out of their range
        return tl.sqrt(x * 4294967296.0) * (1.0 / 65536)
    return tl.sqrt_rn(x)


@triton.jit
def evaluate(NAME: tl.constexpr, FAST: tl.constexpr, w, m, v, a, b):
    """The score; ``FAST`` roots are off by an ulp or two, else they are rounded correctly, as torch's are."""
    if NAME == "magnitude":
        s = tl.abs(w)
    elif NAME == "bitter0":
        s = w * w * tl.abs(m / (root(FAST, v) + a))
    elif NAME == "bitter3":
        s = root(FAST, tl.abs(m) + a) * tl.abs(w)
    elif NAME == "bitter5":
        s = sign(w) * (m / (root(FAST, v) + a)) + 0.1 * tl.abs(w)
    elif NAME == "bitter6":
        s = root(FAST, tl.abs(m)) * tl.abs(w) * tl.abs(m / (root(FAST, v) + a))
    elif NAME == "bitter6_eps":
        s = root(FAST, tl.abs(m) + a) * tl.abs(w) * (tl.abs(m) / root(FAST, v + a))
    elif NAME == "bitter7":
        s = root(FAST, root(FAST, v + a)) * tl.abs(w)
    elif NAME == "bitter8":
        s = root(FAST, tl.abs(m / b) + a) * tl.abs(w)
    elif NAME == "bitter9":
        s = root(FAST, tl.abs(m) + b) * tl.abs(w) + 0.1 * sign(w) * (m / (root(FAST, v) + a))
    elif NAME == "fisher":
        s = v / b * (w * w)
    elif NAME == "fisher_quarter":
        s = root(FAST, root(FAST, v / b)) * tl.abs(w)
    elif NAME == "fisher_half":
        s = root(FAST, v / b) * tl.abs(w)
    elif NAME == "wanda":
        s = tl.abs(w) * v
    elif NAME == "snr":
        s = tl.abs(m / (root(FAST, v) + a))
    elif NAME == "momentum":
        s = tl.abs(m)
    else:
        tl.static_assert(NAME == "itself" or NAME == "random", "unknown formula")
        s = w
    return s + 0.0  # -0.0 becomes 0.0


@triton.jit
def sign(w):
    return tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0))


@triton.jit
def sortable(s):
    """Signed integers in the order of the scores."""
    word = s.to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit
def uniform(position, start):
    """Noise in [0, 1) by hashing ``position + start``: the definition is ``prunus.score.random``."""
    h = (position + start) * -7046029254386353131
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    h = h ^ ((h >> 31) & ((1 << 33) - 1))
    noise = (((h >> 11) & ((1 << 53) - 1)).to(tl.float64) * (2.0**-53)).to(tl.float32)
    return tl.minimum(noise, 1 - 2.0**-24)
