"""Which scores may be the threshold of a cut: a sample brackets it, and a pass lists what lies in the bracket.

Each has its definition here; a GPU's kernels read the tensors that they know.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from . import bits
from .lazy import Lazy, Sources, sortable

Packed = Mapping[str, Tensor]  # packed bits by name; a name that is missing is wholly live

SAMPLE = 1 << 19  # scores drawn to bracket the threshold
SIGMAS = 5  # half width of the bracket, in standard errors of the sample


def kernels_read(source: Lazy) -> bool:
    """Whether kernels may read a source; they count positions from the first element of a part, not of the whole."""
    return source.device.type == "cuda" and not (source.shard and source.takes_position)


def sampled(sources: Sources, total: int, num_live: int, live: Packed) -> Tensor:
    """Sortable integers of live scores, about ``SAMPLE`` from ``total`` weights of which ``num_live`` are live."""
    rate = SAMPLE / total * min(4.0, total / num_live)  # of all elements, live or not
    if sources and all(map(kernels_read, sources)):
        from ._triton.candidates import sampled as kernel
        from ._triton.readable import readable

        if low := readable(sources):
            return kernel(low, rate, live)
    return sortable(draw(sources, rate, num_live, live))


def draw(sources: Sources, rate: float, seed: int, live: Packed) -> Tensor:
    """Scores of the live and finite, one at a random place of each of equal strides."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for source in sources:
        num = min(source.numel, math.ceil(source.numel * rate))
        jitter = torch.rand(num, generator=generator, dtype=torch.float64)
        places = jitter.add_(torch.arange(num)).mul_(source.numel / max(1, num)).long().clamp_(max=source.numel - 1)
        places = places.to(source.device)
        if source.name in live:
            places = places[bits.at(live[source.name], places)]
        drawn.append(source.at(places))
    sample = torch.cat(drawn)
    return sample[torch.isfinite(sample)] if sample.is_floating_point() else sample


def is_small(num_live: int) -> bool:
    """Whether there is no need for a sample."""
    return num_live <= SAMPLE


def order_statistics(share: float, num: int, num_live: int) -> tuple[int, int, int]:
    """Ranks (from 0) in a sample of ``num`` that enclose the cut by ``SIGMAS``, and room for what lies between them."""
    slack = SIGMAS * math.sqrt(num * share * (1 - share)) + 1
    first, last = math.floor(share * num - slack), math.ceil(share * num + slack)
    return first, last, SAMPLE + 2 * math.ceil(num_live * (last - first) / max(1, num))


@dataclass(frozen=True)
class Candidates:
    """What one pass found among the live elements of several weights.

    ``above`` holds packed bits of all weights side by side, each from its byte in ``starts`` on, set where the score
    lies above the bracket. ``scores`` and ``positions``, places of bits in ``above``, list what lies inside. An element
    that is not listed lies above or below the bracket for certain; one that is listed may lie beyond an edge of it by
    a few units in the last place.
    """

    above: Tensor
    starts: Sequence[int]
    num_above: Sequence[int]  # of each weight
    scores: Tensor
    positions: Tensor

    def masks(self, sources: Sources, packed: Tensor | None = None) -> dict[str, Tensor]:
        """Parts of ``above``, or of other bits that stand side by side as they do, by weight."""
        packed = self.above if packed is None else packed
        ends = [start + bits.num_bytes(source.numel) for source, start in zip(sources, self.starts, strict=True)]
        parts = zip(sources, self.starts, ends, strict=True)
        return {source.name: packed[start:end] for source, start, end in parts}

    def owners(self, positions: Tensor) -> Tensor:
        first_bits = 8 * torch.tensor(self.starts, device=positions.device)
        return torch.searchsorted(first_bits, positions, right=True) - 1


def candidates(sources: Sources, lo: float, hi: float, limit: int, live: Packed) -> Candidates | None:
    """One read of all sources, or None where more of all ranks' elements lie in [lo, hi] than ``limit``."""
    if all(map(kernels_read, sources)):
        from ._triton.candidates import candidates as kernel
        from ._triton.readable import readable

        if low := readable(sources):
            share = sum(s.numel for s in sources) / sum(s.global_numel for s in sources)
            room = min(limit, max(SAMPLE, round(2 * limit * share)))  # twice this rank's share
            fields = kernel(low, lo, hi, room, live)
            return Candidates(*fields) if fields else None
    return candidates_reference(sources, lo, hi, limit, live)


def candidates_reference(sources: Sources, lo: float, hi: float, limit: int, live: Packed) -> Candidates | None:
    """What lies above and in [lo, hi], weight by weight; None once more than ``limit`` lie inside."""
    # all before the pass: allocated in between, masks and lists would pin the heap that its temporaries leave
    sizes = [bits.num_bytes(source.numel) for source in sources]
    starts = [0, *accumulate(sizes)]
    above = torch.empty(starts[-1], dtype=torch.uint8, device=sources[0].device)
    listed = torch.empty(limit, dtype=sources[0].compared, device=above.device)
    positions = torch.empty(limit, dtype=torch.int64, device=above.device)
    num_above, num = [], 0
    for source, mask, first in zip(sources, above.split(sizes), starts, strict=False):
        split = _split_on_cpu() if source.device.type == "cpu" else split_reference
        packed = live.get(source.name)
        for start, scores in source.chunks():
            here = slice(start // 8, start // 8 + bits.num_bytes(len(scores)))
            alive = None if packed is None else packed[here]
            check_finite(source.name, scores, alive)
            mask[here], places = split(scores, alive, lo, hi)
            begin, num = num, num + len(places)
            if num > limit:
                return None
            listed[begin:num] = scores[places]
            positions[begin:num] = places + (start + 8 * first)
        num_above.append(int(bits.count(mask)))
    return Candidates(above, starts[:-1], num_above, listed[:num], positions[:num])


def split_reference(scores: Tensor, live: Tensor | None, lo: float, hi: float) -> tuple[Tensor, Tensor]:
    """Packed bits of the live elements with score > hi, and positions of those with lo <= score <= hi."""
    alive = True if live is None else bits.unpack(live, scores.shape)
    return bits.pack((scores > hi) & alive), ((scores >= lo) & (scores <= hi) & alive).nonzero().squeeze(1)


def _split_on_cpu() -> Callable[[Tensor, Tensor | None, float, float], tuple[Tensor, Tensor]]:
    """``split_reference`` by numpy's vector instructions, into two buffers: fresh ones cost page faults."""
    buffers = np.empty((2, bits.CHUNK), dtype=bool)

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


def live_chunks(source: Lazy, live: Packed) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Start, scores and boolean live mask (None for all) of each chunk, checked to be finite."""
    packed = live.get(source.name)
    for start, scores in source.chunks():
        part = None if packed is None else packed[start // 8 : start // 8 + bits.num_bytes(len(scores))]
        check_finite(source.name, scores, part)
        yield start, scores, None if part is None else bits.unpack(part, scores.shape)


def check_finite(name: str, scores: Tensor, live: Tensor | None) -> None:
    """Raise ValueError if a live score is NaN or infinite; one sum settles the ordinary case."""
    if not scores.is_floating_point() or torch.isfinite(scores.sum()):
        return
    bad = ~torch.isfinite(scores)
    if live is not None:
        bad &= bits.unpack(live, scores.shape)
    if bad.any():
        first = scores[bad][0].item()
        problem = f"scores must be finite, but {name} has {int(bad.sum())} that are not, the first {first}"
        raise ValueError(f"{problem}; look for NaN in the weight, its gradient or its moments")
