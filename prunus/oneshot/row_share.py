"""The rows of a least-squares problem, divided among ranks: whose rows are whose, and the largest scores of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..grids import OnGrid
from ..ranks import Ranks
from .step import Change, Choose, largest, num_true

SAMPLE = 4096  # scores of a layer, over all ranks, that bracket its threshold
SIGMAS = 4  # half the width of the bracket
SMALL = 1 << 15  # scores of a layer that all travel


class RowShare:
    """Which rows of some layers (out, in), one under another, each rank has: a run of them, in the order of ranks."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: Ranks | None) -> None:
        self.ranks, self.rank = ranks, 0 if ranks is None else ranks.rank
        size, num, first = 1 if ranks is None else ranks.size, sum(map(len, weights.values())), 0
        edges = [num * rank // size for rank in range(size + 1)]
        self.rows: dict[str, list[slice]] = {}  # of each rank
        for name, weight in weights.items():
            cuts = [min(max(edge - first, 0), len(weight)) for edge in edges]
            self.rows[name] = [slice(*pair) for pair in pairwise(cuts)]
            first += len(weight)

    def own(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of this rank; there may be none of a layer."""
        return {name: matrices[name][rows[self.rank]] for name, rows in self.rows.items() if name in matrices}

    def whole(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.ranks is not None
        whole = {}
        for name, own in matrices.items():
            sizes = [here.stop - here.start for here in self.rows[name]]
            padded = own.new_zeros(max(sizes), *own.shape[1:])
            padded[: len(own)] = own
            whole[name] = torch.cat([part[:num] for part, num in zip(self.ranks.stacked(padded), sizes, strict=True)])
        return whole

    def whole_changes(self, changes: Mapping[str, Change]) -> dict[str, Change]:
        """Changes of the rows of all ranks from those of this one's, which all have weights."""
        if self.ranks is None:
            return dict(changes)
        weights = self.whole({name: change.weight for name, change in changes.items() if change.weight is not None})
        masks = self.whole({name: change.mask for name, change in changes.items()})
        grids = {name: change.on_grid for name, change in changes.items() if change.on_grid is not None}
        scales = self.whole({name: on_grid.scales for name, on_grid in grids.items()})
        grids = {name: OnGrid(on_grid.grid, scales[name]) for name, on_grid in grids.items()}
        return {
            name: replace(change, weight=weights[name], mask=masks[name], on_grid=grids.get(name))
            for name, change in changes.items()
        }


class LargestOfAll:
    """``keep_all_but`` over all ranks: a sample brackets each threshold, and what lies within it alone travels."""

    def __init__(self, num_drop: Mapping[str, int], sizes: Mapping[str, int], ranks: Ranks) -> None:
        self.num_keep, self.ranks = {name: size - num_drop[name] for name, size in sizes.items()}, ranks
        self._sizes: dict[str, list[int]] = {}  # of each rank's rows, by layer
        self._places: dict[str, Tensor] = {}  # of the sample

    def __call__(self, scores: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # what is dead takes part as the smallest score of all, since to pick out what is live takes longer
        flat = {
            name: (torch.where(live[name], score, -math.inf) if name in live else score).reshape(-1)
            for name, score in scores.items()
        }
        if not self._sizes:
            self._begin(flat, live)
        keep = {name: torch.full_like(one, self.num_keep[name] > 0, dtype=torch.bool) for name, one in flat.items()}
        cuts = {name: one for name, one in flat.items() if 0 < self.num_keep[name] < sum(self._sizes[name])}
        for name in [name for name in cuts if max(self._sizes[name]) == sum(self._sizes[name])]:
            keep[name] = largest(cuts.pop(name), self.num_keep[name], None)  # of one rank: nothing travels
        if large := {name: one for name, one in cuts.items() if sum(self._sizes[name]) > SMALL}:
            kept = self._bracketed(large)
            keep |= kept
            cuts = {name: one for name, one in cuts.items() if name not in kept}
        for name, parts in self._vectors(cuts, self._sizes).items():
            keep[name] = self._own(largest(torch.cat(parts), self.num_keep[name], None), self._sizes[name])
        return {name: keep[name].view_as(score) for name, score in scores.items()}

    def _begin(self, flat: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        num_live = {name: num_true(live[name]) if name in live else len(one) for name, one in flat.items()}
        self._sizes, live_of_all = self._numbers([{name: len(one) for name, one in flat.items()}, num_live])
        self.num_keep = {name: min(num, sum(live_of_all[name])) for name, num in self.num_keep.items()}
        generator = torch.Generator().manual_seed(self.ranks.rank)
        for name, one in flat.items():
            num = self._num_sampled(name)[self.ranks.rank]
            self._places[name] = torch.randint(max(1, len(one)), (num,), generator=generator).to(one.device)

    def _num_sampled(self, name: str) -> list[int]:
        numbers = self._sizes[name]
        return [-(-SAMPLE * number // max(1, sum(numbers))) for number in numbers]

    def _brackets(self, flat: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """Scores that very likely enclose the threshold of each layer."""
        own = {name: one[self._places[name]] for name, one in flat.items()}
        brackets = {}
        for name, parts in self._vectors(own, {name: self._num_sampled(name) for name in flat}).items():
            sample, share = torch.cat(parts).sort().values, 1 - self.num_keep[name] / sum(self._sizes[name])
            num, least = len(sample), torch.finfo(sample.dtype).min  # of what is live
            half = SIGMAS * (num * share * (1 - share)) ** 0.5 + 2
            first, last = int(share * num - half), int(share * num + half) + 1
            edges = sample[[max(first, 0), min(last, num - 1)]].tolist()
            brackets[name] = max(edges[0], least) if first >= 0 else least, edges[1] if last < num else math.inf
        return brackets

    def _bracketed(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is kept of each layer, except those whose bracket misses the threshold."""
        brackets = self._brackets(flat)
        above = {name: one > brackets[name][1] for name, one in flat.items()}
        inside = {
            name: (one >= brackets[name][0]).logical_xor_(above[name]).nonzero().squeeze(1)
            for name, one in flat.items()
        }
        num_above, num_inside = self._numbers(
            [{name: num_true(one) for name, one in above.items()}, {name: len(one) for name, one in inside.items()}]
        )
        rest = {name: self.num_keep[name] - sum(numbers) for name, numbers in num_above.items()}
        found = {name: flat[name][inside[name]] for name in flat if 0 <= rest[name] <= sum(num_inside[name])}
        for name, parts in self._vectors(found, num_inside).items():
            above[name][inside[name]] = self._own(largest(torch.cat(parts), rest[name], None), num_inside[name])
        return {name: above[name] for name in found}

    def _own(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        return whole.split(list(sizes))[self.ranks.rank]

    def _numbers(self, own: Sequence[Mapping[str, int]]) -> list[dict[str, list[int]]]:
        """Numbers of every rank, by layer."""
        every = self.ranks.stacked(torch.tensor([[*numbers.values()] for numbers in own])).permute(1, 2, 0).tolist()
        return [dict(zip(names, numbers, strict=True)) for names, numbers in zip(own, every, strict=True)]

    def _vectors(self, own: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]]) -> dict[str, list[Tensor]]:
        """A vector of every rank, by layer; ``sizes`` are known of all ranks."""
        if not own:
            return {}
        widths = [max(sizes[name]) for name in own]
        sent = next(iter(own.values())).new_zeros(sum(widths))
        for part, vector in zip(sent.split(widths), own.values(), strict=True):
            part[: len(vector)] = vector
        every = zip(own, self.ranks.stacked(sent).split(widths, 1), strict=True)
        return {name: [row[:size] for row, size in zip(rows, sizes[name], strict=True)] for name, rows in every}


def choose_for(
    choose: Choose, num_drop: Mapping[str, int], weights: Mapping[str, Tensor], ranks: Ranks | None
) -> Choose:
    """The same choice where ``choose`` gets the rows of one rank only."""
    if ranks is None:
        return choose
    if all(name in num_drop for name in weights):
        return LargestOfAll(num_drop, {name: weight.numel() for name, weight in weights.items()}, ranks)

    def of_rows(scores: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: score for name, score in scores.items() if len(score)}
        empty = {name: score.bool() for name, score in scores.items() if not len(score)}
        return empty | (choose(own, {name: live[name] for name in own if name in live}) if own else {})

    return of_rows
