"""Products with a pruned weight: as it is kept sparse, and dense."""

import statistics
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from prunus.ops.grid import GROUP, Grid
from prunus.ops.machine import device_of
from prunus.sparse.times import (
    LEAST_CALLS,
    Call,
    WeightFormat,
    elapsed_us,
    formats_of,
    microseconds,
    num_copies,
    rounded_to_grid,
)

from .benchmark import Benchmark, Measured, Record, RecordTable, Row
from .clocks import copy_gb_s

LARGE = ((4096, 14336), (8192, 8192))
OTHERS = ((14336, 4096), (4096, 4096), (1024, 4096))
GOALS = {"50%": 1.4, "80%": 2.6}  # times faster than dense
CODED_GOALS = {"50%": 2.2, "80%": 3.0}  # of weights in 4 bits, of the first of the large shapes
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of a sum that is rounded once or twice
NAMES = {"dense": "dense", "gaps": "prunus, gaps", "tiles": "prunus, tiles", "2:4": "2:4, cuSPARSELt"}
NAMES |= {"coded": "prunus, 4 bits", "coded gaps": "prunus, 4 bits, gaps", "int4": "dense, torch's int4"}


@dataclass(frozen=True, kw_only=True)
class Matvec(Benchmark):
    """Multiply vectors by a pruned weight: dense, as ours keeps it, and 2:4 where the GPU can."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and vectors
    bits: Literal[16, 4] = 16  # 4: weights on a grid, as codes too, with torch's own dense int4 beside them
    repeat: int = 15  # rounds that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device, dtype = device_of(self.device), getattr(torch, self.dtype)
        settings = {"dtype": self.dtype, "repeat": self.repeat, "copy_gb_s": copy_gb_s(device)}
        settings |= {"weights": "4 bits"} if self.bits == 4 else {}
        chosen = coded_cases() if self.bits == 4 else cases(device)
        return "matvec", settings, [row for case in chosen for row in rows_of(case, self.repeat, device, dtype)]


@dataclass(frozen=True)
class Product:
    """A weight (out, in), how much of it is zero, in which pattern, and how many vectors it is multiplied with."""

    shape: tuple[int, int]
    sparsity: float
    vectors: int = 1
    two_of_four: bool = False
    is_coded: bool = False

    def weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Random, the zeros anywhere or two in four."""
        torch.manual_seed(0)
        weight = torch.randn(self.shape, device=device).to(dtype)
        if self.two_of_four:
            dropped = weight.abs().view(-1, 4).topk(2, 1, largest=False).indices
            weight.view(-1, 4).scatter_(1, dropped, 0)
            return weight
        return weight.masked_fill_(torch.rand(self.shape, device=device) < self.sparsity, 0)


def cases(device: torch.device) -> list[Product]:
    """On a GPU the shapes of the claims and where they end; on a CPU, what takes a minute."""
    if device.type != "cuda":
        decode = [Product((2048, 2048), sparsity, vectors) for sparsity in (0.5, 0.9) for vectors in (1, 64)]
        return [*decode, Product((2048, 2048), 0.5, 64, two_of_four=True)]
    one = [Product(shape, sparsity) for shape in LARGE for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9)]
    few = [Product(LARGE[0], sparsity, vectors) for sparsity in (0.5, 0.8) for vectors in (2, 4, 8, 16)]
    small = [Product(shape, sparsity) for shape in OTHERS for sparsity in (0.5, 0.8)]
    prompts = [Product(shape, 0.5, 4096, two_of_four=True) for shape in (*LARGE, *OTHERS)]
    return [*one, *few, *small, *prompts]


def coded_cases() -> list[Product]:
    """Weights in 4 bits, in decoding of one text and of eight."""
    chosen = product((LARGE[0], *OTHERS[:2]), (0.5, 0.8), (1, 8))
    return [Product(*case, is_coded=True) for case in chosen]


class Int4Linear(nn.Module):
    """torch's own dense int4 with groups of 128: every weight is one of 16 values, ``scale * (c - 7.5)``."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        codes = Grid(4).codes(weight, scales)
        scales = scales.t().to(weight.dtype)
        self.register_buffer("scales", torch.stack([scales, scales / 2], 2).contiguous())  # times c - 8, and added
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack(pairs, 8))
        self.num_bytes = self.packed.nbytes + self.scales.nbytes

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), self.packed, GROUP, self.scales)
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def rows_of(case: Product, repeat: int, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """A row for each way, the dense one first; RuntimeError where a product is wrong."""
    weight, scales = case.weight(device, dtype), None
    if case.is_coded:
        weight, scales = rounded_to_grid(weight)
    x = torch.randn(case.vectors, case.shape[1], device=device).to(dtype)
    wide = torch.float64 if case.vectors <= 8 else torch.float32
    exact, formats = {"": x.to(wide) @ weight.to(wide).t()}, formats_of(weight, scales)
    if scales is not None and device.type == "cuda" and dtype == torch.bfloat16:
        grid, int4 = Grid(4), Int4Linear(weight, scales)
        exact["int4"] = x.to(wide) @ grid.values(grid.codes(weight, scales), scales, wide).t()  # it has no zeros
        formats["int4"] = WeightFormat(int4.num_bytes, lambda: deepcopy(int4))
    zeros = "2:4" if case.two_of_four else f"{case.sparsity:.0%}"
    dense_us = None
    for name, way in formats.items():
        copies = [way.copy() for _ in range(num_copies(way.num_bytes))]
        expected = exact.get(name, exact[""])
        error = ((copies[0](x).to(wide) - expected).norm() / expected.norm()).item()
        if not error < CLOSE[dtype]:
            raise RuntimeError(f"{name} is off by {error:.1e} for {case}, so no speed is reported")
        us = microseconds([partial(copy, x) for copy in copies], device, repeat)
        dense_us = dense_us or us
        yield {
            "way": NAMES[name],
            "shape": f"{case.shape[0]} x {case.shape[1]}",
            "zeros": zeros,
            "vectors": case.vectors,
            "us": us,
            "times_faster": dense_us / us,
            "launched_us": launched_us(partial(copies[0], x), repeat) if device.type == "cuda" else None,
            "size": way.num_bytes / weight.nbytes,
            "read_gb_s": way.num_bytes / us / 1e3,
            "error": error,
        }


def launched_us(call: Call, repeat: int) -> float:
    """Median microseconds of a call that the host launches, among others, without a graph."""
    times = [elapsed_us(lambda: [call() for _ in range(LEAST_CALLS)]) / LEAST_CALLS for _ in range(repeat + 1)]
    return statistics.median(times[1:])


COLUMNS = (
    "way | weight = shape | zeros | vectors:, | us:,.1f | times faster = times_faster:.2f | goal:.1f | size:.2f | "
    "launched us = launched_us:,.1f | GB/s of it = read_gb_s:,.0f"
)


def goal_of(row: Row, record: Record) -> Row:
    """Goals are those of one vector and a large bfloat16 weight on a GPU: in gap form, and one shape in 4 bits."""
    if row["way"] in (NAMES["coded"], NAMES["coded gaps"]) and row["vectors"] == 1 and row["shape"] == "4096 x 14336":
        return {"goal": CODED_GOALS.get(row["zeros"])}
    is_large = row["shape"] in {f"{rows} x {width}" for rows, width in LARGE}
    is_meant = is_large and row["way"] == NAMES["gaps"] and row["vectors"] == 1
    is_gpu = record["environment"]["machine"].startswith("NVIDIA")
    return {"goal": GOALS.get(row["zeros"])} if is_meant and is_gpu else {}


TABLES = {"matvec": RecordTable(COLUMNS, goal_of)}
