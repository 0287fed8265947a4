"""From two gradient records to decisions.

    prune where  G1 <= (1 + tau) G0,  as  q <= 1 + tau  with the ratio q = G1 / G0

The ratios are kept at the candidates only; every tau is then a comparison.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

ZeroGradient = Literal["prune", "keep"]
Tau = float | Mapping[str, float] | Sequence[float] | Literal["adaptive", "target"]


@dataclass(frozen=True)
class Ratios:
    """q at the candidates of one weight, in order: NaN where one stays whatever tau is, infinite where G0 is 0."""

    q: Tensor
    num_zero: int  # both gradients are zero
    num_not_finite: int  # a gradient is NaN or infinite


def ratios(before: Tensor, after: Tensor, zero: ZeroGradient) -> Ratios:
    """``G1 / G0`` of the candidates' gradients, each a vector."""
    broken = ~(torch.isfinite(before) & torch.isfinite(after))
    none = (before == 0) & (after == 0)
    q = after / before
    q[none] = 0.0 if zero == "prune" else math.nan
    q[broken] = math.nan
    return Ratios(q, int(none.sum()), int(broken.sum()))


def is_allowed(q: Tensor, tau: float) -> Tensor:
    return q <= 1 + tau


def smallest_ratios(q: Sequence[Tensor], num: int) -> list[Tensor]:
    """Masks of the ``num`` smallest ratios of all, the first of equal ones first; of fewer where others are NaN."""
    whole = torch.cat(list(q))
    order = whole.sort(stable=True).indices  # NaN comes last
    chosen = torch.zeros_like(whole, dtype=torch.bool)
    chosen[order[: min(num, int((~whole.isnan()).sum()))]] = True
    return list(chosen.split([len(part) for part in q]))


def taus(tau: Tau, sizes: Mapping[str, int], base: float) -> dict[str, float]:
    """tau of every weight; ``sizes`` are their numbers of elements, in model order.

    ``adaptive`` is ``base sqrt(n / mean n)``: large layers are allowed more. The keys of a mapping are names or
    patterns, of which the first match counts; a sequence is in model order.
    """
    if isinstance(tau, str):
        mean = sum(sizes.values()) / len(sizes)
        return {name: base * math.sqrt(size / mean) for name, size in sizes.items()}
    if isinstance(tau, Mapping):
        for pattern in tau:
            if not any(fnmatchcase(name, pattern) for name in sizes):
                raise ValueError(f"tau has the pattern {pattern!r}, which matches none of: {', '.join(sizes)}")
        by_name = {}
        for name in sizes:
            values = [value for pattern, value in tau.items() if fnmatchcase(name, pattern)]
            if not values:
                raise ValueError(f"tau has no value for {name}; add it, or a last pattern '*'")
            by_name[name] = values[0]
        return by_name
    if isinstance(tau, Sequence):
        if len(tau) != len(sizes):
            raise ValueError(f"tau as a list needs one value for each of {len(sizes)} weights, got {len(tau)}")
        return dict(zip(sizes, tau, strict=True))
    return dict.fromkeys(sizes, tau)


def check_tau(tau: Tau) -> None:
    """Raise ValueError unless tau is a known rule, or every value a finite number of at least 0."""
    if isinstance(tau, str):
        if tau not in ("adaptive", "target"):
            raise ValueError(f"tau must be a number, a mapping, a list, 'adaptive' or 'target', got {tau!r}")
        return
    values = tau.values() if isinstance(tau, Mapping) else tau if isinstance(tau, Sequence) else [tau]
    for value in values:
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise ValueError(f"tau, the allowed increase, must be at least 0 (0.1 is 10 %), got {value!r}")
