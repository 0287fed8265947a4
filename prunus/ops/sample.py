"""A sample of scores that brackets a cut, and the pieces that a count of all scores reads."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from . import bits
from .source import Lazy
from .sweep import check_finite

Packed = Mapping[str, Tensor]  # packed bits by name; a name that is missing is wholly live

SAMPLE = 1 << 19  # scores drawn to bracket the threshold
SIGMAS = 5  # half width of the bracket, in standard errors of the sample


def draw(sources: Sequence[Lazy], total: int, num_live: int, live: Packed) -> Tensor:
    """Live scores, one at a random place of each of equal strides: ``SAMPLE`` if the sources are all ``total`` weights.

    Of those ``num_live`` are live.
    """
    generator, rate = torch.Generator().manual_seed(num_live), rate_of(total, num_live)
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


def rate_of(total: int, num_live: int) -> float:
    """The share of elements, live or not, that is looked at for a sample of ``SAMPLE`` live ones."""
    return SAMPLE / total * min(4.0, total / num_live)


def is_small(num_live: int) -> bool:
    """Whether there is no need for a sample."""
    return num_live <= SAMPLE


def order_statistics(share: float, num: int, num_live: int) -> tuple[int, int, int]:
    """Ranks (from 0) in a sample of ``num`` that enclose the share, and room for what lies between them.

    They lie ``SIGMAS`` standard errors around the cut's rank.
    """
    slack = SIGMAS * math.sqrt(num * share * (1 - share)) + 1
    first, last = math.floor(share * num - slack), math.ceil(share * num + slack)
    return first, last, SAMPLE + 2 * math.ceil(num_live * (last - first) / max(1, num))


def full_range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def live_pieces(source: Lazy, live: Packed) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Start, scores and boolean live mask (None for all) of each piece, checked to be finite."""
    packed = live.get(source.name)
    for start, scores in source.pieces():
        part = None if packed is None else packed[start // 8 : start // 8 + bits.num_bytes(len(scores))]
        check_finite(source.name, scores, part)
        yield start, scores, None if part is None else bits.unpack(part, scores.shape)
