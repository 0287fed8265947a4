"""Scores to masks, exact to the weight.

A selector answers two questions: how many weights go at a sparsity (``quota``), from shapes and counts alone, and
which ones, given these numbers (``cut``). It takes scores by name, the sparsity, and the masks that hold so far: what
they prune stays pruned. A score may exist (a tensor) or be a ``Lazy`` source that is evaluated piece by piece and never
stored; both give the same masks. The smallest are dropped; of equal scores the first in order is dropped first.
"""

from __future__ import annotations  # the command line reads SELECTORS without loading torch

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from .allocate import Allocation, allocate

if TYPE_CHECKING:
    from torch import Tensor

    from .ops.candidates import Packed
    from .ops.lazy import Lazy, Sources

Counts = Mapping[str, int]  # weights by name
Live = Counts | int | None  # live elements of each weight, or of all; None where they are not known


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
    """How many weights of each group go, and which: here a group is the whole of one weight, or of several."""

    # within what scores are compared; regrowth and ``prune`` ask
    group: ClassVar[Literal["all", "layer", "row", "neighbours"]] = "layer"
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

    def packed(self, sources: Sources, sparsity: float, live: Packed, num_live: int | None = None) -> dict[str, Tensor]:
        """Packed masks; ``num_live`` is how many elements of all sources are live, if that is known."""
        counted = self.count_live(sources, live, num_live)
        return self.cut(sources, self.quota_of(sources, sparsity, counted), live, counted)

    def quota_of(self, sources: Sources, sparsity: float, num_live: Live = None) -> list[Quota]:
        """The quota of sources, of which so many elements are live."""
        shapes = [Shape(source.name, source.global_shape, source.outputs) for source in sources]
        pruned = None
        if isinstance(num_live, Mapping):
            pruned = {shape.name: shape.numel - num_live[shape.name] for shape in shapes}
        return self.quota(shapes, sparsity, pruned)

    def count_live(self, sources: Sources, live: Packed, num_live: int | None) -> Live:
        """What ``quota_of`` and ``cut`` need to know: live elements of each source, or of all if those suffice."""
        from .threshold import num_kept_each

        return num_kept_each(sources, live)

    def cut(self, sources: Sources, quotas: Sequence[Quota], live: Packed, num_live: Live = None) -> dict[str, Tensor]:
        """Packed masks without the smallest of each group; ``num_live`` is what ``count_live`` gave."""
        from .threshold import cut, cut_each

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
        self, sources: Sources, quotas: Sequence[Quota], live: Packed, num_live: Live
    ) -> list[tuple[int, int]]:
        """The least and the most weights of a group of each quota that are pruned, of the groups on this rank."""
        if isinstance(num_live, Mapping):
            pruned = [quota.size - sum(num_live[name] for name in quota.names) for quota in quotas]
        else:
            pruned = [quota.size - (num_live or 0) for quota in quotas]
        return list(zip(pruned, pruned, strict=True))

    def prunes_more(self, sources: Sources, sparsity: float, live: Packed, num_live: int) -> bool:
        """Whether a group has fewer weights pruned than its quota; the same on all ranks."""
        import torch

        from .threshold import sums_of

        counted = self.count_live(sources, live, num_live)
        quotas = self.quota_of(sources, sparsity, counted)
        pruned = self.num_pruned(sources, quotas, live, counted)
        short = any(least < quota.num_drop for quota, (least, _) in zip(quotas, pruned, strict=True))
        return bool(sums_of(sources).total(torch.tensor([int(short)])))


@dataclass(frozen=True)
class Global(Selector):
    """One threshold over all weights: exactly ``round(s N)`` of all N scores are dropped."""

    group = "all"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        total = sum(shape.numel for shape in shapes)
        return [Quota(tuple(shape.name for shape in shapes), total, round(sparsity * total))]

    def count_live(self, sources: Sources, live: Packed, num_live: int | None) -> Live:
        return num_live


@dataclass(frozen=True)
class PerLayer(Selector):
    """One threshold a weight; ``allocate`` says how the sparsity is spread over the weights.

    ``"uniform"`` drops ``round(s n)`` of every weight; ``"depth"``, ``"erk"`` and a mapping from
    name patterns to sparsities drop exactly ``round(s N)`` in all, and so do, for ``prune`` alone, ``"fisher"`` and
    ``"moments"``, by gradients of the trained model or Adam's second moments.
    """

    allocate: Allocation = "uniform"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        counts = allocate({s.name: s.dims for s in shapes}, sparsity, self.allocate, at_least=num_pruned)
        return [Quota((shape.name,), shape.numel, counts[shape.name]) for shape in shapes]


class _WithinRows(Selector):
    """Each quota is of the rows of one weight, or of parts of them."""

    def count_live(self, sources: Sources, live: Packed, num_live: int | None) -> Live:
        return None

    def num_pruned(
        self, sources: Sources, quotas: Sequence[Quota], live: Packed, num_live: Live
    ) -> list[tuple[int, int]]:
        from .rows import num_pruned, spanning

        ranges = []
        for source, quota, spans in zip(sources, quotas, spanning(sources), strict=True):
            numbers = num_pruned(source, live, quota.size, spans)
            ranges.append((int(numbers.min()), int(numbers.max())) if len(numbers) else (quota.size, 0))
        return ranges


@dataclass(frozen=True)
class PerRow(_WithinRows):
    """``round(s n)`` of every row of n are dropped; a row holds all inputs of one output."""

    group = "row"

    def quota(self, shapes: Sequence[Shape], sparsity: float, num_pruned: Counts | None = None) -> list[Quota]:
        sizes = [shape.num_inputs for shape in shapes]
        return [
            Quota((shape.name,), size, round(sparsity * size), shape.numel // max(1, size))
            for shape, size in zip(shapes, sizes, strict=True)
        ]

    def cut(self, sources: Sources, quotas: Sequence[Quota], live: Packed, num_live: Live = None) -> dict[str, Tensor]:
        from .rows import cut_rows

        return cut_rows(sources, {quota.names[0]: quota.num_drop for quota in quotas}, live)


@dataclass(frozen=True)
class NofM(_WithinRows):
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
            own = self.sparsity
            problem = f"{self.n}:{self.m} is a sparsity of {own:g}, but {sparsity:g} was asked for; give prune()"
            raise ValueError(f"{problem} sparsity={own:g}, a Pruner OneShot({own:g}, at=...) or Constant({own:g})")
        for shape in shapes:
            if sparsity and shape.num_inputs % self.m:
                problem = f"{shape.name} has rows of {shape.num_inputs} inputs, which {self.m} does not divide"
                raise ValueError(f"{problem}; exclude it, or choose another N:M")
        return [Quota((shape.name,), self.m, num_drop, shape.numel // self.m) for shape in shapes]

    def cut(self, sources: Sources, quotas: Sequence[Quota], live: Packed, num_live: Live = None) -> dict[str, Tensor]:
        from .rows import cut_groups

        return cut_groups(sources, quotas[0].num_drop, quotas[0].size, live)


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
