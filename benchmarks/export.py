"""Packing and unpacking of pruned weights, in memory and to a file, beside what others do."""

import gzip
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prunus import load_sparse, save_sparse
from prunus.ops.bits import words_of
from prunus.ops.compact import compact, expand, nonzero
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, RecordTable, Row
from .clocks import copy_gb_s, median_ms

GOALS = {("float32", 0.5): 0.535, ("bfloat16", 0.5): 0.566, ("float32", 0.8): 0.235, ("bfloat16", 0.8): 0.27}
GZIPPED = 1 << 25  # bytes that gzip is timed on: it is slow


@dataclass(frozen=True, kw_only=True)
class Export(Benchmark):
    """Pack a pruned weight without its zeros, and unpack it."""

    megabytes: int = 256  # of the weight that is packed
    repeat: int = 15  # calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        settings = {"megabytes": self.megabytes, "repeat": self.repeat, "copy_gb_s": copy_gb_s(device)}
        rows, memory = [], Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            for dtype, sparsity in product(("float32", "bfloat16"), (0.5, 0.8)):
                numel = self.megabytes * 10**6 // getattr(torch, dtype).itemsize // 1024 * 1024
                tensor = pruned_weight(dtype, sparsity, numel, device)
                for name, way in ways(Path(folder) / "a.safetensors", device).items():
                    row = {"way": name, "dtype": dtype, "sparsity": sparsity} | measure_way(way, tensor, self.repeat)
                    rows.append(row | {"size_goal": GOALS[dtype, sparsity] if "prunus" in name else None})
        return "export", settings, rows


@dataclass(frozen=True)
class Packing:
    """Two functions that undo each other, and how many bytes the result of the first has."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any, Tensor], Tensor]  # the second argument gives shape and type
    size: Callable[[Any], int] = lambda packed: packed[0].nbytes + packed[1].nbytes
    most_bytes: int | None = None  # of the weight that it is timed on


def ways(path: Path, device: torch.device) -> dict[str, Packing]:
    found = {
        "prunus: bits and values": Packing(
            lambda tensor: (bits := nonzero(tensor), compact(tensor, bits)),
            lambda packed, like: expand(packed[1], packed[0], like.shape),
        ),
        "torch: boolean index, masked_scatter": Packing(
            lambda tensor: (mask := tensor != 0, tensor[mask]),
            lambda packed, like: torch.zeros_like(like).masked_scatter_(*packed),
        ),
        "gzip, level 1": Packing(
            lambda tensor: gzip.compress(words_of(tensor).view(torch.uint8).numpy().data, 1),
            lambda packed, like: torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=like.dtype).view_as(like),
            len,
            GZIPPED,
        ),
        "file, prunus: save_sparse, load_sparse": Packing(
            lambda tensor: save_sparse({"a": tensor}, path),
            lambda *_: load_sparse(path, device)["a"],
            lambda _: path.stat().st_size,
        ),
        "file, dense: safetensors save_file, load_file and read": Packing(
            lambda tensor: save_file({"a": tensor}, path),
            lambda *_: load_file(path, str(device))["a"].clone(),  # load_file maps the file and reads nothing
            lambda _: path.stat().st_size,
        ),
    }
    return {name: way for name, way in found.items() if device.type == "cpu" or not name.startswith("gzip")}


def pruned_weight(dtype: str, sparsity: float, numel: int, device: torch.device) -> Tensor:
    """A matrix with exactly ``round(sparsity numel)`` zeros at random places."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(numel, generator=generator, device=device).to(getattr(torch, dtype))
    weight[torch.randperm(numel, generator=generator, device=device)[: round(sparsity * numel)]] = 0
    return weight.view(-1, 1024)


def measure_way(way: Packing, tensor: Tensor, repeat: int) -> Row:
    """GB/s of dense bytes each way, and the size; RuntimeError unless every bit comes back."""
    if way.most_bytes:
        tensor, repeat = tensor[: max(1, way.most_bytes // tensor.element_size() // tensor.shape[1])], min(repeat, 3)
    packed = way.pack(tensor)
    unpacked = way.unpack(packed, tensor)
    if unpacked.dtype != tensor.dtype or not torch.equal(words_of(unpacked), words_of(tensor)):
        raise RuntimeError("the bits that came back differ, so no speed is reported")
    del unpacked
    pack = median_ms(lambda: way.pack(tensor), repeat, tensor.device)
    unpack = median_ms(lambda: way.unpack(packed, tensor), repeat, tensor.device)
    speeds = {"pack_gb_s": tensor.nbytes / pack / 1e6, "unpack_gb_s": tensor.nbytes / unpack / 1e6}
    return speeds | {"size": way.size(packed) / tensor.nbytes}


TABLES = {
    "export": RecordTable(
        "way | type = dtype | zeros = sparsity:.0% | pack GB/s = pack_gb_s:.2f | unpack GB/s = unpack_gb_s:.2f | "
        "size:.4f | goal = size_goal:g"
    )
}
