"""How long products take on the machine at hand, dense and sparse: measured once, then read from a file.

The file is ``prunus/times-DEVICE.json`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``. It is for one device, one version
of torch and of this package, and its forms; a file of others, or one that is damaged, is measured anew.
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import __version__
from ..files.json_file import read_json, write_json
from ..grids import OnGrid
from ..ops.grid import GROUP, Grid
from ..ops.wide_products import wide_products
from . import semi_structured, tiles
from ._cuda import can_tile
from .coded_gaps import coded_gaps_of_dense
from .coded_tiles import BITS, can_code, coded_tiles_of_dense
from .gaps import Gaps, gaps_of_dense
from .product import MOST, MOST_CPU, Form, csr_of, product

Call = Callable[[], object]
Times = dict[str, float]  # microseconds in each format
CODED_FORMS = ("coded", "coded gaps")
FORMS = ("gaps", "tiles", *CODED_FORMS)
WORTH = 1.03  # times faster: less is noise
LEVEL = 0.05  # sparsities are rounded to multiples of it
LEAST_CALLS = 16  # in one CUDA graph
ROTATED = 200_000_000  # bytes of the weights that calls read in turn, more than a cache holds
MOST_COPIES = 64
PATIENCE = 1.0  # seconds that one measurement takes at most on a CPU, beyond its first three calls


@dataclass(frozen=True)
class WeightKind:
    """What the time of a product depends on: zeros anywhere or two in four, and whether tiles can hold the codes."""

    shape: tuple[int, int]
    dtype: torch.dtype
    sparsity: float
    two_of_four: bool = False
    is_coded: bool = False

    @property
    def rounded(self) -> "WeightKind":
        level = min(0.99, LEVEL * round(self.sparsity / LEVEL))
        return replace(self, sparsity=round(level, 2))

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __str__(self) -> str:
        dtype, zeros = str(self.dtype).removeprefix("torch."), f"{self.sparsity:.0%}" + " 2:4" * self.two_of_four
        return f"{self.shape[0]} x {self.shape[1]} {dtype} {zeros}" + f" {BITS} bits" * self.is_coded

    def weight(self, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(self.shape, device=device, generator=generator).to(self.dtype)
        left = self.sparsity
        if self.two_of_four:
            weight.view(-1, 4).scatter_(1, weight.abs().view(-1, 4).topk(2, 1, largest=False).indices, 0)
            left = 2 * self.sparsity - 1
        return weight.masked_fill_(torch.rand(self.shape, device=device, generator=generator) < left, 0)


def kind_of(weight: Tensor, scales: Tensor | None = None) -> WeightKind:
    """The kind of a weight (out, in), which is coded if it has ``scales``."""
    sparsity = 1 - int(weight.count_nonzero()) / max(1, weight.numel())
    shape = (weight.shape[0], weight.shape[1])
    return WeightKind(shape, weight.dtype, sparsity, semi_structured.is_two_of_four(weight), scales is not None)


def scales_of_codes(weight: Tensor, on_grid: OnGrid | None) -> Tensor | None:
    """The scales of a weight (out, in) that tiles can hold by its codes; None of any other, as one off its grid."""
    if on_grid is None or not can_code(on_grid.grid):
        return None
    scales, grid = on_grid.scales.to(weight.device), Grid(BITS)
    is_on_it = scales.shape == grid.scales_shape(weight.shape) and bool(grid.holds(weight, scales).all())
    return scales if is_on_it else None


def rounded_to_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (out, in) rounded to a grid of codes, and the scales of it: what a measurement multiplies by."""
    grid, missing = Grid(BITS), -weight.shape[1] % GROUP
    groups = nn.functional.pad(weight, (0, missing)).view(len(weight), -1, GROUP)
    scales = grid.allowed(groups.abs().amax(2).float() / grid.middle, weight.dtype).bfloat16()
    return grid.values(grid.codes(weight, scales), scales, weight.dtype) * (weight != 0), scales


@dataclass(frozen=True)
class WeightFormat:
    """A form that a weight can be kept in: its bytes, and a function that makes a copy of it to multiply by."""

    num_bytes: int
    copy: Callable[[], Callable[[Tensor], Tensor]]


def times_of(kind: WeightKind, vectors: int, device: torch.device) -> Times:
    """Microseconds of a product with ``vectors`` vectors in each format that the device has; measured at most once."""
    table, path = _table(cache_file(device), str(device)), cache_file(device)
    kind = replace(kind.rounded, is_coded=kind.is_coded and can_tile(device))
    key = f"{kind}, {vectors}"
    if key not in table:
        with torch.no_grad():
            weight, scales = kind.weight(device), None
            if kind.is_coded:
                weight, scales = rounded_to_grid(weight)
            table[key] = measured(weight, vectors, scales)
        with suppress(OSError):  # a folder that cannot be written costs the measurement of the next run
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, _versions(device) | {"times": table})
    return table[key]


def winner(times: Mapping[str, float]) -> str:
    """The fastest format, or dense if none is worth it."""
    best = min(times, key=lambda way: times[way])
    return best if times["dense"] >= WORTH * times[best] else "dense"


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num = torch.get_num_threads()
    return f"this CPU ({num} thread{'s' if num > 1 else ''})"


def cache_file(device: torch.device) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = machine_name(device) if device.type == "cuda" else f"cpu-{_cpu_name()}-{torch.get_num_threads()}"
    return home / "prunus" / f"times-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    line = re.search(r"(?:model name|CPU part)\s*:\s*(.+)", text)
    return f"{platform.machine()} {line[1] if line else platform.processor()}"


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"device": machine_name(device), "torch": str(torch.__version__), "prunus": __version__}
    return versions | {"forms": ", ".join(FORMS)}


@cache
def _table(path: Path, device: str) -> dict[str, Times]:
    """What is known, from the file if it is one of this device and these versions."""
    with suppress(ValueError):
        stored = read_json(path)
        times = stored.pop("times", None)
        is_known = stored == _versions(torch.device(device)) and isinstance(times, dict)
        if is_known and all(map(_is_times, times.values())):
            return times
    return {}


def _is_times(value: object) -> bool:
    return (
        isinstance(value, dict)
        and {"dense", "gaps"} <= set(value) <= {"dense", *FORMS, "2:4"}
        and all(isinstance(us, float) and 0 < us < 1e12 for us in value.values())
    )


def formats_of(weight: Tensor, scales: Tensor | None = None) -> dict[str, WeightFormat]:
    """The formats that this weight can have on its device; with its ``scales``, as codes too."""

    def dense(weight: Tensor) -> Callable[[Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            with wide_products(x.device, x):  # as the decoder does
                return nn.functional.linear(x, weight)

        return multiply

    def sparse(form: Form) -> Callable[[Tensor], Tensor]:
        if weight.device.type == "cpu" and isinstance(form, Gaps):
            csr_of(form)  # made once for a layer, not for a product
        return lambda x: product(x, form)

    forms: dict[str, Form] = {"gaps": gaps_of_dense(weight)}
    if can_tile(weight.device) and weight.dtype in tiles.DTYPES:
        forms["tiles"] = tiles.tiles_of_dense(weight)
        if scales is not None:
            forms |= {"coded": coded_tiles_of_dense(weight, scales), "coded gaps": coded_gaps_of_dense(weight, scales)}
    formats = {"dense": WeightFormat(weight.nbytes, lambda: dense(weight.clone()))}
    for way, form in forms.items():
        formats[way] = WeightFormat(form.nbytes, lambda form=form: sparse(form.clone()))
    if semi_structured.can_run(weight.device) and semi_structured.why_not(weight) is None:
        packed_bytes = weight.nbytes * 9 // 16  # half of the values, two bits for each
        formats["2:4"] = WeightFormat(packed_bytes, lambda: dense(torch.sparse.to_sparse_semi_structured(weight)))
    return formats


def measured(weight: Tensor, vectors: int, scales: Tensor | None = None) -> Times:
    own = torch.Generator(weight.device).manual_seed(0)  # torch's draws belong to the user
    x = torch.randn(vectors, weight.shape[1], device=weight.device, generator=own).to(weight.dtype)
    times = Times()
    for label, form in formats_of(weight, scales).items():
        copies = [form.copy() for _ in range(num_copies(form.num_bytes))]
        times[label] = microseconds([partial(copy, x) for copy in copies], weight.device)
    if vectors > (MOST if weight.is_cuda else MOST_CPU):  # of a dense copy, so that what looks faster is noise
        times |= {form: max(us, times["dense"]) for form, us in times.items() if form in FORMS}
    return times


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
