"""Statistics over seeds: mean, deviation, the paired difference with its interval, and a verdict in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LEVEL = 0.95  # of an interval


@dataclass(frozen=True)
class Metric:
    """What is compared; values are multiplied by ``scale`` for people to read."""

    name: str
    higher_is_better: bool
    scale: float = 1.0
    unit: str = ""
    decimals: int = 2

    def of(self, result: Mapping[str, float]) -> float:
        return result[self.name] * self.scale

    @property
    def sign(self) -> int:
        """1 where a lower value is better, -1 where a higher one is."""
        return -1 if self.higher_is_better else 1


PERPLEXITY = Metric("perplexity", higher_is_better=False)
ACCURACY = Metric("accuracy", higher_is_better=True, scale=100.0, unit=" points")


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for one value, which has none."""
    if len(values) < 2:
        return None
    centre = fmean(values)
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)  # squares may be too large


def inside(t: float, freedom: int) -> float:
    """Probability that Student's t with a whole ``freedom`` lies between -t and t.

    The finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4 in the angle atan(t / sqrt(freedom)).
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    if freedom == 1:
        return 2 * angle / math.pi
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int) -> float:
    """The t within which 95 % of the distribution lie: 12.706 for one degree of freedom, 4.303 for two."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < LEVEL:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < LEVEL else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Paired:
    """Mean of the differences of equal seeds, with half the width of its 95 % interval if there are two or more."""

    mean: float
    half_width: float | None
    num_seeds: int


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """``values - reference`` over the seeds that both have; None if they share none."""
    differences = [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    if not differences:
        return None
    spread = deviation(differences)
    half = None
    if spread is not None:
        half = t_quantile(len(differences) - 1) * spread / math.sqrt(len(differences))
    return Paired(fmean(differences), half, len(differences))


def verdict(difference: Paired | None, metric: Metric) -> str:
    if difference is None:
        return "no seed in common yet"
    centre = written(difference.mean, metric.decimals, sign=True)
    if difference.half_width is None:
        return f"one seed: no interval ({centre}{metric.unit})"
    seeds, half = f"{difference.num_seeds} seeds", f"{written(difference.half_width, metric.decimals)}{metric.unit}"
    if difference.mean == 0 or abs(difference.mean) <= difference.half_width:
        return f"no difference seen with {seeds}: {centre} ± {half}"
    if difference.half_width <= 1e-9 * abs(difference.mean):  # accuracies of few images are coarse: luck, not certainty
        return f"the same difference with all {seeds} ({centre}{metric.unit}): no spread to judge by"
    word = "better" if (difference.mean > 0) == metric.higher_is_better else "worse"
    return f"{word} by {written(abs(difference.mean), metric.decimals)} ± {half} ({seeds})"


def written(value: float, decimals: int = 2, *, sign: bool = False) -> str:
    """The value with these decimals; a huge one, as of a ruined model, in three significant digits."""
    return f"{value:{'+' if sign else ''}{f'.{decimals}f' if abs(value) < 1e6 else '.3g'}}"
