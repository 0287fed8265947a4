"""How a sparsity is spread over layers: how many weights of each go, and exactly the number asked for in all."""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

Allocation = Literal["uniform", "depth", "erk", "fisher", "moments"] | Mapping[str, float]
CAP = 0.95  # no layer is emptied further than this by depth, unless the target itself is higher
NEAR, MOST = 0.15, 0.98  # how far a layer's sparsity may be from the target by fisher or moments, and its largest


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
    - ``fisher``, ``moments``: by a global selection that reads gradients or their moments, which ``prune`` makes.
    - a mapping from name patterns to sparsities, scaled to the target; what no pattern matches
      stays dense.

    All but ``uniform`` drop exactly ``round(s N)`` in all.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    floor = [(at_least or {}).get(name, 0) for name in shapes]
    target = round(sparsity * sum(sizes))
    if how != "uniform" and target <= sum(floor):
        counts = floor
    elif isinstance(how, Mapping):
        wish = [size * share for size, share in zip(sizes, _matched(list(shapes), how), strict=True)]
        ceiling = [size if share else low for size, share, low in zip(sizes, wish, floor, strict=True)]
        counts = spread(wish, target, floor, ceiling)
    elif how == "uniform":
        counts = [round(sparsity * size) for size in sizes]
    elif how == "depth":
        wish = [size * (0.7 + 0.6 * i / max(1, len(sizes) - 1)) for i, size in enumerate(sizes)]
        ceiling = [max(low, math.ceil(max(CAP, sparsity) * size)) for low, size in zip(floor, sizes, strict=True)]
        counts = spread(wish, target, floor, ceiling)
    elif how == "erk":
        density = [sum(shape) for shape in shapes.values()]
        room = [size - low for size, low in zip(sizes, floor, strict=True)]
        stay = spread(density, sum(sizes) - target, [0] * len(room), room)
        counts = [size - num for size, num in zip(sizes, stay, strict=True)]
    elif how in ("fisher", "moments"):
        raise ValueError(f"allocate={how!r} is for prune(), not for training; take uniform, depth, erk or a mapping")
    else:
        raise ValueError(f"allocate must be uniform, depth, erk or a mapping from patterns to sparsities, got {how!r}")
    return dict(zip(shapes, counts, strict=True))


def clipped(wish: Sequence[int], sizes: Sequence[int], sparsity: float, floor: Sequence[int]) -> list[int]:
    """Numbers to drop near ``wish``, ``round(s N)`` in all: sparsities are shifted by one constant and clipped."""
    total, largest = round(sparsity * sum(sizes)), min(MOST, sparsity + NEAR)
    floor = [max(low, math.floor(max(0.0, sparsity - NEAR) * size)) for low, size in zip(floor, sizes, strict=True)]
    ceiling = [max(low, math.ceil(largest * size)) for low, size in zip(floor, sizes, strict=True)]
    if sum(ceiling) < total:
        problem = f"a sparsity of {sparsity:g} cannot be reached if no layer may be sparser than {largest:g}"
        raise ValueError(f"{problem}; take a lower one, or allocate='uniform'")
    return _summing_to(total, lambda x: [w + (x - 1) * n for w, n in zip(wish, sizes, strict=True)], floor, ceiling)


def spread(wish: Sequence[float], total: int, floor: Sequence[int], ceiling: Sequence[int]) -> list[int]:
    """Whole numbers between ``floor`` and ``ceiling``, in proportion to ``wish``, that sum to ``total``."""
    ceiling = [high if w > 0 else low for w, low, high in zip(wish, floor, ceiling, strict=True)]
    if total > max(sum(floor), sum(ceiling)):
        raise ValueError(f"cannot drop {total} weights: the layers that may lose some have only {sum(ceiling)}")
    return _summing_to(total, lambda x: [x * w for w in wish], floor, ceiling)


def _summing_to(
    total: int, values: Callable[[float], list[float]], floor: Sequence[int], ceiling: Sequence[int]
) -> list[int]:
    """Whole numbers between ``floor`` and ``ceiling`` that sum to ``total``: near ``values(x)``, which rises with x."""
    if total <= sum(floor):
        return list(floor)

    def between(x: float) -> list[float]:
        return [min(max(value, low), high) for value, low, high in zip(values(x), floor, ceiling, strict=True)]

    low, high = 0.0, 1.0
    while sum(between(high)) < total:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(between(middle)) < total else (low, middle)
    exact = between(high)
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    while (left := total - sum(counts)) != 0:
        step = 1 if left > 0 else -1
        room = [i for i in order if floor[i] <= counts[i] + step <= ceiling[i]]
        for i in (room if left > 0 else room[::-1])[: abs(left)]:
            counts[i] += step
    return counts


def _matched(names: Sequence[str], shares: Mapping[str, float]) -> list[float]:
    """Sparsity of the first pattern that matches each name, 0 where none does."""
    for pattern, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"the sparsity of {pattern!r} must lie in [0, 1], got {share}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches none of: {', '.join(names)}")
    return [next((s for p, s in shares.items() if fnmatchcase(name, p)), 0.0) for name in names]
