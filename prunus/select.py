"""Scores to masks, exact to the weight.

A selector answers two questions: how many weights go at a sparsity (``quota``), from shapes and counts alone, and
which ones, given these numbers (``cut``). It takes scores by name, the sparsity, and the masks that hold so far: what
they prune stays pruned. A score may exist (a tensor) or be a ``Lazy`` source that is evaluated piece by piece and never
stored; both give the same masks. The smallest are dropped; of equal scores the first in order is dropped first.
"""

from __future__ import annotations  # the command line reads SELECTORS without loading torch

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .ops.candidates import Packed
    from .ops.lazy import Lazy

Allocation = Literal["uniform", "depth", "erk", "fisher", "moments"] | Mapping[str, float]
Counts = Mapping[str, int]  # weights by name
CAP = 0.95  # no layer is emptied further than this by depth, unless the target itself is higher
NEAR, MOST = 0.15, 0.98  # how far a layer's sparsity may be from the target by fisher or moments, and its largest


class Shape(NamedTuple):
    """Name and shape of a weight over all ranks; each index of the dimensions ``outputs`` is one row."""

    name: str
    dims: tuple[int, ...]
    outputs: tuple[int, ...] | None = (0,)

    @property
    def numel(self) -> int:
        return math.prod(self.dims)

    @property
    def num_inputs(self) -> int:
        """Elements of a row."""
        if self.outputs is None:
            raise ValueError(
                f"{self.name} has no rows: a grouped transposed convolution; exclude it, or select by layer or globally"
            )
        return math.prod([size for dim, size in enumerate(self.dims) if dim not in self.outputs])


@dataclass(frozen=True)
class Quota:
    """``num_drop`` of every ``size`` weights go, in ``num`` groups that make up the weights ``names``."""

    names: tuple[str, ...]
    size: int
    num_drop: int
    num: int = 1


class Selector(ABC):
    """How many weights of each group go, and which."""

    group: ClassVar[Literal["all", "layer", "row", "neighbours"]]  # within which scores are compared
    sparsity: float | None = None  # the only one there is, if there is only one

    @abstractmethod
    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        """How many weights of each group go; ``num_pruned`` are gone already, by weight."""

    def __call__(
        self,
        scores: Mapping[str, Tensor | Lazy],
        sparsity: float | None = None,
        within: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Boolean masks, True where the weight stays; what the masks ``within`` prune stays pruned."""
        from .ops import bits

        sparsity = self.sparsity if sparsity is None else sparsity
        if sparsity is None or not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), as 0.5 for a half, got {sparsity}")
        sources, live = _checked(scores, within or {})
        masks = self.packed(sources, sparsity, live) if sources else {}
        return {name: bits.unpack(masks[name], value.shape) for name, value in scores.items()}

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        """Packed masks; ``num_live`` is how many elements of all sources are live, if that is known."""
        from .threshold import num_kept_each

        numbers = num_kept_each(sources, live) if self.group == "layer" else num_live
        return self.cut(sources, self.quota_of(sources, sparsity, numbers), live, numbers)

    def quota_of(self, sources: Sequence[Lazy], sparsity: float, num_live: Counts | int | None = None) -> list[Quota]:
        """The quota of sources, of which so many elements are live."""
        shapes = [Shape(source.name, source.global_shape, source.outputs) for source in sources]
        pruned = None
        if isinstance(num_live, Mapping):
            pruned = {shape.name: shape.numel - num_live[shape.name] for shape in shapes}
        return self.quota(shapes, sparsity, pruned)

    def cut(
        self, sources: Sequence[Lazy], quotas: Sequence[Quota], live: Packed, num_live: Counts | int | None = None
    ) -> dict[str, Tensor]:
        """Packed masks without the smallest of each group; ``num_live`` of each source, or of all, are live."""
        from .rows import cut_groups, cut_rows
        from .threshold import cut, cut_each

        if self.group == "row":
            return cut_rows(sources, {name: quota.num_drop for quota in quotas for name in quota.names}, live)
        if self.group == "neighbours":
            return cut_groups(sources, quotas[0].num_drop, quotas[0].size, live)
        if isinstance(num_live, Mapping) and all(len(quota.names) == 1 for quota in quotas):
            return cut_each(sources, {quota.names[0]: quota.num_drop for quota in quotas}, live, num_live)
        masks: dict[str, Tensor] = {}
        for quota in quotas:
            names = set(quota.names)
            own = [source for source in sources if source.name in names]
            number = sum(num_live[name] for name in quota.names) if isinstance(num_live, Mapping) else num_live
            masks |= cut(own, quota.num_drop, live, number)
        return masks

    def num_pruned(
        self, sources: Sequence[Lazy], quotas: Sequence[Quota], live: Packed, num_live: int
    ) -> list[tuple[int, int]]:
        """The least and the most weights of a group of each quota that are pruned, of the groups on this rank."""
        from .rows import num_pruned, spanning
        from .threshold import num_kept_each

        if self.group == "all":
            return [(quota.size - num_live, quota.size - num_live) for quota in quotas]
        if self.group == "layer":
            each = num_kept_each(sources, live)
            pruned = [quota.size - sum(each[name] for name in quota.names) for quota in quotas]
            return list(zip(pruned, pruned, strict=True))
        spans = dict(zip(sources, spanning(sources), strict=True))
        found = []
        for source, quota in zip(sources, quotas, strict=True):
            numbers = num_pruned(source, live, quota.size, spans[source])
            found.append((int(numbers.min()), int(numbers.max())) if len(numbers) else (quota.size, 0))
        return found

    def prunes_more(self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int) -> bool:
        """Whether a group has fewer weights pruned than its quota; the same on all ranks."""
        import torch

        from .threshold import num_kept_each, sums_of

        numbers = num_kept_each(sources, live) if self.group == "layer" else num_live
        quotas = self.quota_of(sources, sparsity, numbers)
        pruned = self.num_pruned(sources, quotas, live, num_live)
        short = any(least < quota.num_drop for quota, (least, _) in zip(quotas, pruned, strict=True))
        return bool(sums_of(sources).total(torch.tensor([int(short)])))


@dataclass(frozen=True)
class Global(Selector):
    """One threshold over all weights: exactly ``round(s N)`` of all N scores are dropped."""

    group = "all"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        total = sum(shape.numel for shape in shapes)
        return [Quota(tuple(shape.name for shape in shapes), total, round(sparsity * total))]


@dataclass(frozen=True)
class PerLayer(Selector):
    """One threshold a weight; ``allocate`` says how the sparsity is spread over the weights.

    ``"uniform"`` drops ``round(s n)`` of every weight; ``"depth"``, ``"erk"`` and a mapping from
    name patterns to sparsities drop exactly ``round(s N)`` in all, and so do, for ``prune`` alone, ``"fisher"`` and
    ``"moments"``, by gradients of the trained model or Adam's second moments.
    """

    allocate: Allocation = "uniform"
    group = "layer"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        counts = allocate({s.name: s.dims for s in shapes}, sparsity, self.allocate, at_least=num_pruned)
        return [Quota((shape.name,), shape.numel, counts[shape.name]) for shape in shapes]


@dataclass(frozen=True)
class PerRow(Selector):
    """``round(s n)`` of every row of n are dropped; a row holds all inputs of one output."""

    group = "row"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        found = []
        for shape in shapes:
            size = shape.num_inputs
            found.append(Quota((shape.name,), size, round(sparsity * size), shape.numel // max(1, size)))
        return found


@dataclass(frozen=True)
class NofM(Selector):
    """The ``n`` largest of every ``m`` consecutive inputs of a row are kept."""

    n: int
    m: int
    group = "neighbours"

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(f"N:M keeps n of every m with 0 < n <= m, got {self.n}:{self.m}")

    @property
    def sparsity(self) -> float:  # pyrefly: ignore[bad-override]
        return 1 - self.n / self.m

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        num_drop = self.m - self.n if sparsity else 0
        if sparsity and abs(sparsity - self.sparsity) >= 1e-9:
            raise ValueError(
                f"{self.n}:{self.m} is a sparsity of {self.sparsity:g}, but {sparsity:g} was asked for; "
                f"give prune() sparsity={self.sparsity:g}, a Pruner OneShot({self.sparsity:g}, at=...) or "
                f"Constant({self.sparsity:g})"
            )
        for shape in shapes:
            if sparsity and shape.num_inputs % self.m:
                raise ValueError(
                    f"{shape.name} has rows of {shape.num_inputs} inputs, which {self.m} does not divide; "
                    "exclude it, or choose another N:M"
                )
        return [Quota((shape.name,), self.m, num_drop, shape.numel // self.m) for shape in shapes]


SELECTORS: dict[str, Selector] = {  # by their names on the command line
    "global": Global(),
    "uniform": PerLayer("uniform"),
    "depth": PerLayer("depth"),
    "erk": PerLayer("erk"),
    "row": PerRow(),
    "2:4": NofM(2, 4),
}


def _checked(scores: Mapping[str, Tensor | Lazy], within: Mapping[str, Tensor]) -> tuple[list[Lazy], dict[str, Tensor]]:
    """Sources of scores given by name, and packed masks of what is live: the border where they are checked."""
    import torch

    from .ops import bits
    from .ops.lazy import Lazy, alike, stored
    from .ranks import is_dtensor

    if sharded := [name for name, value in scores.items() if is_dtensor(value)]:
        raise ValueError(f"the scores of {sharded[0]} are a DTensor; a selector takes whole tensors, a Pruner shards")
    if unknown := sorted(set(within) - set(scores)):
        raise ValueError(f"within names {unknown[0]}, which has no scores; the scores are of: {', '.join(scores)}")
    sources = alike([value if isinstance(value, Lazy) else stored(name, value) for name, value in scores.items()])
    live = {}
    for source in sources:
        mask = within.get(source.name)
        if mask is not None:
            if mask.shape != scores[source.name].shape or mask.dtype != torch.bool:
                raise ValueError(f"within[{source.name!r}] must be boolean of shape {tuple(source.shape)}")
            live[source.name] = bits.pack(mask.to(source.device))
    return sources, live


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
        raise ValueError(f"allocate={how!r} reads gradients of a trained model: it is for prune(), not for training")
    else:
        raise ValueError(f"allocate must be uniform, depth, erk or a mapping from patterns to sparsities, got {how!r}")
    return dict(zip(shapes, counts, strict=True))


def clipped(wish: Sequence[int], sizes: Sequence[int], sparsity: float, floor: Sequence[int]) -> list[int]:
    """Numbers of weights to drop near ``wish``, ``round(s N)`` in all; ``floor`` are dropped already.

    Sparsities of layers are shifted by one constant, clipped to ``s - 0.15 .. s + 0.15`` and ``0 .. 0.98``.
    """
    total, largest = round(sparsity * sum(sizes)), min(MOST, sparsity + NEAR)
    floor = [max(low, math.floor(max(0.0, sparsity - NEAR) * size)) for low, size in zip(floor, sizes, strict=True)]
    ceiling = [max(low, math.ceil(largest * size)) for low, size in zip(floor, sizes, strict=True)]
    if sum(ceiling) < total:
        raise ValueError(
            f"a sparsity of {sparsity:g} cannot be reached where no layer may be sparser than {largest:g}; "
            "take a lower one, or allocate='uniform'"
        )
    return _summing_to(total, lambda x: [w + (x - 1) * n for w, n in zip(wish, sizes, strict=True)], floor, ceiling)


def spread(wish: Sequence[float], total: int, floor: Sequence[int], ceiling: Sequence[int]) -> list[int]:
    """Whole numbers between ``floor`` and ``ceiling``, in proportion to ``wish``, that sum to ``total``."""
    ceiling = [high if w > 0 else low for w, low, high in zip(wish, floor, ceiling, strict=True)]
    if total > max(sum(floor), sum(ceiling)):
        raise ValueError(f"{total} weights are to be dropped, but the layers that may lose any hold {sum(ceiling)}")
    return _summing_to(total, lambda x: [x * w for w in wish], floor, ceiling)


def _summing_to(
    total: int, values: Callable[[float], list[float]], floor: Sequence[int], ceiling: Sequence[int]
) -> list[int]:
    """Whole numbers between ``floor`` and ``ceiling`` near ``values(x)``, for the x with which they sum to ``total``.

    ``values`` rises with x, which is found by bisection; what rounding down leaves over goes to the largest
    remainders. A total below the floors gives the floors.
    """
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
