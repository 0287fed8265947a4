"""Scores to masks, exact to the weight.

A selector takes scores by name, the sparsity, and the masks ``within`` which it must stay. A score
may exist (a tensor) or be a ``Lazy`` source that is evaluated piece by piece and never stored; both
give the same masks. The smallest are dropped; of equal scores the first in order is dropped first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .across import kernels_read, ranks_of_all
from .across_rows import cut_groups, cut_rows, spanning
from .allocate import Allocation, allocate
from .cut import Packed, cut, cut_each, kept, num_kept_each
from .ops import bits
from .ops.order import kth_smallest
from .ops.shard import together
from .ops.source import Lazy, alike, stored
from .ops.sweep import check_finite
from .ranks import is_dtensor
from .schedule import Ramp, Schedule

Scores = Mapping[str, Tensor | Lazy]
Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class Global:
    """One threshold over all weights: exactly ``round(s N)`` of all N scores are dropped."""

    def __call__(self, scores: Scores, sparsity: float, within: Masks | None = None) -> dict[str, Tensor]:
        return _unpacked(self, scores, sparsity, within)

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        """Packed masks; ``num_live`` is how many elements of all sources are live, if that is known."""
        return cut(sources, round(sparsity * sum(source.whole_numel for source in sources)), live, num_live)


@dataclass(frozen=True)
class PerLayer:
    """One threshold a weight; ``allocate`` says how the sparsity is spread over the weights.

    ``"uniform"`` drops ``round(s n)`` of every weight; ``"depth"``, ``"erk"`` and a mapping from
    name patterns to sparsities drop exactly ``round(s N)`` in all.
    """

    allocate: Allocation = "uniform"

    def __call__(self, scores: Scores, sparsity: float, within: Masks | None = None) -> dict[str, Tensor]:
        return _unpacked(self, scores, sparsity, within)

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        shapes = {source.name: source.whole_shape for source in sources}
        kept_now = num_kept_each(sources, live)
        pruned = {source.name: source.whole_numel - kept_now[source.name] for source in sources}
        num_drop = allocate(shapes, sparsity, self.allocate, at_least=pruned)
        return cut_each(sources, num_drop, live, kept_now)


@dataclass(frozen=True)
class PerRow:
    """``round(s n)`` of every row of n are dropped; a row holds all inputs of one output."""

    def __call__(self, scores: Scores, sparsity: float, within: Masks | None = None) -> dict[str, Tensor]:
        return _unpacked(self, scores, sparsity, within)

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        def drop(_: Lazy, rows: Tensor) -> Tensor:
            return smallest(rows, round(sparsity * rows.shape[1]))

        def by_kernel(whole: Sequence[Lazy]) -> dict[str, Tensor]:
            from .ops._triton.within import drop_in_rows

            return drop_in_rows(whole, [round(sparsity * source.num_inputs) for source in whole], live)

        def over_ranks(source: Lazy) -> Tensor:
            return cut_rows(source, live, round(sparsity * source.num_inputs))

        return _masks_by_rows(sources, live, drop, by_kernel, over_ranks)


@dataclass(frozen=True)
class NofM:
    """The ``n`` largest of every ``m`` consecutive inputs of a row are kept."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(f"N:M keeps n of every m with 0 < n <= m, got {self.n}:{self.m}")

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def __call__(self, scores: Scores, sparsity: float | None = None, within: Masks | None = None) -> dict[str, Tensor]:
        return _unpacked(self, scores, self.sparsity if sparsity is None else sparsity, within)

    def packed(
        self, sources: Sequence[Lazy], sparsity: float, live: Packed, num_live: int | None = None
    ) -> dict[str, Tensor]:
        if sparsity == 0:
            return {source.name: kept(source, live) for source in sources}
        if not self.fits(sparsity):
            raise ValueError(
                f"{self.n}:{self.m} is a sparsity of {self.sparsity:g}, but {sparsity:g} was asked for; "
                f"use OneShot({self.sparsity:g}, at=...) or Constant({self.sparsity:g})"
            )
        for source in sources:
            if source.outputs is not None and source.num_inputs % self.m:
                raise ValueError(
                    f"{source.name} has rows of {source.num_inputs} inputs, which {self.m} does not divide; "
                    "exclude it, or choose another N:M"
                )

        def by_kernel(whole: Sequence[Lazy]) -> dict[str, Tensor]:
            from .ops._triton.within import drop_in_groups

            return drop_in_groups(whole, self.m - self.n, self.m, live)

        def over_ranks(source: Lazy) -> Tensor:
            return cut_groups(source, live, self.m, self.drop)

        return _masks_by_rows(sources, live, self.drop, by_kernel, over_ranks)

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule that asks for another sparsity than the one there is."""
        if isinstance(schedule, Ramp) or not self.fits(schedule.final):
            fitting = f"OneShot({self.sparsity:g}, at=...) or Constant({self.sparsity:g})"
            raise ValueError(f"{self} has one sparsity and goes with {fitting}, got {schedule}")

    def fits(self, sparsity: float) -> bool:
        return sparsity == 0 or abs(sparsity - self.sparsity) < 1e-9

    def drop(self, _: Lazy, rows: Tensor) -> Tensor:
        """Where the ``m - n`` smallest of each group stand."""
        groups = rows.unflatten(1, (-1, self.m))
        rank = torch.zeros(groups.shape, dtype=torch.int16, device=rows.device)
        for j in range(self.m):
            other = groups[..., j : j + 1]
            rank[..., : j + 1] += other < groups[..., : j + 1]
            rank[..., j + 1 :] += other <= groups[..., j + 1 :]
        return (rank < self.m - self.n).flatten(1)


Selector = Global | PerLayer | PerRow | NofM


def smallest(rows: Tensor, num_drop: int) -> Tensor:
    """Where the ``num_drop`` smallest of each row stand, the first of equal ones first."""
    if num_drop == 0:
        return torch.zeros_like(rows, dtype=torch.bool)
    threshold = kth_smallest(rows, num_drop)
    found = rows <= threshold
    crowded = (found.sum(1) > num_drop).nonzero().squeeze(1)  # where several equal the threshold
    below, equal = rows[crowded] < threshold[crowded], rows[crowded] == threshold[crowded]
    num_equal = num_drop - below.sum(1, keepdim=True)
    found[crowded] = below | (equal & (equal.cumsum(1) <= num_equal))
    return found


def by_rows(source: Lazy, live: Packed, drop: Callable[[Lazy, Tensor], Tensor]) -> Tensor:
    """Packed mask of one weight without what ``drop`` says of its rows; the dead are dropped first."""
    keep = torch.empty(source.shape, dtype=torch.bool, device=source.device)
    alive = bits.unpack(live[source.name], source.shape) if source.name in live else None
    for part, rows in source.rows():
        here = None if alive is None else source.rows_of(alive)[part].flatten(1)
        check_finite(source.name, rows, None if here is None else bits.pack(here))
        if here is not None:
            rows = rows if rows.is_floating_point() else rows.unique(return_inverse=True)[1]
            rows = rows.masked_fill(~here, -torch.inf if rows.is_floating_point() else -1)
        dropped = drop(source, rows)
        keep_here = ~dropped if here is None else ~dropped & here
        target = source.rows_of(keep)[part]
        target.copy_(keep_here.view(target.shape))
    return bits.pack(keep)


def _masks_by_rows(
    sources: Sequence[Lazy],
    live: Packed,
    drop: Callable[[Lazy, Tensor], Tensor],
    by_kernel: Callable[[Sequence[Lazy]], dict[str, Tensor]],
    over_ranks: Callable[[Lazy], Tensor],
) -> dict[str, Tensor]:
    """Packed masks by rows: rows that lie whole here are cut here, on a GPU ``by_kernel``; others ``over_ranks``."""

    def here(whole: Sequence[Lazy]) -> dict[str, Tensor]:
        read = [source for source in whole if source.numel and kernels_read(source)]
        masks = by_kernel(read) if read else {}
        return masks | {source.name: by_rows(source, live, drop) for source in whole if source.name not in masks}

    if not sources[0].part:
        return here(sources)
    spans = dict(zip(sources, spanning(sources), strict=True))
    masks = together(ranks_of_all(sources), lambda: here([source for source in sources if not spans[source]]))
    return masks | {source.name: over_ranks(source) for source in sources if spans[source]}


def _unpacked(selector: Selector, scores: Scores, sparsity: float, within: Masks | None) -> dict[str, Tensor]:
    """Boolean masks of scores given by name: the border where they are checked."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), got {sparsity}")
    if sharded := [name for name, value in scores.items() if is_dtensor(value)]:
        raise ValueError(f"the scores of {sharded[0]} are a DTensor; a selector takes whole tensors, a Pruner shards")
    within = within or {}
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
    if not sources:
        return {}
    masks = selector.packed(sources, sparsity, live)
    return {name: bits.unpack(masks[name], value.shape) for name, value in scores.items()}
