"""The exact cut of scores that many ranks hold together; only counts travel.

Each rank reads its own scores once. A sample that stays where it was drawn brackets the threshold:
its order statistics are found by counts of digits, summed over ranks. What falls into the bracket stays
on its rank too, and is cut by counts again. Of equal scores the first by weight, then by the position in
the whole weight, is dropped first, whoever holds it. So masks are those of one process, to the bit.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .ops import bits
from .ops.digits import DIGIT, digit_counts, from_sortable, sortable
from .ops.sample import Packed, draw, full_range, is_small, live_pieces, order_statistics, rate_of
from .ops.shard import Shard, Sums, attempt, together
from .ops.source import Lazy
from .ops.sweep import Inside, sweep_all

if TYPE_CHECKING:
    from .ops._triton.lowered import Lowered

HALF = DIGIT // 2  # a digit travels in two halves: 2^8 counts, then the 2^8 of the one that holds the cut
POSITION = 48  # bits of a position in a weight
Counts = Callable[[int | None, int], Tensor]  # how often each digit stands at a shift behind a prefix, on this rank


def cut_across(sources: Sequence[Lazy], num_drop: int, live: Packed, num_live: int) -> dict[str, Tensor]:
    """Packed masks of this rank's parts without the ``num_drop`` smallest of all ranks' ``num_live`` live scores."""
    ranks, dtype = ranks_of_all(sources), sources[0].compared
    lo, hi, limit = _bracket(sources, num_drop, num_live, live)
    inside, failed = attempt(lambda: _pass(sources, lo, hi, limit, live))
    num_above, keys = _counted(sources, inside)
    here = torch.tensor([num_above, len(keys), inside is None])
    num_above, num_inside, num_over = ranks.total(here, failed).tolist()
    rest = num_drop - (num_live - num_inside - num_above)
    if num_over or not 0 < rest <= num_inside:
        return _by_descent(sources, num_drop, live)
    assert inside is not None
    [(key, num_equal)] = descend(_counts_of(keys), 8 * dtype.itemsize, [rest], ranks)
    threshold = from_sortable(key, dtype)
    if not lo <= threshold <= hi:  # beyond an edge, where some are not listed
        return _by_descent(sources, num_drop, live)
    bits.add_(inside.above, inside.positions[inside.scores > threshold])
    at = inside.positions[inside.scores == threshold]
    equal = torch.zeros_like(inside.above)
    bits.add_(equal, at)
    numbers = torch.bincount(inside.owners(at), minlength=len(sources))
    return settled(sources, inside.masks(sources), inside.masks(sources, equal), numbers, num_equal)


def ranks_of_all(sources: Sequence[Lazy]) -> Sums:
    assert sources[0].part is not None
    return sources[0].part.ranks


def counts(source: Lazy) -> bool:
    """Whether this rank speaks for its part of the weight."""
    return source.part is None or source.part.is_owner


def kernels_read(source: Lazy) -> bool:
    """Whether kernels may read a source; they count positions from the first element of a part, not of the whole."""
    return source.device.type == "cuda" and not (source.part and source.takes_position)


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
    sources: Sequence[Lazy], above: dict[str, Tensor], equal: dict[str, Tensor], here: Tensor, num_drop: int
) -> dict[str, Tensor]:
    """``above`` with the bits of ``equal`` but the first ``num_drop``, by weight, then by position in the whole.

    ``here`` says how many bits of ``equal`` each weight has on this rank.
    """
    numbers = ranks_of_all(sources).total(here.cpu() * torch.tensor(list(map(counts, sources)))).tolist()
    for source, number in zip(sources, numbers, strict=True):
        if number and num_drop <= 0:
            above[source.name] |= equal[source.name]
        elif 0 < num_drop < number:
            above[source.name] |= _behind(source, equal[source.name], num_drop)
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
        for start, packed in pieces() if part.is_owner else ():
            found += digit_counts(_places(part, start, packed)[1], prefix, shift)
        return found

    [(last, _)] = descend(count, POSITION, [num_drop], part.ranks)
    rest = torch.zeros_like(equal)
    for start, packed in pieces():
        here, whole = _places(part, start, packed)
        bits.add_(rest, here[whole > last])
    return rest


def _places(part: Shard, start: int, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of set bits in this rank's part, and in the whole."""
    byte = packed.nonzero().squeeze(1)
    if 8 * len(byte) < len(packed):  # as nearly always: ties are few
        which, bit = bits.unpack(packed[byte], (len(byte), 8)).nonzero(as_tuple=True)
        here = 8 * byte[which] + bit
    else:
        here = bits.unpack(packed, (8 * len(packed),)).nonzero().squeeze(1)
    return here + start, part.positions(here + start)


def _bracket(sources: Sequence[Lazy], num_drop: int, num_live: int, live: Packed) -> tuple[float, float, int]:
    """Scores that very likely enclose the cut, and how many may lie between them: as ``cut.bracket``, by counts."""
    dtype, ranks = sources[0].compared, ranks_of_all(sources)
    lowest, highest = full_range(dtype)
    if is_small(num_live):
        return lowest, highest, num_live
    total = sum(source.whole_numel for source in sources)
    mine = [source for source in sources if counts(source)]
    keys = _sampled(mine, total, num_live, live) if mine else _no_keys(sources)
    num = int(ranks.total(torch.tensor([len(keys)])))
    first, last, limit = order_statistics(num_drop / num_live, num, num_live)
    wanted = [rank + 1 for rank in (first, last) if 0 <= rank < num]
    found = descend(_counts_of(keys), 8 * dtype.itemsize, wanted, ranks) if wanted else []
    scores = [from_sortable(key, dtype) for key, _ in found]
    return scores[0] if 0 <= first < num else lowest, scores[-1] if 0 <= last < num else highest, limit


def _sampled(sources: Sequence[Lazy], total: int, num_live: int, live: Packed) -> Tensor:
    """Keys of a sample of this rank's live scores: about ``SAMPLE`` of all ranks' ``total`` weights."""
    if low := _lowered(sources):
        from .ops._triton.parts import sampled

        return sampled(low, rate_of(total, num_live), live)
    return sortable(draw(sources, total, num_live, live))


def _pass(sources: Sequence[Lazy], lo: float, hi: float, limit: int, live: Packed) -> Inside | None:
    """One read of this rank's parts; None where more lie in the bracket than the limit, or room, allows."""
    if low := _lowered(sources):
        from .ops._triton.parts import swept

        return swept(low, lo, hi, limit, live)
    return sweep_all(sources, lo, hi, limit, live)


def _lowered(sources: Sequence[Lazy]) -> "Lowered | None":
    """The sources as kernels read them, or None where their definition is evaluated."""
    if not all(map(kernels_read, sources)):
        return None
    from .ops._triton.lowered import lowered

    return lowered(sources)


def _counted(sources: Sequence[Lazy], inside: Inside | None) -> tuple[int, Tensor]:
    """How many lie above the bracket, and keys of what lies inside, of the parts that this rank speaks for."""
    if inside is None:
        return 0, _no_keys(sources)
    speaks = list(map(counts, sources))
    num_above = sum(num for num, mine in zip(inside.num_above, speaks, strict=True) if mine)
    scores = inside.scores
    if not all(speaks):
        scores = scores[torch.tensor(speaks, device=scores.device)[inside.owners(inside.positions)]]
    return num_above, sortable(scores)


def _no_keys(sources: Sequence[Lazy]) -> Tensor:
    return sortable(torch.empty(0, dtype=sources[0].compared, device=sources[0].device))


def _counts_of(keys: Tensor) -> Counts:
    """Counts of digits of keys that are kept."""
    return lambda prefix, shift: digit_counts(keys, prefix, shift)


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
    above, equal = ({source.name: part[i] for source, part in zip(sources, split, strict=True)} for i in (0, 1))
    numbers = torch.stack([bits.count(mask) for mask in equal.values()])
    return settled(sources, above, equal, numbers, num_equal)


def _split(source: Lazy, live: Packed, threshold: float) -> tuple[Tensor, Tensor]:
    """Packed bits of the live elements above the threshold, and of those equal to it."""
    above = torch.empty(bits.num_bytes(source.numel), dtype=torch.uint8, device=source.device)
    equal = torch.empty_like(above)
    for start, scores, alive in live_pieces(source, live):
        here = slice(start // 8, start // 8 + bits.num_bytes(len(scores)))
        for mask, found in ((above, scores > threshold), (equal, scores == threshold)):
            mask[here] = bits.pack(found if alive is None else found & alive)
    return above, equal
