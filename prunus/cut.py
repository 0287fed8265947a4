"""The exact cut: which of all scores of many weights are the k smallest.

The smallest are dropped; among equal scores the first in the order of the weights, then of the
positions, is dropped first. What is not live is dropped already: it is counted, never ranked.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .across import cut_across, ranks_of_all
from .ops import bits
from .ops.digits import DIGIT, digit_counts, from_sortable, sortable
from .ops.order import ascending
from .ops.sample import Packed, draw, full_range, is_small, live_pieces, order_statistics
from .ops.source import Lazy
from .ops.sweep import Inside, sweep_all


def cut(sources: Sequence[Lazy], num_drop: int, live: Packed, num_live: int | None = None) -> dict[str, Tensor]:
    """Packed masks that drop the ``num_drop`` smallest scores of all weights together.

    One read of the scores: a sample brackets the threshold, and only what falls into the bracket
    is sorted. Where the bracket misses or ties overfill it, a radix descent counts its way to the
    same cut. ``num_live`` spares the counting of ``live`` to who knows it.
    """
    if num_live is None:
        num_live = sum(num_kept_each(sources, live).values())
    num_drop -= sum(source.whole_numel for source in sources) - num_live
    if num_drop <= 0:
        return {source.name: kept(source, live) for source in sources}
    if num_drop >= num_live:
        return {source.name: torch.zeros_like(kept(source, live)) for source in sources}

    if sources[0].part:
        return cut_across(sources, num_drop, live, num_live)
    if sources[0].device.type == "cuda":
        from .ops._triton.driver import launch_cut, lowered

        if low := lowered(sources):
            return launch_cut(low, num_drop, num_live, live).wait()
    lo, hi, limit = bracket(sources, num_drop, num_live, live)
    inside = sweep_all(sources, lo, hi, limit, live)
    if inside is not None:
        num_below = num_live - len(inside.scores) - sum(inside.num_above)
        if num_below <= num_drop <= num_below + len(inside.scores):
            _settle(inside, num_drop - num_below)
            return inside.masks(sources)
    return _write(sources, *descend(sources, num_drop, live), live)


def cut_each(
    sources: Sequence[Lazy], num_drop: Mapping[str, int], live: Packed, num_live: Mapping[str, int]
) -> dict[str, Tensor]:
    """Packed masks that drop the ``num_drop`` smallest scores of each weight; on a GPU the host waits once for all."""
    masks: dict[str, Tensor] = {}
    if sources[0].device.type == "cuda" and not sources[0].part:
        from .ops._triton.driver import launch_each, lowered, wait_all

        drops = {s.name: num_drop[s.name] - s.numel + num_live[s.name] for s in sources}
        cuts = [s for s in sources if 0 < drops[s.name] < num_live[s.name]]
        if cuts and (low := lowered(cuts)):
            pending = launch_each(low, [drops[s.name] for s in cuts], [num_live[s.name] for s in cuts], live)
            masks = {name: mask for found in wait_all(pending) for name, mask in found.items()}
    for source in sources:
        if source.name not in masks:
            masks |= cut([source], num_drop[source.name], live, num_live[source.name])
    return masks


def kept(source: Lazy, live: Packed) -> Tensor:
    """Packed mask of the live elements of one weight, a copy."""
    return live[source.name].clone() if source.name in live else bits.full(source.numel, source.device)


def num_kept_each(sources: Sequence[Lazy], live: Packed) -> dict[str, int]:
    """Live elements of each weight, over all ranks, brought to the host at once."""
    everything = {source.name: source.whole_numel for source in sources}
    masked = [source for source in sources if source.name in live]
    if not masked:
        return everything
    counts = torch.stack([bits.count(live[source.name]) for source in masked])
    if masked[0].part:
        speaks = torch.tensor([source.part is not None and source.part.is_owner for source in masked])
        counts = ranks_of_all(masked).total(counts.cpu() * speaks)
    return everything | dict(zip([source.name for source in masked], counts.tolist(), strict=True))


def bracket(sources: Sequence[Lazy], num_drop: int, num_live: int, live: Packed) -> tuple[float, float, int]:
    """Scores ``lo <= hi`` that very likely enclose the cut, and how many may lie between them.

    Order statistics of a jittered sample, ``SIGMAS`` standard errors around the cut's rank.
    """
    lowest, highest = full_range(sources[0].compared)
    if is_small(num_live):
        return lowest, highest, num_live
    sample = ascending(draw(sources, sum(source.numel for source in sources), num_live, live))
    first, last, limit = order_statistics(num_drop / num_live, len(sample), num_live)
    lo = sample[first].item() if first >= 0 else lowest
    hi = sample[last].item() if last < len(sample) else highest
    return lo, hi, limit


def descend(sources: Sequence[Lazy], num_drop: int, live: Packed) -> tuple[float, int]:
    """The ``num_drop``-th smallest live score, and how many scores equal to it are dropped.

    A radix descent: each pass fixes 16 bits of the score from counts, so nothing is sorted or kept.
    """
    prefix: int | None = None
    dtype = sources[0].compared
    for shift in range(8 * dtype.itemsize - DIGIT, -1, -DIGIT):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64, device=sources[0].device)
        for source in sources:
            for _, scores, alive in live_pieces(source, live):
                keys = sortable(scores if alive is None else scores[alive])
                counts += digit_counts(keys, prefix, shift).to(counts.device)
        up_to = counts.cumsum(0)
        digit = int(torch.searchsorted(up_to, num_drop))
        num_drop -= int(up_to[digit - 1]) if digit else 0
        prefix = digit - (1 << DIGIT - 1) if prefix is None else prefix << DIGIT | digit
    assert prefix is not None
    return from_sortable(prefix, dtype), num_drop


def _settle(inside: Inside, num_drop: int) -> None:
    """Set the bits of all elements inside the bracket but the ``num_drop`` smallest."""
    scores = inside.scores
    keep = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    if num_drop:
        threshold = ascending(scores)[num_drop - 1]
        below, equal = scores < threshold, scores == threshold
        keep = ~below & ~(equal & (equal.cumsum(0, dtype=torch.int32) <= num_drop - below.sum()))
    bits.add_(inside.above, inside.positions[keep])


def _write(sources: Sequence[Lazy], threshold: float, num_equal: int, live: Packed) -> dict[str, Tensor]:
    """Packed masks without what is below ``threshold`` and the first ``num_equal`` equal to it."""
    masks = {}
    for source in sources:
        masks[source.name] = mask = kept(source, live)
        for start, scores, alive in live_pieces(source, live):
            equal = scores == threshold
            if alive is not None:
                equal &= alive
            seen = equal.cumsum(0)
            dropped = (scores < threshold) | (equal & (seen <= num_equal))
            num_equal -= min(num_equal, int(seen[-1]))
            mask[start // 8 : start // 8 + bits.num_bytes(len(scores))] &= bits.pack(~dropped)
    return masks
