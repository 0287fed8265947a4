"""How long a product takes on the machine at hand, as a model would meet it."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
LEAST_CALLS = 16  # in one graph
ROTATED = 200_000_000  # bytes that calls go round, more than a cache holds
MOST_COPIES = 64
PATIENCE = 1.0  # seconds that one measurement takes at most on a CPU, beyond its first three calls


def num_copies(num_bytes: int) -> int:
    """Copies of a weight that are read in turn, so that none is in the cache when its turn comes."""
    return max(2, min(MOST_COPIES, -(-ROTATED // max(1, num_bytes))))


def microseconds(calls: Sequence[Call], device: torch.device, repeat: int = 9) -> float:
    """Median microseconds of a call, going round ``calls``; on CUDA within a graph, without the host's part."""
    if device.type == "cuda":
        return graphed_us(calls, repeat)
    times: list[float] = []
    while len(times) < 3 or (len(times) < repeat * len(calls) and sum(times) < PATIENCE):
        started = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[1:])


def graphed_us(calls: Sequence[Call], repeat: int) -> float:
    """Median over replays of a CUDA graph that makes all calls, as often as ``LEAST_CALLS`` asks."""
    rounds = -(-LEAST_CALLS // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    times = [_elapsed_us(graph.replay) / (rounds * len(calls)) for _ in range(repeat + 1)]
    return statistics.median(times[1:])


def launched_us(call: Call, repeat: int) -> float:
    """Median microseconds of a call that the host launches, among others, without a graph."""
    times = [_elapsed_us(lambda: [call() for _ in range(LEAST_CALLS)]) / LEAST_CALLS for _ in range(repeat + 1)]
    return statistics.median(times[1:])


def _elapsed_us(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)
