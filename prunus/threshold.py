"""The exact cut: which of all scores of many weights are the k smallest, whether one process holds them or many ranks.

Among equal scores the first in the order of the weights, then of the positions in the weight, is dropped first, whoever
holds it. What is not live is dropped already: it is counted, never ranked. Each rank reads its own scores once: a
sample brackets the threshold, and only what falls into the bracket is ranked. Nothing but counts leaves a rank. One
process is the case in which there is nothing to add; on a GPU it leaves all of the cut to kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .ops import bits
from .ops.candidates import Candidates, Packed, candidates, is_small, live_chunks, order_statistics, sampled
from .ops.lazy import Lazy, Sources, from_sortable, sortable
from .ops.shard import Shard, Sums, attempt, together

DIGIT = 16  # bits fixed by one pass; 2^16 counts fit the cache, and float32 needs two passes
HALF = DIGIT // 2  # a digit travels in two halves: 2^8 counts, then the 2^8 of the one that holds the cut
POSITION = 48  # bits of a position in a weight
# how often each digit stands at a shift behind a prefix, on this rank
DigitCounts = Callable[[int | None, int], Tensor]


class Alone:
    """Sums of one process: there is nothing to add."""

    def total(self, counts: Tensor, failed: Exception | None = None) -> Tensor:
        if failed is not None:
            raise failed
        return counts


def sums_of(sources: Sources) -> Sums:
    """Sums over the ranks that hold the weights together."""
    return sources[0].shard.ranks if sources[0].shard else Alone()


def counts(source: Lazy) -> bool:
    """Whether this rank counts its part of the weight: of ranks that hold copies one does."""
    return source.shard is None or source.shard.is_owner


def cut(sources: Sources, num_drop: int, live: Packed, num_live: int | None = None) -> dict[str, Tensor]:
    """Packed masks without the ``num_drop`` smallest scores of all weights; ``num_live``, over all ranks, if known."""
    total = sum(source.global_numel for source in sources)
    if num_live is None:
        num_live = sum(num_kept_each(sources, live).values()) if live else total
    num_drop -= total - num_live
    if num_drop <= 0:
        return {source.name: kept(source, live) for source in sources}
    if num_drop >= num_live:
        return {source.name: torch.zeros_like(kept(source, live)) for source in sources}
    return _by_kernels(sources, [num_drop], [num_live], live) or _by_counts(sources, num_drop, num_live, live)


def cut_each(
    sources: Sources, num_drop: Mapping[str, int], live: Packed, num_live: Mapping[str, int]
) -> dict[str, Tensor]:
    """Packed masks that drop the ``num_drop`` smallest scores of each weight; on a GPU one launch serves all."""
    drops = {s.name: num_drop[s.name] - s.global_numel + num_live[s.name] for s in sources}
    cuts = [s for s in sources if 0 < drops[s.name] < num_live[s.name]]
    numbers = [drops[s.name] for s in cuts], [num_live[s.name] for s in cuts]
    masks = _by_kernels(cuts, *numbers, live) if cuts else {}
    for source in sources:
        if source.name not in masks:
            masks |= cut([source], num_drop[source.name], live, num_live[source.name])
    return masks


def kept(source: Lazy, live: Packed) -> Tensor:
    """Packed mask of the live elements of one weight, a copy."""
    return live[source.name].clone() if source.name in live else bits.full(source.numel, source.device)


def num_kept_each(sources: Sources, live: Packed) -> dict[str, int]:
    """Live elements of each weight, over all ranks, brought to the host at once."""
    everything = {source.name: source.global_numel for source in sources}
    masked = [source for source in sources if source.name in live]
    if not masked:
        return everything
    numbers = bits.count_each([live[source.name] for source in masked], [source.numel for source in masked])
    numbers = sums_of(masked).total(torch.tensor(numbers) * torch.tensor(list(map(counts, masked))))
    return everything | dict(zip([source.name for source in masked], numbers.tolist(), strict=True))


def _by_kernels(sources: Sources, num_drop: Sequence[int], num_live: Sequence[int], live: Packed) -> dict[str, Tensor]:
    """The masks of one process, of all weights together or of each, if kernels can find them; else none."""
    if sources[0].device.type != "cuda" or sources[0].shard:
        return {}
    from .ops._triton.cut import launch_cut, readable

    low = readable(sources)
    return launch_cut(low, num_drop, num_live, live).wait() if low else {}


def _by_counts(sources: Sources, num_drop: int, num_live: int, live: Packed) -> dict[str, Tensor]:
    """Masks without the ``num_drop`` smallest of all ranks' ``num_live`` live scores."""
    sums, dtype = sums_of(sources), sources[0].compared
    lo, hi, limit = bracket(sources, num_drop, num_live, live)
    inside, failed = attempt(lambda: candidates(sources, lo, hi, limit, live))
    num_above, keys = _counted(sources, inside)
    here = torch.tensor([num_above, len(keys), inside is None])
    num_above, num_inside, num_over = sums.total(here, failed).tolist()
    rest = num_drop - (num_live - num_inside - num_above)
    if num_over or not 0 < rest <= num_inside:
        return _without_bracket(sources, num_drop, live)
    assert inside is not None
    [(key, num_equal)] = descend(partial(digit_counts, keys), 8 * dtype.itemsize, [rest], sums)
    threshold = from_sortable(key, dtype)
    if not lo <= threshold <= hi:  # beyond an edge, where some are not listed
        return _without_bracket(sources, num_drop, live)
    bits.add_(inside.above, inside.positions[inside.scores > threshold])
    at = inside.positions[inside.scores == threshold]
    equal = torch.zeros_like(inside.above)
    bits.add_(equal, at)
    numbers = torch.bincount(inside.owners(at), minlength=len(sources))
    return _with_ties(sources, inside.masks(sources), inside.masks(sources, equal), numbers, num_equal)


def bracket(sources: Sources, num_drop: int, num_live: int, live: Packed) -> tuple[float, float, int]:
    """Scores ``lo <= hi`` that very likely enclose the cut, by a sample, and how many may lie between them."""
    dtype, sums = sources[0].compared, sums_of(sources)
    is_float = dtype.is_floating_point
    lowest, highest = (-math.inf, math.inf) if is_float else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if is_small(num_live):
        return lowest, highest, num_live
    total = sum(source.global_numel for source in sources)
    mine = [source for source in sources if counts(source)]
    keys = sampled(mine, total, num_live, live) if mine else _no_keys(sources)
    num = int(sums.total(torch.tensor([len(keys)])))
    first, last, limit = order_statistics(num_drop / num_live, num, num_live)
    wanted = [rank + 1 for rank in (first, last) if 0 <= rank < num]
    edges = descend(partial(digit_counts, keys), 8 * dtype.itemsize, wanted, sums) if wanted else []
    scores = [from_sortable(key, dtype) for key, _ in edges]
    return scores[0] if 0 <= first < num else lowest, scores[-1] if 0 <= last < num else highest, limit


def _counted(sources: Sources, inside: Candidates | None) -> tuple[int, Tensor]:
    """How many lie above the bracket, and keys of what lies inside, of the parts that this rank counts."""
    if inside is None:
        return 0, _no_keys(sources)
    mine = list(map(counts, sources))
    num_above = sum(num for num, is_mine in zip(inside.num_above, mine, strict=True) if is_mine)
    scores = inside.scores
    if not all(mine):
        scores = scores[torch.tensor(mine, device=scores.device)[inside.owners(inside.positions)]]
    return num_above, sortable(scores)


def _no_keys(sources: Sources) -> Tensor:
    return sortable(torch.empty(0, dtype=sources[0].compared, device=sources[0].device))


def descend(counts_of: DigitCounts, width: int, wanted: Sequence[int], sums: Sums) -> list[tuple[int, int]]:
    """Keys of wanted ranks (from 1) among all ranks' keys, and their ranks among equal ones, by counts of digits."""
    prefixes: list[int | None] = [None] * len(wanted)
    left = torch.tensor(wanted).unsqueeze(1)
    for shift in range(width - DIGIT, -1, -DIGIT):
        needed = set(prefixes)
        known, failed = attempt(lambda needed=needed, s=shift: {each: counts_of(each, s).cpu() for each in needed})
        nothing = torch.zeros(1 << DIGIT, dtype=torch.int64)
        digits = torch.stack([known[prefix] if known else nothing for prefix in prefixes]).unflatten(1, (1 << HALF, -1))
        coarse, left = _pick(sums.total(digits.sum(2), failed), left)
        fine, left = _pick(sums.total(digits[torch.arange(len(digits)), coarse]), left)
        next_digits = ((coarse << HALF) + fine).tolist()
        prefixes = [
            digit - (1 << DIGIT - 1) if prefix is None else prefix << DIGIT | digit
            for prefix, digit in zip(prefixes, next_digits, strict=True)
        ]
    return list(zip([prefix or 0 for prefix in prefixes], left.squeeze(1).tolist(), strict=True))


def digit_counts(keys: Tensor, prefix: int | None, shift: int) -> Tensor:
    """How often each digit is at ``shift`` of keys that begin with ``prefix`` (None: any; the sign is shifted)."""
    if prefix is None:
        digits = (keys >> shift) + (1 << DIGIT - 1)
    else:
        digits = (keys >> shift)[keys >> (shift + DIGIT) == prefix] & ((1 << DIGIT) - 1)
    return torch.bincount(digits, minlength=1 << DIGIT)


def _pick(numbers: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the counts in each row holds the element of rank ``left``, and its rank therein."""
    up_to = numbers.cumsum(1)
    at = torch.searchsorted(up_to, left)
    return at.squeeze(1), left - up_to.gather(1, at) + numbers.gather(1, at)


def _with_ties(
    sources: Sources, above: dict[str, Tensor], equal: dict[str, Tensor], here: Tensor, num_drop: int
) -> dict[str, Tensor]:
    """``above`` and all but the first ``num_drop`` bits of ``equal``, ``here`` of them of each weight on this rank."""
    numbers = sums_of(sources).total(here.cpu() * torch.tensor(list(map(counts, sources)))).tolist()
    for source, number in zip(sources, numbers, strict=True):
        if number and num_drop <= 0:
            above[source.name] |= equal[source.name]
        elif 0 < num_drop < number:
            above[source.name] |= _behind(source, equal[source.name], num_drop)
        num_drop -= number
    return above


def _behind(source: Lazy, equal: Tensor, num_drop: int) -> Tensor:
    """``equal`` without its first ``num_drop`` bits, by position in the weight over all ranks."""

    size = source.chunk_size
    chunks = [(start, equal[start // 8 : (start + size) // 8]) for start in range(0, source.numel, size)]

    def count(prefix: int | None, shift: int) -> Tensor:
        totals = torch.zeros(1 << DIGIT, dtype=torch.int64, device=source.device)
        for start, packed in chunks if counts(source) else ():
            totals += digit_counts(_places(source.shard, start, packed)[1], prefix, shift)
        return totals

    [(last, _)] = descend(count, POSITION, [num_drop], sums_of([source]))
    rest = torch.zeros_like(equal)
    for start, packed in chunks:
        here, whole = _places(source.shard, start, packed)
        bits.add_(rest, here[whole > last])
    return rest


def _places(part: Shard | None, start: int, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of set bits in what this rank holds of a weight, and in the weight over all ranks."""
    byte = packed.nonzero().squeeze(1)
    if 8 * len(byte) < len(packed):  # as nearly always: ties are few
        which, bit = bits.unpack(packed[byte], (len(byte), 8)).nonzero(as_tuple=True)
        here = 8 * byte[which] + bit
    else:
        here = bits.unpack(packed, (8 * len(packed),)).nonzero().squeeze(1)
    here = here + start
    return here, part.positions(here) if part else here


def _without_bracket(sources: Sources, num_drop: int, live: Packed) -> dict[str, Tensor]:
    """The same cut by counting digits of all scores, where the bracket missed or ties overfilled it."""
    threshold, num_equal = order_statistic(sources, num_drop, live)
    split = together(sums_of(sources), lambda: [_split(source, live, threshold) for source in sources])
    above, equal = ({source.name: part[i] for source, part in zip(sources, split, strict=True)} for i in (0, 1))
    numbers = torch.stack([bits.count(mask) for mask in equal.values()])
    return _with_ties(sources, above, equal, numbers, num_equal)


def order_statistic(sources: Sources, rank: int, live: Packed) -> tuple[float, int]:
    """The live score of a rank (from 1) among those of all ranks, and its rank among equal scores."""
    dtype = sources[0].compared

    def count(prefix: int | None, shift: int) -> Tensor:
        totals = torch.zeros(1 << DIGIT, dtype=torch.int64, device=sources[0].device)
        for source in sources:
            for _, scores, alive in live_chunks(source, live) if counts(source) else ():
                keys = sortable(scores if alive is None else scores[alive])
                totals += digit_counts(keys, prefix, shift).to(totals.device)
        return totals

    [(key, num_equal)] = descend(count, 8 * dtype.itemsize, [rank], sums_of(sources))
    return from_sortable(key, dtype), num_equal


def _split(source: Lazy, live: Packed, threshold: float) -> tuple[Tensor, Tensor]:
    """Packed bits of the live elements above the threshold, and of those equal to it."""
    above = torch.empty(bits.num_bytes(source.numel), dtype=torch.uint8, device=source.device)
    equal = torch.empty_like(above)
    for start, scores, alive in live_chunks(source, live):
        here = slice(start // 8, start // 8 + bits.num_bytes(len(scores)))
        for mask, is_in in ((above, scores > threshold), (equal, scores == threshold)):
            mask[here] = bits.pack(is_in if alive is None else is_in & alive)
    return above, equal
