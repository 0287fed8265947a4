"""Regrowth: an event prunes some weights more than the schedule says, and as many pruned ones come back.

Until the ramp ends, gradients of pruned weights reach the optimizer, so that their moments go on, and
the weights are zeroed after each step. A weight that comes back is 0 until its first step, so that right after an
event there are more zeros than the masks prune.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from .eligible import Weight
from .ops.candidates import Packed
from .ops.lazy import Lazy
from .ops.shard import Shard
from .schedule import Ramp, Schedule
from .score import REGROWTH
from .select import Selector
from .statistics import sources
from .threshold import kept

By = Literal["snr", "momentum", "gradient"]


@dataclass(frozen=True)
class Regrow:
    """How many pruned weights come back at an event, and which: those with the largest ``by``.

    ``"snr"`` is ``|m| / (sqrt(v) + eps)``, ``"momentum"`` is ``|m|`` (or SGD's buffer) and ``"gradient"`` is ``|g|`` at
    that step. Until the ramp ends, gradient clipping also sees the gradients of pruned weights.
    """

    fraction: float = 0.1  # of the live weights, when the ramp begins
    by: By = "snr"

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction, the share that comes back, must lie in (0, 1), got {self.fraction}")
        if self.by not in get_args(By):
            raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {self.by!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        return REGROWTH[self.by].reads

    def share(self, schedule: Schedule | None, step: int) -> float:
        """``fraction (1 + cos(pi p)) / 2`` with p the progress of the ramp; exactly 0 once it has ended."""
        if not isinstance(schedule, Ramp):
            return 0.0
        progress = (step - schedule.begin) / (schedule.end - schedule.begin)
        return self.fraction * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def check(self, schedule: Schedule | None, select: Selector, is_sharded: bool = False) -> None:
        """Refuse a schedule, a selector or shards that regrowth does not support."""
        if not isinstance(schedule, Ramp) or not schedule.final:
            raise ValueError(f"regrow needs schedule=Ramp(...) to a sparsity above 0, got {schedule}")
        if select.group == "neighbours":
            raise ValueError(f"regrow works with Global, PerLayer and PerRow, not with {select}")
        if select.group == "row" and is_sharded:
            raise ValueError("regrow by rows needs whole weights; with shards, use Global or PerLayer")

    def check_moments(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that does not keep the state that ``by`` reads."""
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return  # nothing has been stepped yet
        keys = {key for state in optimizer.state.values() for key, value in state.items() if value is not None}
        needed = set(self.reads) - {"grad"}
        if not needed <= keys and not (self.by == "momentum" and "momentum_buffer" in keys):
            kept = ", ".join(sorted(keys - {"mask", "step"})) or "nothing"
            problem = f"{' and '.join(sorted(needed))}, but {type(optimizer).__name__} keeps {kept}"
            advice = "use AdamW, Adam, NAdam or AdamWPrune, or by='gradient'"
            raise ValueError(f"regrow by {self.by} reads {problem}; {advice}")

    def sources(
        self, weights: Sequence[Weight], optimizer: Optimizer, shards: Mapping[str, Shard] | None = None
    ) -> list[Lazy]:
        """Lazy scores that rank the pruned weights; ``shards`` are this rank's."""
        buffers: dict[str, Any] = {w.name: optimizer.state.get(w.parameter, {}).get("momentum_buffer") for w in weights}
        more: dict[str, dict[str, Tensor]] = {}
        if self.by == "momentum" and any(buffer is not None for buffer in buffers.values()):
            if missing := [name for name, buffer in buffers.items() if buffer is None]:
                raise ValueError(f"{missing[0]} has no momentum yet, as no gradient reached it; exclude it, or wait")
            more = {"exp_avg": buffers}
        return sources(weights, optimizer, REGROWTH[self.by], {}, more=more, shards=shards)


def regrown_masks(
    select: Selector,
    scores: Sequence[Lazy],
    sparsity: float,
    live: tuple[Packed, int],
    share: float,
    back: Callable[[], list[Lazy]],
) -> tuple[dict[str, Tensor], int]:
    """Packed masks of exactly the selector's counts, and how many weights came back.

    ``live`` are packed bits, and how many are set in all. Every group of the selector loses a ``share`` of its live
    weights more than its quota, and gets back as many of those that were pruned before, which ``back`` ranks. A weight
    with a row that is sparser than its quota swaps none.
    """
    num_live = select.count_live(scores, *live)
    quotas, nums = select.quota_of(scores, sparsity, num_live), []
    for i, (least, most) in enumerate(select.num_pruned(scores, quotas, live[0], num_live)):
        if select.group != "row":
            quotas[i] = replace(quotas[i], num_drop=max(quotas[i].num_drop, most))
        size, num_drop = quotas[i].size, quotas[i].num_drop
        nums.append(min(round(share * (size - num_drop)), least) if most <= num_drop else 0)
    more = [replace(quota, num_drop=quota.num_drop + num) for quota, num in zip(quotas, nums, strict=True)]
    masks = select.cut(scores, more, live[0], num_live)
    if any(nums):
        dead = {source.name: kept(source, {}) ^ kept(source, live[0]) for source in scores}
        taken = [replace(q, num_drop=q.size - num) for q, num in zip(quotas, nums, strict=True) if num]
        names = {name for quota in taken for name in quota.names}
        ranked = [source for source in back() if source.name in names]
        num_dead = select.count_live(ranked, dead, quotas[0].size - live[1])
        returned = select.cut(ranked, taken, dead, num_dead)
        masks = {name: mask | returned[name] if name in returned else mask for name, mask in masks.items()}
    return masks, sum(num * quota.num for num, quota in zip(nums, quotas, strict=True))
