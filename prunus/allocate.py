"""Sparsity over layers, exact to the weight: how many weights of each layer are dropped."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

Allocation = Literal["uniform", "depth", "erk", "fisher"] | Mapping[str, float]
CAP = 0.95  # no layer is emptied further than this by depth, unless the target itself is higher
NEAR, MOST = 0.15, 0.98  # how far a layer's sparsity may be from the target by fisher, and its largest


def allocate(
    shapes: Mapping[str, Sequence[int]],
    sparsity: float,
    how: Allocation = "uniform",
    *,
    at_least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Number of weights to drop in each layer; ``at_least`` are dropped there already.

    - ``uniform``: ``round(s n)`` in each.
    - ``depth``: proportional to ``0.7 + 0.6 i / (L - 1)``, so that later layers lose more.
    - ``erk``: densities proportional to ``sum(dims) / prod(dims)`` (Evci et al. 2019,
      https://arxiv.org/abs/1911.11134): small layers keep more.
    - ``fisher``: by a global selection that reads gradients, which ``prune`` makes.
    - a mapping from name patterns to sparsities, scaled to the target; what no pattern matches
      stays dense.

    All but ``uniform`` drop exactly ``round(s N)`` in all.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    floor = [(at_least or {}).get(name, 0) for name in sizes]
    target = round(sparsity * sum(sizes.values()))
    if how != "uniform" and target <= sum(floor):
        return dict(zip(sizes, floor, strict=True))
    if isinstance(how, Mapping):
        wish = [size * share for size, share in zip(sizes.values(), _matched(sizes, how), strict=True)]
        ceiling = [size if share else low for size, share, low in zip(sizes.values(), wish, floor, strict=True)]
        counts = spread(wish, target, floor, ceiling)
    elif how == "uniform":
        counts = [round(sparsity * size) for size in sizes.values()]
    elif how == "depth":
        last = max(1, len(sizes) - 1)
        wish = [size * (0.7 + 0.6 * i / last) for i, size in enumerate(sizes.values())]
        cap = max(CAP, sparsity)
        ceiling = [max(low, math.ceil(cap * size)) for low, size in zip(floor, sizes.values(), strict=True)]
        counts = spread(wish, target, floor, ceiling)
    elif how == "erk":
        density = [sum(shape) for shape in shapes.values()]
        room = [size - low for size, low in zip(sizes.values(), floor, strict=True)]
        stay = spread(density, sum(sizes.values()) - target, [0] * len(room), room)
        counts = [size - num for size, num in zip(sizes.values(), stay, strict=True)]
    elif how == "fisher":
        raise ValueError("allocate='fisher' reads gradients of a trained model: it is for prune(), not for training")
    else:
        raise ValueError(f"allocate must be uniform, depth, erk or a mapping from patterns to sparsities, got {how!r}")
    return dict(zip(sizes, counts, strict=True))


def clipped(
    wish: Mapping[str, int], sizes: Mapping[str, int], sparsity: float, at_least: Mapping[str, int]
) -> dict[str, int]:
    """Numbers of weights to drop near ``wish``, ``round(s N)`` in all.

    Sparsities of layers are shifted by one constant, clipped to ``s - 0.15 .. s + 0.15`` and ``0 .. 0.98``; what
    rounding down leaves over goes to the largest remainders. ``at_least`` are dropped already.
    """
    target = round(sparsity * sum(sizes.values()))
    lowest = {n: max(at_least[n], math.floor(max(0.0, sparsity - NEAR) * size)) for n, size in sizes.items()}
    highest = {n: max(at_least[n], math.ceil(min(MOST, sparsity + NEAR) * size)) for n, size in sizes.items()}
    if sum(highest.values()) < target:
        raise ValueError(
            f"a sparsity of {sparsity:g} cannot be reached where no layer may be sparser than "
            f"{min(MOST, sparsity + NEAR):g}; take a lower one, or allocate='uniform'"
        )
    if sum(lowest.values()) >= target:  # what is dropped already leaves no choice
        return lowest

    def shifted(shift: float) -> dict[str, float]:
        return {n: min(max(wish[n] + shift * size, lowest[n]), highest[n]) for n, size in sizes.items()}

    low, high = -1.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shifted(middle).values()) < target else (low, middle)
    exact = shifted(high)
    counts = {n: math.floor(value) for n, value in exact.items()}
    by_remainder = sorted(sizes, key=lambda n: counts[n] - exact[n])
    while (left := target - sum(counts.values())) != 0:
        step = 1 if left > 0 else -1
        room = [n for n in by_remainder if lowest[n] <= counts[n] + step <= highest[n]]
        for n in (room if left > 0 else room[::-1])[: abs(left)]:
            counts[n] += step
    return counts


def spread(wish: Sequence[float], total: int, floor: Sequence[int], ceiling: Sequence[int]) -> list[int]:
    """Whole numbers between ``floor`` and ``ceiling``, in proportion to ``wish``, that sum to ``total``.

    The common factor is found by bisection; what rounding down leaves over goes to the largest
    remainders. A total below the floors gives the floors.
    """
    if total <= sum(floor):
        return list(floor)
    if total > sum(ceiling):
        raise ValueError(f"{total} weights are to be dropped, but the layers that may lose any hold {sum(ceiling)}")

    def clipped(factor: float) -> list[float]:
        return [min(max(factor * w, lo), hi) for w, lo, hi in zip(wish, floor, ceiling, strict=True)]

    low, high = 0.0, 1.0
    while sum(clipped(high)) < total:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < total else (low, middle)
    exact = clipped(high)
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    while (left := total - sum(counts)) != 0:
        step = 1 if left > 0 else -1
        room = [i for i in order if floor[i] <= counts[i] + step <= ceiling[i] and wish[i] > 0]
        for i in (room if left > 0 else room[::-1])[: abs(left)]:
            counts[i] += step
    return counts


def _matched(names: Mapping[str, int], shares: Mapping[str, float]) -> list[float]:
    """Sparsity of the first pattern that matches each name, 0 where none does."""
    for pattern, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"the sparsity of {pattern!r} must lie in [0, 1], got {share}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches none of: {', '.join(names)}")
    return [next((s for p, s in shares.items() if fnmatchcase(name, p)), 0.0) for name in names]
