"""Cuts within rows and within groups of M whose elements several ranks hold.

Rows that lie whole on a rank are cut there, and nothing travels. Where shards cut through rows, counts of
4-bit digits travel, 16 for each row; where they cut through groups of M, the scores of these groups alone do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .across import ranks_of_all
from .ops import bits
from .ops.digits import sortable
from .ops.sample import Packed
from .ops.shard import Shard, together
from .ops.source import Lazy
from .ops.sweep import check_finite

DIGIT = 4  # bits of a key that one round of counts settles
ROOM = 1 << 22  # elements of the whole weight that are worked on at a time


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight: this rank's columns of those it holds; ``alive`` is None where all are."""

    scores: Tensor  # (held, columns)
    alive: Tensor | None
    held: Tensor  # which of the ``num`` rows are here
    columns: Tensor  # which inputs of the whole row are here
    num: int
    part: Shard

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over ranks of what this one says, if it speaks for its part."""
        return self.part.ranks.total(numbers if self.part.is_owner else torch.zeros_like(numbers))


def spanning(sources: Sequence[Lazy]) -> list[bool]:
    """Whether the rows of each weight reach over several ranks; the same on all of them."""
    inputs = [source.part.along(_dims(source)[1]) for source in sources if source.part]
    flags = torch.tensor([int(part.global_shape != part.shape) for part in inputs])
    return ranks_of_all(sources).total(flags).bool().tolist()


def cut_rows(source: Lazy, live: Packed, num_drop: int) -> Tensor:
    """Packed mask of this rank's part without the ``num_drop`` smallest of each row; the dead are the first."""
    return _by_rows(source, live, lambda rows: _smallest(rows, num_drop))


def cut_groups(source: Lazy, live: Packed, group: int, drop: Callable[[Lazy, Tensor], Tensor]) -> Tensor:
    """Packed mask without what ``drop`` says of rows of whole groups; groups that shards cut are put together first."""
    inputs = torch.arange(source.num_inputs, device=source.device)
    assert source.part is not None
    columns = source.part.along(_dims(source)[1]).positions(inputs[: _num_columns(source)])
    held = torch.bincount(columns // group, minlength=source.num_inputs // group)
    torn = source.part.ranks.total(((held > 0) & (held < group)).long()) > 0

    def decide(rows: Rows) -> Tensor:
        dropped = torch.empty_like(rows.scores, dtype=torch.bool)
        scores = rows.scores if rows.alive is None else rows.scores.masked_fill(~rows.alive, -torch.inf)
        is_torn = torn[columns // group]
        dropped[:, ~is_torn] = drop(source, scores[:, ~is_torn])
        places = torn.cumsum(0)[columns[is_torn] // group].sub_(1) * group + columns[is_torn] % group
        whole = scores.new_zeros(rows.num, int(torn.sum()) * group)
        whole[rows.held.unsqueeze(1), places] = scores[:, is_torn]
        dropped[:, is_torn] = drop(source, rows.total(whole))[rows.held.unsqueeze(1), places]
        return dropped

    return _by_rows(source, live, decide)


def _dims(source: Lazy) -> tuple[list[int], list[int]]:
    """Dimensions of the weight that count outputs, and those that count inputs."""
    if source.outputs is None:
        source.rows_of(source.weight)  # which says why there are no rows
    outputs = list(source.outputs or ())
    return outputs, [dim for dim in range(len(source.whole_shape)) if dim not in outputs]


def _num_columns(source: Lazy) -> int:
    assert source.part is not None
    return torch.Size(source.part.along(_dims(source)[1]).shape).numel()


def _by_rows(source: Lazy, live: Packed, decide: Callable[[Rows], Tensor]) -> Tensor:
    keep = torch.empty(source.shape, dtype=torch.bool, device=source.device)
    for here, rows in _chunks(source, live):
        stays = ~decide(rows)
        target = source.rows_of(keep)[here]
        target.copy_((stays if rows.alive is None else stays & rows.alive).view(target.shape))
    return bits.pack(keep)


def _chunks(source: Lazy, live: Packed) -> Iterator[tuple[slice, Rows]]:
    """This rank's share of successive rows, which are the same rows on all ranks at a time; checked to be finite."""
    part = source.part
    assert part is not None
    outputs, inputs = (part.along(dims) for dims in _dims(source))
    num_rows, step = torch.Size(outputs.global_shape).numel(), max(1, ROOM // source.num_inputs)
    mine = outputs.positions(torch.arange(torch.Size(outputs.shape).numel(), device=source.device))
    columns = inputs.positions(torch.arange(_num_columns(source), device=source.device))
    starts = [*range(0, num_rows, step), num_rows]
    borders = torch.searchsorted(mine, torch.tensor(starts, device=source.device)).tolist()
    here = [slice(first, last) for first, last in pairwise(borders)]
    alive = bits.unpack(live[source.name], source.shape) if source.name in live else None
    scores = source.rows(here)

    def read(at: slice) -> tuple[Tensor, Tensor | None]:
        found = next(scores)[1]
        kept = None if alive is None else source.rows_of(alive)[at].flatten(1)
        check_finite(source.name, found, None if kept is None else bits.pack(kept))
        return found, kept

    for at, first, last in zip(here, starts[:-1], starts[1:], strict=True):
        found = together(part.ranks, lambda at=at: read(at))
        yield at, Rows(*found, mine[at] - first, columns, last - first, part)


def _smallest(rows: Rows, num_drop: int) -> Tensor:
    """Where the ``num_drop`` smallest of each row stand, the first of equal ones first."""
    if num_drop == 0:
        return torch.zeros_like(rows.scores, dtype=torch.bool)
    scores = rows.scores if rows.alive is None else rows.scores.masked_fill(~rows.alive, -torch.inf)
    keys, everything = sortable(scores), torch.ones_like(scores, dtype=torch.bool)
    wanted = torch.full((rows.num, 1), num_drop, device=keys.device)
    width = 8 * scores.element_size()
    threshold, left, num_equal = _descend(rows, keys, everything, wanted, width)
    below, equal = keys < threshold[rows.held], keys == threshold[rows.held]
    if bool((num_equal > left).any()):
        columns = rows.columns.expand(keys.shape)
        width = DIGIT * -(-(rows.part.global_numel.bit_length() + 1) // DIGIT)
        last, _, _ = _descend(rows, columns, equal, left, width)
        equal &= columns <= last[rows.held]
    return below | equal


def _descend(rows: Rows, keys: Tensor, valid: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the key of rank ``wanted`` among its valid keys, its rank among equal ones, and their number."""
    prefix, num_equal = torch.zeros_like(wanted), wanted
    for shift in range(width - DIGIT, -1, -DIGIT):
        digits = (keys >> shift) & (1 << DIGIT) - 1
        match = valid
        if shift == width - DIGIT:
            digits = digits ^ 1 << DIGIT - 1  # the sign's place
        else:
            match = valid & (keys >> shift + DIGIT == prefix[rows.held])
        slots = (rows.held.unsqueeze(1) << DIGIT) + digits
        here = torch.bincount(slots[match], minlength=rows.num << DIGIT).view(-1, 1 << DIGIT).int()
        counts = rows.total(here).long()
        up_to = counts.cumsum(1)
        at = (up_to < wanted).sum(1, keepdim=True)
        num_equal = counts.gather(1, at)
        wanted = wanted - up_to.gather(1, at) + num_equal
        prefix = at - (1 << DIGIT - 1) if shift == width - DIGIT else prefix << DIGIT | at
    return prefix, wanted, num_equal
