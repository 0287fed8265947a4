"""Products with a pruned weight: as it is kept sparse, dense, and as others keep it."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from prunus.ops.machine import device_of
from prunus.sparse.advise import Way, launched_us, microseconds, num_copies, ways_of

from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import copy_gb_s

LARGE = ((4096, 14336), (8192, 8192))
OTHERS = ((14336, 4096), (4096, 4096), (1024, 4096))
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of a sum that is rounded once or twice
RIVAL = "torch sparse CSR"
NAMES = {"dense": "dense", "sparse": "prunus, values and gaps", "2:4": "2:4, cuSPARSELt"}


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Multiply vectors by a pruned weight: dense, as ours keeps it, and as others do."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and vectors
    repeat: int = 15  # rounds that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        settings = {"dtype": self.dtype, "repeat": self.repeat, "copy_gb_s": copy_gb_s(device)}
        return "matvec", settings, measure_cases(self.repeat, device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Case:
    """A weight (out, in), how much of it is zero, in which pattern, and how many vectors it is multiplied with."""

    shape: tuple[int, int]
    sparsity: float
    vectors: int = 1
    two_of_four: bool = False

    def weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Random, the zeros anywhere or two in four."""
        torch.manual_seed(0)
        weight = torch.randn(self.shape, device=device).to(dtype)
        if self.two_of_four:
            dropped = weight.abs().view(-1, 4).topk(2, 1, largest=False).indices
            weight.view(-1, 4).scatter_(1, dropped, 0)
            return weight
        return weight.masked_fill_(torch.rand(self.shape, device=device) < self.sparsity, 0)


def cases(device: torch.device) -> list[Case]:
    """On a GPU the shapes of the claims and where they end; on a CPU, what takes a minute."""
    if device.type != "cuda":
        decode = [Case((2048, 2048), sparsity, vectors) for sparsity in (0.5, 0.9) for vectors in (1, 64)]
        return [*decode, Case((2048, 2048), 0.5, 64, two_of_four=True)]
    one = [Case(shape, sparsity) for shape in LARGE for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9)]
    few = [Case(LARGE[0], sparsity, vectors) for sparsity in (0.5, 0.8) for vectors in (2, 4, 8)]
    small = [Case(shape, sparsity) for shape in OTHERS for sparsity in (0.5, 0.8)]
    prompts = [Case(shape, 0.5, 4096, two_of_four=True) for shape in (*LARGE, *OTHERS)]
    return [*one, *few, *small, *prompts]


def csr(weight: Tensor) -> Way:
    """torch's own sparse rows with 32-bit columns."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    rows = weight.to_sparse_csr()
    crow, columns = rows.crow_indices().int(), rows.col_indices().int()

    def copy() -> Callable[[Tensor], Tensor]:
        parts = (crow.clone(), columns.clone(), rows.values().clone())
        kept = torch.sparse_csr_tensor(*parts, tuple(weight.shape), check_invariants=False)
        return lambda x: torch.mv(kept, x[0])[None] if len(x) == 1 else (kept @ x.t()).t()

    return Way(rows.values().nbytes + crow.nbytes + columns.nbytes, copy)


def measure_cases(repeat: int, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """A row for each way of each case, the dense one first."""
    return [row for case in cases(device) for row in _rows(case, repeat, case.weight(device, dtype))]


@torch.no_grad()
def _rows(case: Case, repeat: int, weight: Tensor) -> Iterator[Row]:
    x = torch.randn(case.vectors, case.shape[1], device=weight.device).to(weight.dtype)
    wide = torch.float64 if case.vectors <= 8 else torch.float32
    exact = x.to(wide) @ weight.to(wide).t()
    found = {NAMES[name]: way for name, way in ways_of(weight).items()}
    if case.vectors == 1:  # with more, it is slow and its sums are rounded on the way
        found[RIVAL] = csr(weight)
    dense_us = None
    for name, way in found.items():
        try:
            copies = [way.copy() for _ in range(num_copies(way.num_bytes))]
            error = ((copies[0](x).to(wide) - exact).norm() / exact.norm()).item()
            us = microseconds([partial(copy, x) for copy in copies], weight.device, repeat)
        except RuntimeError as problem:  # a type or an operation that this build of torch does not have
            yield _row(case, name) | {"problem": str(problem).splitlines()[0]}
            continue
        if not error < CLOSE[weight.dtype]:
            if name != RIVAL:
                raise RuntimeError(f"{name} is off by {error:.1e} for {case}, so no speed is reported")
            yield _row(case, name) | {"problem": f"off by {error:.1e}, so no speed is reported"}
            continue
        dense_us = dense_us or us
        launched = launched_us(partial(copies[0], x), repeat) if weight.device.type == "cuda" else None
        yield _row(case, name) | {
            "us": us,
            "times_faster": dense_us / us,
            "launched_us": launched,
            "size": way.num_bytes / weight.nbytes,
            "read_gb_s": way.num_bytes / us / 1e3,
            "error": error,
        }


def _row(case: Case, name: str) -> Row:
    shape = f"{case.shape[0]} x {case.shape[1]}"
    zeros = "2:4" if case.two_of_four else f"{case.sparsity:.0%}"
    empty = dict.fromkeys(("us", "times_faster", "launched_us", "size", "read_gb_s", "error", "problem"))
    return {"way": name, "shape": shape, "zeros": zeros, "vectors": case.vectors} | empty


MATVEC = """Products of a pruned {dtype} weight with some vectors; medians of {repeat} rounds. On a GPU calls are made \
within a CUDA graph and go round copies of more than 200 MB, so that none is read from a cache; "launched" is without \
the graph, by the host. Times faster and size are relative to dense in the same table. Every way agreed with \
the product in higher precision before it was timed.
"""


def matvec_section(record: Record) -> str:
    rows = [row | {"time": row["problem"] if row["us"] is None else f"{row['us']:,.1f}"} for row in record["rows"]]
    columns = {"way": "way", "weight": "shape", "zeros": "zeros", "vectors": "vectors:,", "us": "time"}
    columns |= {"times faster": "times_faster:.2f", "size": "size:.2f", "launched us": "launched_us:,.1f"}
    body = table_of(rows, columns | {"GB/s of it": "read_gb_s:,.0f"})
    return section("Products with a pruned weight", record, MATVEC, body)


SECTIONS = {"matvec": matvec_section}
