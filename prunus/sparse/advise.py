"""Whether a sparse model will be faster, measured on the machine at hand before time is spent on it.

Each kind of layer, its shape, type, sparsity and pattern, is measured once, with its own weight: dense, as it is
kept by ``SparseLinear``, and where it is 2:4 and the GPU can, as a semi-structured tensor.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..files.reader import open_tensors
from ..ops.machine import device_of
from . import linear, semi_structured
from .gaps import Gaps, gaps_of_dense
from .linear import product

AnySource = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor]
Call = Callable[[], object]
WORTH = 1.03  # times faster: less is noise
SPARSE_FROM = 0.1  # layers with fewer zeros were not pruned, and stay dense
LEAST_CALLS = 16  # in one CUDA graph
ROTATED = 200_000_000  # bytes of the weights that calls read in turn, more than a cache holds
MOST_COPIES = 64
PATIENCE = 1.0  # seconds that one measurement takes at most on a CPU, beyond its first three calls


@dataclass(frozen=True)
class Load:
    """What is measured: a product with ``batch`` vectors, as in decoding, and with ``tokens``, as in a prompt."""

    batch: int = 1
    tokens: int = 4096

    def __post_init__(self) -> None:
        if self.batch < 1 or self.tokens < 1:
            raise ValueError(f"batch and tokens must be at least 1, got {self.batch} and {self.tokens}")


@dataclass(frozen=True)
class LayerTimes:
    """One kind of layer, its layers, and microseconds of each way; a way that is not possible is missing."""

    shape: tuple[int, int]
    dtype: str
    sparsity: float
    two_of_four: bool
    layers: list[str]
    decode: dict[str, float]
    prefill: dict[str, float]


@dataclass(frozen=True)
class Advice:
    machine: str
    load: Load
    rows: list[LayerTimes]

    def __str__(self) -> str:
        table = [*_table(self.rows, self.load), ""] if self.rows else []
        return "\n".join([*table, *self.verdict])

    @property
    def verdict(self) -> list[str]:
        """What to do, in plain words."""
        if not self.rows:
            return [f"no linear layer has {SPARSE_FROM:.0%} zeros or more: there is nothing to gain; prune first"]
        if not any(winner(times) != "dense" for row in self.rows for times in (row.decode, row.prefill)):
            return [f"no layer is faster on {self.machine}: keep the dense file to run, the small file to store"]
        decode = _gain(f"decoding, {self.load.batch} at a time", [(row, row.decode) for row in self.rows])
        prefill = _gain(f"a prompt of {self.load.tokens} tokens", [(row, row.prefill) for row in self.rows])
        return [decode, prefill, f"measured on {self.machine}; attention, norms and the host's launches are not in it"]


def advise(source: AnySource, device: torch.device | str = "cpu", load: Load = Load()) -> Advice:
    """What is faster for each kind of linear layer of a model, a mapping of weights, or a folder or file of them."""
    device = device_of(device)
    rows: dict[tuple, LayerTimes] = {}
    with torch.no_grad():
        for name, weight in _weights(source):
            sparsity = linear.sparsity_of(weight)
            if sparsity < SPARSE_FROM or linear.why_not(weight):
                continue
            two_of_four = semi_structured.is_two_of_four(weight)
            kind = (weight.shape, weight.dtype, round(sparsity, 1), two_of_four)
            if kind in rows:
                rows[kind].layers.append(name)
                continue
            shape, dtype = (weight.shape[0], weight.shape[1]), str(weight.dtype).removeprefix("torch.")
            times = _measured(weight.to(device), load)
            rows[kind] = LayerTimes(shape, dtype, sparsity, two_of_four, [name], *times)
    num = torch.get_num_threads()
    machine = f"this CPU ({num} thread{'s' if num > 1 else ''})"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return Advice(machine, load, list(rows.values()))


def winner(times: Mapping[str, float]) -> str:
    """The fastest way, or dense if none is worth it."""
    best = min(times, key=lambda way: times[way])
    return best if times["dense"] >= WORTH * times[best] else "dense"


@dataclass(frozen=True)
class Way:
    """A way to keep a weight: the bytes it takes, and a function that makes a copy of it to multiply by."""

    num_bytes: int
    copy: Callable[[], Callable[[Tensor], Tensor]]


def ways_of(weight: Tensor) -> dict[str, Way]:
    """The ways that this weight can be kept on its device."""
    gaps = gaps_of_dense(weight)

    def dense(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.linear(x, weight)

    def sparse(gaps: Gaps) -> Callable[[Tensor], Tensor]:
        return lambda x: product(x, gaps)

    found = {
        "dense": Way(weight.nbytes, lambda: dense(weight.clone())),
        "sparse": Way(gaps.nbytes, lambda: sparse(gaps.clone())),
    }
    if semi_structured.can_run(weight.device) and semi_structured.why_not(weight) is None:
        packed_bytes = weight.nbytes * 9 // 16  # half of the values, two bits for each
        found["2:4"] = Way(packed_bytes, lambda: dense(torch.sparse.to_sparse_semi_structured(weight)))
    return found


def _measured(weight: Tensor, load: Load) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of each way, in decoding and in a prompt."""
    one, many = (torch.randn(n, weight.shape[1], device=weight.device) for n in (load.batch, load.tokens))
    decode: dict[str, float] = {}
    prefill: dict[str, float] = {}
    for label, way in ways_of(weight).items():
        copies = [way.copy() for _ in range(num_copies(way.num_bytes))]
        for times, x in ((decode, one.to(weight.dtype)), (prefill, many.to(weight.dtype))):
            times[label] = microseconds([partial(copy, x) for copy in copies], weight.device)
    return decode, prefill


def _weights(source: AnySource) -> Iterator[tuple[str, Tensor]]:
    """Matrices by name that may be weights of linear layers, one at a time."""
    if isinstance(source, nn.Module):
        for name, layer in linear.chosen(source, (), ()).items():
            yield f"{name}.weight", linear.linear_weight(layer)
    elif isinstance(source, Mapping):
        yield from ((name, weight.detach()) for name, weight in source.items() if weight.ndim == 2)
    else:
        with open_tensors(Path(source)) as tensors:
            for name, record in tensors.records.items():
                if record.same_as is None and len(record.layout.shape) == 2 and name.endswith("weight"):
                    yield name, tensors.read(name)


def num_copies(num_bytes: int) -> int:
    """Copies of a weight that are read in turn, so that none is in the cache when its turn comes."""
    return max(2, min(MOST_COPIES, -(-ROTATED // max(1, num_bytes))))


def microseconds(calls: Sequence[Call], device: torch.device, repeat: int = 9) -> float:
    """Median microseconds of one of ``calls``, made in turn; on CUDA in a graph, without the host's launches."""
    if device.type == "cuda":
        return _graphed_us(calls, repeat)
    times: list[float] = []
    while len(times) < 3 or (len(times) < repeat * len(calls) and sum(times) < PATIENCE):
        started = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[1:])


def _graphed_us(calls: Sequence[Call], repeat: int) -> float:
    """Median over replays of a CUDA graph that makes all calls, at least ``LEAST_CALLS`` in all."""
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
    times = [elapsed_us(graph.replay) / (rounds * len(calls)) for _ in range(repeat + 1)]
    return statistics.median(times[1:])


def elapsed_us(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)


def _table(rows: list[LayerTimes], load: Load) -> list[str]:
    ways = [way for way in ("dense", "sparse", "2:4") if any(way in row.decode for row in rows)]
    lines = [["layer", "type", "layers", "zeros", *(f"{w}, {n}" for n in (load.batch, load.tokens) for w in ways)]]
    for row in rows:
        zeros = f"{row.sparsity:.1%}" + (" 2:4" if row.two_of_four else "")
        cells = [f"{row.shape[0]} x {row.shape[1]}", row.dtype, str(len(row.layers)), zeros]
        for times in (row.decode, row.prefill):
            gains = {way: f" ({times['dense'] / times[way]:.2f}x)" for way in times if way != "dense"}
            cells += [f"{times[way]:,.1f} us{gains.get(way, '')}" if way in times else "-" for way in ways]
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _gain(what: str, timed: list[tuple[LayerTimes, dict[str, float]]]) -> str:
    """One line: how many layers gain by what, and the linear layers as a whole."""
    before = sum(len(row.layers) * times["dense"] for row, times in timed)
    after = sum(len(row.layers) * times[winner(times)] for row, times in timed)
    gains = {way: sum(len(row.layers) for row, times in timed if winner(times) == way) for way in ("sparse", "2:4")}
    kinds = " and ".join(f"{num} as {way}" for way, num in gains.items() if num)
    if not kinds:
        return f"{what}: no layer is faster than dense"
    total = sum(len(row.layers) for row, _ in timed)
    return f"{what}: of {total} sparse layers {kinds} are faster; together {before / after:.2f} times"
