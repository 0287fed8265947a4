"""Scores to masks, exact to the weight.

A selector answers two questions: how many weights go at a sparsity (``quota``), from shapes and counts alone, and
which ones, given these numbers (``cut``). It takes scores by name, the sparsity, and the masks ``within`` which it must
stay. A score may exist (a tensor) or be a ``Lazy`` source that is evaluated piece by piece and never stored; both
give the same masks. The smallest are dropped; of equal scores the first in order is dropped first.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .allocate import Allocation, allocate
from .ops import bits
from .ops.candidates import Packed
from .ops.lazy import Lazy, alike, stored
from .ranks import is_dtensor
from .rows import cut_groups, cut_rows, num_pruned, spanning
from .threshold import cut, cut_each, num_kept_each, sums_of

Scores = Mapping[str, Tensor | Lazy]
Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
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
        return math.prod(size for dim, size in enumerate(self.dims) if dim not in (self.outputs or ()))


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
    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        """How many weights of each group go; ``num_pruned`` are gone already, by weight."""

    def __call__(self, scores: Scores, sparsity: float | None = None, within: Masks | None = None) -> dict[str, Tensor]:
        """Boolean masks, True where the weight stays."""
        sparsity = self.sparsity if sparsity is None else sparsity
        if sparsity is None or not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), got {sparsity}")
        sources, live = _checked(scores, within or {})
        masks = self.packed(sources, sparsity, live) if sources else {}
        return {name: bits.unpack(masks[name], value.shape) for name, value in scores.items()}

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        """Packed masks; ``num_live`` is how many elements of all sources are live, if that is known."""
        numbers = num_kept_each(sources, live) if self.group == "layer" else num_live
        return self.cut(sources, self.quota_of(sources, sparsity, numbers), live, numbers)

    def quota_of(
        self, sources: Sequence[Lazy], sparsity: float, num_live: Mapping[str, int] | int | None = None
    ) -> list[Quota]:
        """The quota of sources, of which so many elements are live."""
        shapes = [Shape(source.name, source.global_shape, source.outputs) for source in sources]
        pruned = None
        if isinstance(num_live, Mapping):
            pruned = {shape.name: shape.numel - num_live[shape.name] for shape in shapes}
        return self.quota(shapes, sparsity, pruned)

    def cut(
        self,
        sources: Sequence[Lazy],
        quotas: Sequence[Quota],
        live: Packed,
        num_live: Mapping[str, int] | int | None = None,
    ) -> dict[str, Tensor]:
        """Packed masks without the smallest of each group; ``num_live`` of each source, or of all, are live."""
        if self.group == "row":
            return cut_rows(sources, {name: quota.num_drop for quota in quotas for name in quota.names}, live)
        if self.group == "neighbours":
            return cut_groups(sources, quotas[0].num_drop, quotas[0].size, live)
        if isinstance(num_live, Mapping) and all(len(quota.names) == 1 for quota in quotas):
            return cut_each(sources, {quota.names[0]: quota.num_drop for quota in quotas}, live, num_live)
        masks: dict[str, Tensor] = {}
        for quota in quotas:
            own = [source for source in sources if source.name in quota.names]
            number = sum(num_live[name] for name in quota.names) if isinstance(num_live, Mapping) else num_live
            masks |= cut(own, quota.num_drop, live, number)
        return masks

    def num_pruned(
        self, sources: Sequence[Lazy], quotas: Sequence[Quota], live: Packed, num_live: int | None = None
    ) -> list[tuple[int, int]]:
        """The least and the most weights of a group of each quota that are pruned, of the groups on this rank."""
        if self.group == "all" and num_live is not None:
            return [(quota.size - num_live, quota.size - num_live) for quota in quotas]
        if self.group in ("all", "layer"):
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
        numbers = num_kept_each(sources, live) if self.group == "layer" else num_live
        quotas = self.quota_of(sources, sparsity, numbers)
        pruned = self.num_pruned(sources, quotas, live, num_live)
        short = any(least < quota.num_drop for quota, (least, _) in zip(quotas, pruned, strict=True))
        return bool(sums_of(sources).total(torch.tensor([int(short)])))


@dataclass(frozen=True)
class Global(Selector):
    """One threshold over all weights: exactly ``round(s N)`` of all N scores are dropped."""

    group = "all"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        total = sum(shape.numel for shape in shapes)
        return [Quota(tuple(shape.name for shape in shapes), total, round(sparsity * total))]


@dataclass(frozen=True)
class PerLayer(Selector):
    """One threshold a weight; ``allocate`` says how the sparsity is spread over the weights.

    ``"uniform"`` drops ``round(s n)`` of every weight; ``"depth"``, ``"erk"`` and a mapping from
    name patterns to sparsities drop exactly ``round(s N)`` in all, and so does ``"fisher"``, for ``prune`` alone.
    """

    allocate: Allocation = "uniform"
    group = "layer"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        counts = allocate({s.name: s.dims for s in shapes}, sparsity, self.allocate, at_least=num_pruned)
        return [Quota((shape.name,), shape.numel, counts[shape.name]) for shape in shapes]


@dataclass(frozen=True)
class PerRow(Selector):
    """``round(s n)`` of every row of n are dropped; a row holds all inputs of one output."""

    group = "row"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        return [Quota((s.name,), s.num_inputs, round(sparsity * s.num_inputs), _num_groups(s)) for s in shapes]


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

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        num_drop = self.m - self.n if sparsity else 0
        if sparsity and abs(sparsity - self.sparsity) >= 1e-9:
            raise ValueError(
                f"{self.n}:{self.m} is a sparsity of {self.sparsity:g}, but {sparsity:g} was asked for; "
                f"use OneShot({self.sparsity:g}, at=...) or Constant({self.sparsity:g})"
            )
        for shape in shapes:
            if sparsity and shape.outputs is not None and shape.num_inputs % self.m:
                raise ValueError(
                    f"{shape.name} has rows of {shape.num_inputs} inputs, which {self.m} does not divide; "
                    "exclude it, or choose another N:M"
                )
        return [Quota((shape.name,), self.m, num_drop, shape.numel // self.m) for shape in shapes]


def _num_groups(shape: Shape) -> int:
    return shape.numel // max(1, shape.num_inputs)


def _checked(scores: Scores, within: Masks) -> tuple[list[Lazy], dict[str, Tensor]]:
    """Sources of scores given by name, and packed masks of what is live: the border where they are checked."""
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
