"""The exact cut of scores that many ranks hold together; only counts travel.

Each rank reads its own scores once. A sample that stays where it was drawn brackets the threshold:
its order statistics are found by counts of digits, summed over ranks. What falls into the bracket stays
on its rank too, and is cut by counts again. Of equal scores the first by weight, then by the position in
the whole weight, is dropped first, whoever holds it. So masks are those of one process, to the bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ops import bits
from .ops.digits import DIGIT, digit_counts, from_sortable, sortable
from .ops.part import Part, Sums, attempt, together
from .ops.sample import Packed, draw, full_range, is_small, live_pieces, order_statistics
from .ops.source import Lazy
from .ops.sweep import Swept, sweep

HALF = DIGIT // 2  # a digit travels in two halves: 2^8 counts, then the 2^8 of the one that holds the cut
POSITION = 48  # bits of a position in a weight
Counts = Callable[[int | None, int], Tensor]  # how often each digit stands at a shift behind a prefix, on this rank


def cut_across(sources: Sequence[Lazy], num_drop: int, live: Packed, num_live: int) -> dict[str, Tensor]:
    """Packed masks of this rank's parts without the ``num_drop`` smallest of all ranks' ``num_live`` live scores."""
    ranks = ranks_of_all(sources)
    lo, hi, limit = _bracket(sources, num_drop, num_live, live)
    swept, failed = attempt(lambda: _sweep_all(sources, lo, hi, limit, live))
    counted = [part for source, part in zip(sources, swept or (), strict=False) if counts(source)]
    here = [sum(part.num_above for part in counted), sum(len(part.scores) for part in counted), swept is None]
    num_above, num_inside, num_over = ranks.total(torch.tensor(here), failed).tolist()
    rest = num_drop - (num_live - num_inside - num_above)
    if num_over or not 0 <= rest <= num_inside:
        return _by_descent(sources, num_drop, live)
    assert swept is not None
    if rest == 0:
        for part in swept:
            bits.add_(part.above, part.positions)
        return {source.name: part.above for source, part in zip(sources, swept, strict=True)}
    keys = [sortable(part.scores) for part in counted]
    width = 8 * sources[0].compared.itemsize
    [(key, num_equal)] = descend(_counts_of(keys, sources[0].device), width, [rest], ranks)
    threshold = from_sortable(key, sources[0].compared)
    equal = []
    for part in swept:
        bits.add_(part.above, part.positions[part.scores > threshold])
        equal.append(torch.zeros_like(part.above))
        bits.add_(equal[-1], part.positions[part.scores == threshold])
    above = {source.name: part.above for source, part in zip(sources, swept, strict=True)}
    return settled(sources, above, equal, num_equal)


def ranks_of_all(sources: Sequence[Lazy]) -> Sums:
    assert sources[0].part is not None
    return sources[0].part.ranks


def counts(source: Lazy) -> bool:
    """Whether this rank speaks for its part of the weight."""
    return source.part is None or source.part.counts


def descend(counts_of: Counts, width: int, ranks_wanted: Sequence[int], ranks: Sums) -> list[tuple[int, int]]:
    """Keys of the given ranks (from 1) among the keys of all ranks, and their ranks among equal keys.

    A radix descent over counts, several at once: a digit of 16 bits is counted on each rank, and its two
    halves travel one after the other, 2 KiB each.
    """
    prefixes: list[int | None] = [None] * len(ranks_wanted)
    left = torch.tensor(ranks_wanted).unsqueeze(1)
    for shift in range(width - DIGIT, -1, -DIGIT):
        asked = set(prefixes)
        known, failed = attempt(lambda asked=asked, s=shift: {prefix: counts_of(prefix, s).cpu() for prefix in asked})
        nothing = torch.zeros(1 << DIGIT, dtype=torch.int64)
        digits = torch.stack([known[prefix] if known else nothing for prefix in prefixes]).unflatten(1, (1 << HALF, -1))
        coarse, left = _pick(ranks.total(digits.sum(2), failed), left)
        fine, left = _pick(ranks.total(digits[torch.arange(len(digits)), coarse]), left)
        found = ((coarse << HALF) + fine).tolist()
        prefixes = [
            digit - (1 << DIGIT - 1) if prefix is None else prefix << DIGIT | digit
            for prefix, digit in zip(prefixes, found, strict=True)
        ]
    return list(zip([prefix or 0 for prefix in prefixes], left.squeeze(1).tolist(), strict=True))


def _pick(numbers: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the counts in each row holds the element of rank ``left``, and its rank therein."""
    up_to = numbers.cumsum(1)
    at = torch.searchsorted(up_to, left)
    return at.squeeze(1), left - up_to.gather(1, at) + numbers.gather(1, at)


def settled(
    sources: Sequence[Lazy], above: dict[str, Tensor], equal: Sequence[Tensor], num_drop: int
) -> dict[str, Tensor]:
    """``above`` with the bits of ``equal`` but the first ``num_drop``, by weight, then by position in the whole."""
    ranks = ranks_of_all(sources)
    here = torch.stack([bits.count(mask) for mask in equal]).cpu()
    numbers = ranks.total(here * torch.tensor([counts(source) for source in sources])).tolist()
    for source, mask, number in zip(sources, equal, numbers, strict=True):
        if num_drop <= 0:
            above[source.name] |= mask
        elif num_drop < number:
            above[source.name] |= _behind(source, mask, num_drop)
        num_drop -= number
    return above


def _behind(source: Lazy, equal: Tensor, num_drop: int) -> Tensor:
    """``equal`` without its first ``num_drop`` bits, by position in the whole weight."""
    part = source.part
    assert part is not None

    def pieces() -> list[tuple[int, Tensor]]:
        return [
            (start, equal[start // 8 : (start + source.piece) // 8]) for start in range(0, source.numel, source.piece)
        ]

    def count(prefix: int | None, shift: int) -> Tensor:
        found = torch.zeros(1 << DIGIT, dtype=torch.int64, device=source.device)
        for start, packed in pieces() if part.counts else ():
            found += digit_counts(_places(part, start, packed)[1], prefix, shift)
        return found

    [(last, _)] = descend(count, POSITION, [num_drop], part.ranks)
    rest = torch.zeros_like(equal)
    for start, packed in pieces():
        here, whole = _places(part, start, packed)
        bits.add_(rest, here[whole > last])
    return rest


def _places(part: Part, start: int, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of set bits in this rank's part, and in the whole."""
    here = bits.unpack(packed, (8 * len(packed),)).nonzero().squeeze(1) + start
    return here, part.positions(here)


def _bracket(sources: Sequence[Lazy], num_drop: int, num_live: int, live: Packed) -> tuple[float, float, int]:
    """Scores that very likely enclose the cut, and how many may lie between them: as ``cut.bracket``, by counts."""
    dtype, ranks = sources[0].compared, ranks_of_all(sources)
    lowest, highest = full_range(dtype)
    if is_small(num_live):
        return lowest, highest, num_live
    total = sum(source.whole_numel for source in sources)
    mine = [source for source in sources if counts(source)]
    keys = [sortable(draw(mine, total, num_live, live))] if mine else []
    num = int(ranks.total(torch.tensor([sum(map(len, keys))])))
    first, last, limit = order_statistics(num_drop / num_live, num, num_live)
    wanted = [rank + 1 for rank in (first, last) if 0 <= rank < num]
    found = descend(_counts_of(keys, sources[0].device), 8 * dtype.itemsize, wanted, ranks) if wanted else []
    scores = [from_sortable(key, dtype) for key, _ in found]
    return scores[0] if 0 <= first < num else lowest, scores[-1] if 0 <= last < num else highest, limit


def _counts_of(keys: Sequence[Tensor], device: torch.device) -> Counts:
    """Counts of digits of keys that are kept."""
    together = torch.cat(list(keys)) if keys else torch.zeros(0, dtype=torch.int64, device=device)
    return lambda prefix, shift: digit_counts(together, prefix, shift)


def _sweep_all(sources: Sequence[Lazy], lo: float, hi: float, limit: int, live: Packed) -> list[Swept] | None:
    swept = []
    for source in sources:
        part = sweep(source, live.get(source.name), lo, hi, limit)
        if part is None:
            return None
        limit -= len(part.scores)
        swept.append(part)
    return swept


def _by_descent(sources: Sequence[Lazy], num_drop: int, live: Packed) -> dict[str, Tensor]:
    """The same cut by counting digits of all scores, where the bracket missed or ties overfilled it."""
    ranks, device, dtype = ranks_of_all(sources), sources[0].device, sources[0].compared

    def count(prefix: int | None, shift: int) -> Tensor:
        found = torch.zeros(1 << DIGIT, dtype=torch.int64, device=device)
        for source in sources:
            for _, scores, alive in live_pieces(source, live) if counts(source) else ():
                found += digit_counts(sortable(scores if alive is None else scores[alive]), prefix, shift)
        return found

    [(key, num_equal)] = descend(count, 8 * dtype.itemsize, [num_drop], ranks)
    split = together(ranks, lambda: [_split(source, live, from_sortable(key, dtype)) for source in sources])
    above = {source.name: part[0] for source, part in zip(sources, split, strict=True)}
    return settled(sources, above, [part[1] for part in split], num_equal)


def _split(source: Lazy, live: Packed, threshold: float) -> tuple[Tensor, Tensor]:
    """Packed bits of the live elements above the threshold, and of those equal to it."""
    above = torch.empty(bits.num_bytes(source.numel), dtype=torch.uint8, device=source.device)
    equal = torch.empty_like(above)
    for start, scores, alive in live_pieces(source, live):
        here = slice(start // 8, start // 8 + bits.num_bytes(len(scores)))
        for mask, found in ((above, scores > threshold), (equal, scores == threshold)):
            mask[here] = bits.pack(found if alive is None else found & alive)
    return above, equal
