"""The pass over the scores of a weight: what lies above a bracket, and the few that lie in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from . import bits
from .source import Lazy


@dataclass(frozen=True)
class Swept:
    """What one pass found among the live elements of a weight.

    ``above`` are packed bits, set where score > hi; ``scores`` and ``positions`` list, in order,
    the elements with lo <= score <= hi.
    """

    above: Tensor
    num_above: int
    scores: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Inside:
    """What one pass found among the live elements of several weights.

    ``above`` holds packed bits of all weights side by side, each from its byte in ``starts`` on; positions are
    places of bits in it. An element that is not listed lies above or below the bracket for certain; one that is
    listed may lie beyond an edge of it by a few ulp.
    """

    above: Tensor
    starts: Sequence[int]
    num_above: Sequence[int]  # of each weight
    scores: Tensor
    positions: Tensor

    def masks(self, sources: Sequence[Lazy], packed: Tensor | None = None) -> dict[str, Tensor]:
        """Parts of ``above``, or of other bits that stand side by side as they do, by weight."""
        packed = self.above if packed is None else packed
        ends = [start + bits.num_bytes(source.numel) for source, start in zip(sources, self.starts, strict=True)]
        parts = zip(sources, self.starts, ends, strict=True)
        return {source.name: packed[start:end] for source, start, end in parts}

    def owners(self, positions: Tensor) -> Tensor:
        """Which of the weights each position belongs to."""
        first_bits = 8 * torch.tensor(self.starts, device=positions.device)
        return torch.searchsorted(first_bits, positions, right=True) - 1


def sweep_all(sources: Sequence[Lazy], lo: float, hi: float, limit: int, live: Mapping[str, Tensor]) -> Inside | None:
    """``sweep`` of several weights, or None once more than ``limit`` elements of all of them lie inside."""
    # masks side by side, before the pass: allocated in between, they would pin the heap that its temporaries leave
    sizes = [bits.num_bytes(source.numel) for source in sources]
    starts = [0, *accumulate(sizes)]
    above = torch.empty(starts[-1], dtype=torch.uint8, device=sources[0].device)
    parts: list[Swept] = []
    for source, mask in zip(sources, above.split(sizes), strict=True):
        part = sweep(source, live.get(source.name), lo, hi, limit, mask)
        if part is None:
            return None
        limit -= len(part.scores)
        parts.append(part)
    positions = [part.positions + 8 * start for part, start in zip(parts, starts, strict=False)]
    scores = torch.cat([part.scores for part in parts])
    return Inside(above, starts[:-1], [part.num_above for part in parts], scores, torch.cat(positions))


def sweep(
    source: Lazy, live: Tensor | None, lo: float, hi: float, limit: int, above: Tensor | None = None
) -> Swept | None:
    """One read of ``source``, or None once more than ``limit`` elements lie in [lo, hi].

    ``live`` are packed bits of the elements that are ranked; None ranks all. A live score that is
    not finite is a ValueError. The bits are written to ``above`` where it is given.
    """
    if above is None:
        above = torch.empty(bits.num_bytes(source.numel), dtype=torch.uint8, device=source.device)
    found = [(torch.empty(0, dtype=source.compared, device=source.device), above[:0].long())]
    split = _split_on_cpu() if source.device.type == "cpu" else split_reference
    for start, scores in source.pieces():
        here = slice(start // 8, start // 8 + bits.num_bytes(len(scores)))
        alive = None if live is None else live[here]
        check_finite(source.name, scores, alive)
        above[here], places = split(scores, alive, lo, hi)
        limit -= len(places)
        if limit < 0:
            return None
        found.append((scores[places], places + start))
    scores, positions = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Swept(above, int(bits.count(above)), scores, positions)


def split_reference(scores: Tensor, live: Tensor | None, lo: float, hi: float) -> tuple[Tensor, Tensor]:
    """Packed bits of the live elements with score > hi, and positions of those with lo <= score <= hi."""
    alive = True if live is None else bits.unpack(live, scores.shape)
    return bits.pack((scores > hi) & alive), ((scores >= lo) & (scores <= hi) & alive).nonzero().squeeze(1)


def _split_on_cpu() -> Callable[[Tensor, Tensor | None, float, float], tuple[Tensor, Tensor]]:
    """``split_reference`` by numpy, which compares and packs with vector instructions.

    The booleans are written to the same two buffers every time: fresh ones would cost more in
    page faults than the comparisons take.
    """
    buffers = np.empty((2, bits.PIECE), dtype=bool)

    def split(scores: Tensor, live: Tensor | None, lo: float, hi: float) -> tuple[Tensor, Tensor]:
        values = scores.numpy()
        over, inside = buffers[:, : len(values)]
        np.greater(values, hi, out=over)
        np.greater_equal(values, lo, out=inside)
        np.not_equal(inside, over, out=inside)
        packed = np.packbits(over, bitorder="little")
        if live is not None:
            packed &= live.numpy()
            inside &= np.unpackbits(live.numpy(), count=len(values), bitorder="little").view(bool)
        return torch.from_numpy(packed), torch.from_numpy(np.flatnonzero(inside))

    return split


def check_finite(name: str, scores: Tensor, live: Tensor | None) -> None:
    """Raise ValueError if a live score is NaN or infinite; one sum settles the ordinary case."""
    if not scores.is_floating_point() or torch.isfinite(scores.sum()):
        return
    bad = ~torch.isfinite(scores)
    if live is not None:
        bad &= bits.unpack(live, scores.shape)
    if bad.any():
        raise ValueError(
            f"scores must be finite, but {name} has {int(bad.sum())} that are not, the first {scores[bad][0].item()}; "
            "look for NaN in the weight, its gradient or its moments"
        )
