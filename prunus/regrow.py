"""Regrowth: an event prunes some weights more than the schedule says, and as many pruned ones come back.

Until the ramp ends, gradients of pruned weights reach the optimizer, so that their moments go on, and
the weights are zeroed after each step. A weight that comes back is 0 until its first step, so that right after an
event there are more zeros than the masks prune.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from .allocate import allocate
from .cut import Packed, cut_each, kept, num_kept_each
from .eligible import Weight
from .ops import bits
from .ops.shard import Shard
from .ops.source import Lazy
from .ranks import local
from .schedule import Ramp, Schedule
from .score import REGROWTH
from .select import Global, NofM, PerLayer, PerRow, Selector
from .statistics import sources

By = Literal["snr", "momentum", "gradient"]


@dataclass(frozen=True)
class Regrow:
    """How many weights come back at an event, and which: those with the largest ``by`` among the pruned.

    ``"snr"`` is ``|m| / (sqrt(v) + eps)``, ``"momentum"`` ``|m|`` (SGD's buffer too), ``"gradient"`` ``|g|`` at the
    event's step. Until the ramp ends, gradient clipping sees the gradients of pruned weights as well.
    """

    fraction: float = 0.1  # of the live weights, at the ramp's begin
    by: By = "snr"

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"the fraction that comes back must lie in (0, 1), got {self.fraction}")
        if self.by not in get_args(By):
            raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {self.by!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        return REGROWTH[self.by].reads

    def share(self, schedule: Schedule | None, step: int) -> float:
        """``fraction (1 + cos(pi p)) / 2``, p the progress of the ramp: exactly 0 from its end on."""
        if not isinstance(schedule, Ramp):
            return 0.0
        progress = (step - schedule.begin) / (schedule.end - schedule.begin)
        return self.fraction * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def check(self, schedule: Schedule | None, select: Selector, is_sharded: bool = False) -> None:
        """Refuse a schedule, a selector or shards that regrowth does not work with."""
        if not isinstance(schedule, Ramp) or not schedule.final:
            raise ValueError(
                f"regrowth ends with its ramp: pass schedule=Ramp(...) to a sparsity above 0, not {schedule}"
            )
        if isinstance(select, NofM):
            raise ValueError(f"regrowth goes with Global, PerLayer and PerRow, not with {select}")
        if isinstance(select, PerRow) and is_sharded:
            raise ValueError("regrowth by rows needs whole weights; over shards it goes with Global and PerLayer")

    def check_moments(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that does not keep what pruned weights are ranked by."""
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return  # nothing has been stepped yet
        kept = {key for state in optimizer.state.values() for key, value in state.items() if value is not None}
        needed = set(self.reads) - {"grad"}
        if needed <= kept or (self.by == "momentum" and "momentum_buffer" in kept):
            return
        raise ValueError(
            f"regrowth by {self.by} reads {' and '.join(sorted(needed))}, but {type(optimizer).__name__} keeps "
            f"{', '.join(sorted(kept - {'mask', 'step'})) or 'nothing'}; "
            "use AdamW, Adam, NAdam or AdamWPrune, or by='gradient'"
        )

    def swap(self, schedule: Schedule | None, step: int, back: Callable[[], list[Lazy]]) -> "Swap | None":
        """The swap of this step's event; ``back`` returns the scores of pruned weights. None if none comes back."""
        share = self.share(schedule, step)
        return Swap(share, back) if share else None

    def sources(
        self, weights: Sequence[Weight], optimizer: Optimizer, shards: Mapping[str, Shard] | None = None
    ) -> list[Lazy]:
        """Lazy scores by which pruned weights are ranked; ``shards`` are this rank's."""
        row = REGROWTH[self.by]
        buffers = {w.name: optimizer.state.get(w.parameter, {}).get("momentum_buffer") for w in weights}
        if self.by != "momentum" or all(buffer is None for buffer in buffers.values()):
            return sources(weights, optimizer, row, {}, more={}, shards=shards)
        if missing := [name for name, buffer in buffers.items() if buffer is None]:
            raise ValueError(f"{missing[0]} has no momentum yet, since no gradient has reached it; exclude it, or wait")
        return [
            Lazy(
                w.name,
                local(w.parameter),
                row.of,
                {"exp_avg": local(buffer)},
                formula=row.formula,
                outputs=w.outputs,
                part=shards[w.name] if shards else None,
            )
            for w in weights
            if (buffer := buffers[w.name]) is not None
        ]


@dataclass(frozen=True)
class Swap:
    """Which share of the live weights changes places with pruned ones, and what ranks those."""

    share: float
    back: Callable[[], list[Lazy]]

    def num(self, num_kept: int, num_pruned: int) -> int:
        """Weights that change places in a group that keeps ``num_kept`` and had ``num_pruned``."""
        return min(round(self.share * num_kept), num_pruned)


Live = tuple[Packed, int]  # packed bits, and how many are set in all
Found = tuple[dict[str, Tensor], dict[str, Tensor], int]  # what stays, what comes back, and how many those are


def selected(
    select: Selector, scores: Sequence[Lazy], sparsity: float, live: Live, swap: Swap | None
) -> tuple[dict[str, Tensor], int]:
    """Packed masks of exactly the selector's counts, and how many weights came back.

    Every group of the selector (all weights, a layer, a row) loses r live weights more than is asked and gets
    back r of those that were pruned before: nothing that is pruned now comes back now.
    """
    if swap is None:
        return select.packed(scores, sparsity, *live), 0
    dead = {source.name: kept(source, {}) ^ kept(source, live[0]) for source in scores}
    if isinstance(select, PerLayer):
        keep, back, num = _by_layer(select, scores, sparsity, (live[0], dead), swap)
    elif isinstance(select, PerRow):
        keep, back, num = _by_row(scores, sparsity, (live[0], dead), swap)
    else:
        keep, back, num = _globally(scores, sparsity, live, dead, swap)
    return {name: mask | back[name] if name in back else mask for name, mask in keep.items()}, num


def _globally(scores: Sequence[Lazy], sparsity: float, live: Live, dead: Packed, swap: Swap) -> Found:
    total = sum(source.whole_numel for source in scores)
    num_pruned = total - live[1]
    num_drop = max(round(sparsity * total), num_pruned)
    num = swap.num(total - num_drop, num_pruned)
    keep = Global().packed(scores, (num_drop + num) / total, *live)
    back = Global().packed(swap.back(), (total - num) / total, dead, num_pruned) if num else {}
    return keep, back, num


def _by_layer(
    select: PerLayer, scores: Sequence[Lazy], sparsity: float, sides: tuple[Packed, Packed], swap: Swap
) -> Found:
    sizes, num_live = {source.name: source.whole_numel for source in scores}, num_kept_each(scores, sides[0])
    num_pruned = {name: size - num_live[name] for name, size in sizes.items()}
    asked = allocate({s.name: s.whole_shape for s in scores}, sparsity, select.allocate, at_least=num_pruned)
    num_drop = {name: max(asked[name], num_pruned[name]) for name in asked}
    num = {name: swap.num(sizes[name] - num_drop[name], num_pruned[name]) for name in sizes}
    keep = cut_each(scores, {name: num_drop[name] + num[name] for name in sizes}, sides[0], num_live)
    if not any(num.values()):
        return keep, {}, 0
    back = cut_each(swap.back(), {name: sizes[name] - num[name] for name in sizes}, sides[1], num_pruned)
    return keep, back, sum(num.values())


def _by_row(scores: Sequence[Lazy], sparsity: float, sides: tuple[Packed, Packed], swap: Swap) -> Found:
    """A weight with a row that is sparser than asked, as masks given at the start may be, swaps none."""
    keep: dict[str, Tensor] = {}
    back: dict[str, Tensor] = {}
    total, ranked = 0, {}
    for source in scores:
        length, num_drop = source.num_inputs, round(sparsity * source.num_inputs)
        rows = source.rows_of(bits.unpack(sides[1][source.name], source.shape)).flatten(1).sum(1)
        least, most = (int(number) for number in rows.aminmax())
        num = swap.num(length - num_drop, least) if most <= num_drop else 0
        keep |= PerRow().packed([source], (num_drop + num) / length, sides[0])
        if num:
            ranked = ranked or {other.name: other for other in swap.back()}
            back |= PerRow().packed([ranked[source.name]], (length - num) / length, sides[1])
        total += num * len(rows)
    return keep, back, total
