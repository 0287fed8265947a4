"""Ranks that are threads of this process: each holds a block of every tensor, and sums meet at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from prunus.ops.shard import Shard


@dataclass
class Meeting:
    """Sums over ``size`` threads, and the bytes that each handed over."""

    size: int
    given: list = field(default_factory=list)
    num_bytes: int = 0

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=20)
        self.given = [None] * self.size


class Seat:
    """One rank's place at the meeting."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank

    def total(self, counts, failed=None):
        meeting = self.meeting
        meeting.given[self.rank] = (counts, failed)
        meeting.barrier.wait()
        given = list(meeting.given)
        meeting.barrier.wait()
        assert len({(tuple(c.shape), c.dtype) for c, _ in given}) == 1, "ranks handed over different things"
        if failures := [f for _, f in given if f is not None]:
            raise ValueError(str(failures[0]))
        if self.rank == 0:
            meeting.num_bytes += counts.numel() * counts.element_size()
        return torch.stack([c for c, _ in given]).sum(0).to(counts.dtype)


def blocks(shape, split):
    """Start and size of each block of a tensor that is cut into ``split`` chunks along each dimension."""
    chunks = []
    for dim, size in enumerate(shape):
        num = split[dim] if dim < len(split) else 1
        step = -(-size // num)
        starts = [min(i * step, size) for i in range(num)]
        chunks.append([(start, min(step, size - start)) for start in starts])
    return [tuple(zip(*block, strict=True)) for block in product(*chunks)]


def on_ranks(work, sources, live, layouts):
    """``work(sources, live)`` on ranks that hold blocks; ``layouts`` are the split and the copies of each source.

    Returns what each rank found, its parts, and the bytes exchanged.
    """
    size = max(copies * len(blocks(s.shape, split)) for s, (split, copies) in zip(sources, layouts, strict=True))
    meeting = Meeting(size)

    def run(rank):
        mine, alive = [], {}
        for source, (split, _) in zip(sources, layouts, strict=True):
            every = blocks(source.shape, split)
            start, length = every[rank % len(every)]
            part = Shard(tuple(source.shape), start, length, rank < len(every), Seat(meeting, rank))
            reads = {name: part.of(tensor).contiguous() for name, tensor in source.reads.items()}
            mine.append(replace(source, weight=part.of(source.weight).contiguous(), reads=reads, shard=part))
            if source.name in live:
                alive[source.name] = live[source.name](part)
        try:
            return work(mine, alive), mine
        except ValueError as error:
            return error, mine
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), meeting.num_bytes
