"""The cut within rows, and within groups of M neighbours of a row: the smallest of each go, the dead first.

Rows that lie whole on a rank are cut there, on a GPU by kernels, and nothing travels. Where shards cut through rows,
counts of 4-bit digits travel, 16 for each row; where they cut through groups of M, the scores of these groups alone do.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .ops import bits
from .ops.candidates import Packed, check_finite, kernels_read
from .ops.lazy import Lazy, Sources, sortable
from .ops.shard import Shard, together
from .threshold import kept, sums_of

DIGIT = 4  # bits of a key that one round of counts settles
FEW = 8  # elements of a row up to which it is cheaper to compare all pairs than to sort
ROOM = 1 << 22  # elements of a weight over all ranks that are worked on at a time


@dataclass(frozen=True)
class RowScores:
    """Some rows of a weight, and what this rank has of them; the dead have the least score."""

    scores: Tensor  # (indices, columns)
    alive: Tensor | None  # None where all are
    indices: Tensor  # which of the ``num`` rows are here
    columns: Tensor  # which inputs of a row are here
    num: int
    shard: Shard | None  # None where rows lie whole on this rank

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over the ranks that own their shards."""
        assert self.shard is not None
        return self.shard.ranks.total(numbers if self.shard.is_owner else torch.zeros_like(numbers))


Decide = Callable[[RowScores], Tensor]  # what goes


def cut_rows(sources: Sources, num_drop: Mapping[str, int], live: Packed) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every row of a weight, the first of equal ones first."""

    def by_kernel(whole: Sources) -> dict[str, Tensor]:
        from .ops._triton.rows import drop_in_rows

        return drop_in_rows(whole, [num_drop[source.name] for source in whole], live)

    return _masks(sources, live, lambda source, _: lambda rows: smallest(rows, num_drop[source.name]), by_kernel)


def cut_groups(sources: Sources, num_drop: int, group: int, live: Packed) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest of every ``group`` neighbours in a row."""
    if num_drop == 0:
        return {source.name: kept(source, live) for source in sources}

    def by_kernel(whole: Sources) -> dict[str, Tensor]:
        from .ops._triton.rows import drop_in_groups

        return drop_in_groups(whole, num_drop, group, live)

    def decide(source: Lazy, is_shared: bool) -> Decide:
        return smallest_of_groups(source, num_drop, group, is_shared)

    return _masks(sources, live, decide, by_kernel)


def _masks(
    sources: Sources,
    live: Packed,
    decide: Callable[[Lazy, bool], Decide],
    by_kernel: Callable[[Sources], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Packed masks: rows that lie whole here are cut here, then those that ranks share, weight by weight."""
    spans = dict(zip(sources, spanning(sources), strict=True))

    def here() -> dict[str, Tensor]:
        whole = [source for source in sources if not spans[source]]
        read = [source for source in whole if source.numel and kernels_read(source)]
        masks = by_kernel(read) if read else {}
        return masks | {s.name: by_rows(s, whole_rows(s, live), decide(s, False)) for s in whole if s.name not in masks}

    masks = together(sums_of(sources) if sources[0].shard else None, here)
    return masks | {s.name: by_rows(s, shared_rows(s, live), decide(s, True)) for s in sources if spans[s]}


def spanning(sources: Sources) -> list[bool]:
    """Whether the rows of each weight reach over several ranks; the same on all of them."""
    if not sources[0].shard:
        return [False] * len(sources)
    inputs = [source.shard.along(_dims(source)[1]) for source in sources if source.shard]
    flags = torch.tensor([int(each.global_shape != each.shape) for each in inputs])
    return sums_of(sources).total(flags).bool().tolist()


def by_rows(source: Lazy, chunks: Iterator[tuple[slice, RowScores]], decide: Decide) -> Tensor:
    """Packed mask of what this rank holds of a weight, without what is decided to go and without the dead."""
    keep = torch.empty(source.rows_of(source.weight).shape, dtype=torch.bool, device=source.device)
    for here, rows in chunks:
        stays = ~decide(rows)
        keep[here] = (stays if rows.alive is None else stays & rows.alive).view(keep[here].shape)
    return bits.pack(source.from_rows(keep).contiguous())


def whole_rows(source: Lazy, live: Packed) -> Iterator[tuple[slice, RowScores]]:
    """Rows that lie whole on this rank, some at a time; checked to be finite."""
    unused = torch.arange(0)
    for here, scores, alive in _checked(source, live, None):
        if alive is not None:
            if not scores.is_floating_point():  # ranks, so that there is a number below all of them
                scores = scores.unique(return_inverse=True)[1]
            scores = scores.masked_fill(~alive, -torch.inf if scores.is_floating_point() else -1)
        yield here, RowScores(scores, alive, unused, unused, len(scores), None)


def shared_rows(source: Lazy, live: Packed) -> Iterator[tuple[slice, RowScores]]:
    """This rank's share of successive rows, which are the same rows on all ranks at a time; checked to be finite."""
    shard = source.shard
    assert shard is not None
    num_rows, step = math.prod(shard.along(_dims(source)[0]).global_shape), max(1, ROOM // source.num_inputs)
    mine, columns = _places_of(source)
    starts = [*range(0, num_rows, step), num_rows]
    borders = torch.searchsorted(mine, torch.tensor(starts, device=source.device)).tolist()
    parts = _checked(source, live, [slice(first, last) for first, last in pairwise(borders)])
    for first, last in pairwise(starts):
        here, scores, alive = together(shard.ranks, lambda: next(parts))
        if alive is not None:
            least = -torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).min
            scores = scores.masked_fill(~alive, least)
        yield here, RowScores(scores, alive, mine[here] - first, columns, last - first, shard)


def _places_of(source: Lazy) -> tuple[Tensor, Tensor]:
    """Which rows and which inputs of the weight over all ranks this one holds."""
    assert source.shard is not None
    rows, inputs = (source.shard.along(dims) for dims in _dims(source))
    numbers = torch.arange(max(math.prod(rows.shape), math.prod(inputs.shape)), device=source.device)
    return rows.positions(numbers[: math.prod(rows.shape)]), inputs.positions(numbers[: math.prod(inputs.shape)])


def _checked(
    source: Lazy, live: Packed, parts: Sequence[slice] | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Which rows, their scores, and which of them are live (None: all)."""
    living = bits.unpack(live[source.name], source.shape) if source.name in live else None
    for here, scores in source.rows(parts):
        alive = None if living is None else source.rows_of(living)[here].flatten(1)
        check_finite(source.name, scores, None if alive is None else bits.pack(alive))
        yield here, scores, alive


def _dims(source: Lazy) -> tuple[list[int], list[int]]:
    """Dimensions of the weight that count outputs, and those that count inputs."""
    outputs = list(source.outputs or ())
    return outputs, [dim for dim in range(len(source.global_shape)) if dim not in outputs]


def smallest(rows: RowScores, num_drop: int) -> Tensor:
    """Where the ``num_drop`` smallest of each row stand, the first of equal ones first."""
    return _smallest_of_whole(rows.scores, num_drop) if rows.shard is None else _smallest_by_counts(rows, num_drop)


def _smallest_of_whole(scores: Tensor, num_drop: int) -> Tensor:
    if num_drop == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.is_cpu:  # where numpy's selection is faster
        threshold = torch.from_numpy(np.partition(scores.numpy(), num_drop - 1)[:, num_drop - 1 : num_drop].copy())
    else:
        threshold = scores.sort(dim=-1).values[:, num_drop - 1 : num_drop]
    drops = scores <= threshold
    crowded = (drops.sum(1) > num_drop).nonzero().squeeze(1)  # where several equal the threshold
    below, equal = scores[crowded] < threshold[crowded], scores[crowded] == threshold[crowded]
    num_equal = num_drop - below.sum(1, keepdim=True)
    drops[crowded] = below | (equal & (equal.cumsum(1) <= num_equal))
    return drops


def _smallest_of_few(scores: Tensor, num_drop: int) -> Tensor:
    """The same for short rows on a CPU: each element is compared with each, all rows at once."""
    columns = np.ascontiguousarray(scores.numpy().T)
    ranks = np.zeros(columns.shape, np.uint8)
    for last in range(1, len(columns)):
        for first in range(last):  # which goes before the last where they are equal
            is_before = columns[first] <= columns[last]
            ranks[last] += is_before
            ranks[first] += ~is_before
    return torch.from_numpy(np.ascontiguousarray((ranks < num_drop).T))


def _smallest_by_counts(rows: RowScores, num_drop: int) -> Tensor:
    if num_drop == 0:
        return torch.zeros_like(rows.scores, dtype=torch.bool)
    keys, everything = sortable(rows.scores), torch.ones_like(rows.scores, dtype=torch.bool)
    wanted = torch.full((rows.num, 1), num_drop, device=keys.device)
    width = 8 * rows.scores.element_size()
    threshold, left, num_equal = _descend(rows, keys, everything, wanted, width)
    below, equal = keys < threshold[rows.indices], keys == threshold[rows.indices]
    if bool((num_equal > left).any()):
        assert rows.shard is not None
        columns = rows.columns.expand(keys.shape)
        width = DIGIT * -(-(math.prod(rows.shard.global_shape).bit_length() + 1) // DIGIT)
        last, _, _ = _descend(rows, columns, equal, left, width)
        equal &= columns <= last[rows.indices]
    return below | equal


def _descend(rows: RowScores, keys: Tensor, valid: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the key of rank ``wanted`` among its valid keys, its rank among equal ones, and their number."""
    prefix, num_equal = torch.zeros_like(wanted), wanted
    for shift in range(width - DIGIT, -1, -DIGIT):
        digits = (keys >> shift) & (1 << DIGIT) - 1
        match = valid
        if shift == width - DIGIT:
            digits = digits ^ 1 << DIGIT - 1  # the sign's place
        else:
            match = valid & (keys >> shift + DIGIT == prefix[rows.indices])
        slots = (rows.indices.unsqueeze(1) << DIGIT) + digits
        here = torch.bincount(slots[match], minlength=rows.num << DIGIT).view(-1, 1 << DIGIT).int()
        counts = rows.total(here).long()
        up_to = counts.cumsum(1)
        at = (up_to < wanted).sum(1, keepdim=True)
        num_equal = counts.gather(1, at)
        wanted = wanted - up_to.gather(1, at) + num_equal
        prefix = at - (1 << DIGIT - 1) if shift == width - DIGIT else prefix << DIGIT | at
    return prefix, wanted, num_equal


def smallest_of_groups(source: Lazy, num_drop: int, group: int, is_shared: bool) -> Decide:
    """Where the ``num_drop`` smallest of each group of neighbours stand; groups that shards cut are put together."""

    def of_whole(scores: Tensor) -> Tensor:
        smallest = _smallest_of_few if scores.is_cpu and group <= FEW else _smallest_of_whole
        return smallest(scores.reshape(-1, group), num_drop).view(scores.shape)

    if not is_shared:
        return lambda rows: of_whole(rows.scores)
    shard, (_, columns) = source.shard, _places_of(source)
    assert shard is not None
    num_here = torch.bincount(columns // group, minlength=source.num_inputs // group)
    torn = shard.ranks.total(((num_here > 0) & (num_here < group)).long()) > 0
    is_torn = torn[columns // group]
    places = torn.cumsum(0)[columns[is_torn] // group].sub_(1) * group + columns[is_torn] % group

    def decide(rows: RowScores) -> Tensor:
        dropped = torch.empty_like(rows.scores, dtype=torch.bool)
        dropped[:, ~is_torn] = of_whole(rows.scores[:, ~is_torn])
        whole = rows.scores.new_zeros(rows.num, int(torn.sum()) * group)
        whole[rows.indices.unsqueeze(1), places] = rows.scores[:, is_torn]
        dropped[:, is_torn] = of_whole(rows.total(whole))[rows.indices.unsqueeze(1), places]
        return dropped

    return decide


def num_pruned(source: Lazy, live: Packed, group: int, is_shared: bool) -> Tensor:
    """Pruned elements of each ``group`` neighbours of the rows on this rank, or of all rows if ranks share them."""
    dead = ~source.rows_of(bits.unpack(kept(source, live), source.shape)).flatten(1)
    if not is_shared:
        return dead.reshape(-1, group).sum(1)
    shard = source.shard
    assert shard is not None
    rows, columns = _places_of(source)
    num_rows = math.prod(shard.along(_dims(source)[0]).global_shape)
    counts = torch.zeros(num_rows, source.num_inputs // group, dtype=torch.int32, device=dead.device)
    if shard.is_owner:
        counts.index_put_((rows.unsqueeze(1), columns // group), dead.int(), accumulate=True)
    return shard.ranks.total(counts).flatten()
