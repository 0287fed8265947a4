"""Long tensors on a CPU: several threads work on them, each on pieces that stay in its cache."""

from collections.abc import Callable, Sequence

import torch

from .machine import in_threads

SPAN = 1 << 20  # elements that a thread takes at a time
PIECE = 1 << 15  # of these at once: torch divides more than this among threads of its own
ALONE = 1 << 18  # elements in all that are not worth a second thread


def in_spans(work: Callable[[int, int, int], None], sizes: Sequence[int]) -> None:
    """``work(i, start, stop)`` on every span of each tensor i, of ``sizes[i]`` elements."""
    spans = [(i, start, min(start + SPAN, size)) for i, size in enumerate(sizes) for start in range(0, size, SPAN)]

    @torch.no_grad()  # a thread has a mode of its own
    def each(args: tuple[int, int, int]) -> None:
        work(*args)

    if sum(sizes) <= ALONE:
        for args in spans:
            each(args)
    else:
        in_threads(each, spans)


def of(start: int, stop: int) -> list[slice]:
    """The pieces of a span."""
    return [slice(first, min(first + PIECE, stop)) for first in range(start, stop, PIECE)]
