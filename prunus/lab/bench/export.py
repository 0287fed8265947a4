"""Packing and unpacking of pruned weights, in memory and to a file, beside what others do."""

import gzip
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...export import load_sparse, save_sparse
from ...ops.bits import words_of
from ...ops.compact import compact, expand, nonzero
from .measure import median_ms

GOALS = {("float32", 0.5): 0.535, ("bfloat16", 0.5): 0.566, ("float32", 0.8): 0.235, ("bfloat16", 0.8): 0.27}
KINDS = list(product(("float32", "bfloat16"), (0.5, 0.8)))
GZIPPED = 1 << 25  # bytes that gzip is timed on: it is slow


@dataclass(frozen=True)
class Way:
    """Two functions that undo each other, and how many bytes what the first returns has."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any, Tensor], Tensor]  # the second argument gives shape and type
    size: Callable[[Any], int]


def bits_and_values(tensor: Tensor) -> tuple[Tensor, Tensor]:
    packed = nonzero(tensor)
    return packed, compact(tensor, packed)


def boolean_and_values(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """What a line of torch gives: a byte a weight for the mask."""
    mask = tensor != 0
    return mask, tensor[mask]


def scattered(packed: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    mask, values = packed
    return torch.zeros_like(like).masked_scatter_(mask, values)


def _bytes(tensor: Tensor) -> memoryview:
    return words_of(tensor).view(torch.uint8).numpy().data


def gunzipped(packed: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=like.dtype).view(like.shape)


def both_sizes(packed: tuple[Tensor, Tensor]) -> int:
    return packed[0].nbytes + packed[1].nbytes


IN_MEMORY = {
    "prunus: bits and values": Way(bits_and_values, lambda p, like: expand(p[1], p[0], like.shape), both_sizes),
    "torch: boolean index, masked_scatter": Way(boolean_and_values, scattered, both_sizes),
}
GZIP = Way(lambda tensor: gzip.compress(_bytes(tensor), 1), gunzipped, len)


def weight(dtype: str, sparsity: float, numel: int, device: torch.device) -> Tensor:
    """A matrix with exactly ``round(sparsity numel)`` zeros at random places."""
    generator = torch.Generator(device).manual_seed(0)
    made = torch.randn(numel, generator=generator, device=device).to(getattr(torch, dtype))
    made[torch.randperm(numel, generator=generator, device=device)[: round(sparsity * numel)]] = 0
    return made.view(-1, 1024)


def bench_export(num_bytes: int, repeat: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each way, type and sparsity: GB/s of dense bytes each way, and the size against dense."""
    rows = []
    for dtype, sparsity in KINDS:
        tensor = weight(dtype, sparsity, num_bytes // getattr(torch, dtype).itemsize // 1024 * 1024, device)
        for name, way in IN_MEMORY.items():
            rows.append(_row(name, dtype, sparsity, _timed(way, tensor, repeat, device)))
        if device.type == "cpu":
            rows.append(_row("gzip, level 1", dtype, sparsity, _timed(GZIP, _head(tensor), 3, device)))
        rows += [_row(name, dtype, sparsity, figures) for name, figures in _files(tensor, repeat, device)]
    return rows


def _head(tensor: Tensor) -> Tensor:
    return tensor[: max(1, GZIPPED // tensor.element_size() // tensor.shape[1])]


def _timed(way: Way, tensor: Tensor, repeat: int, device: torch.device) -> dict[str, float]:
    """Figures of one way; RuntimeError unless it gives every bit back that it should."""
    packed = way.pack(tensor)
    _check(way.unpack(packed, tensor), tensor)
    pack = median_ms(lambda: way.pack(tensor), repeat, device, lambda: None)
    unpack = median_ms(lambda: way.unpack(packed, tensor), repeat, device, lambda: None)
    return _figures(tensor, pack, unpack, way.size(packed))


def _files(tensor: Tensor, repeat: int, device: torch.device) -> Iterator[tuple[str, dict[str, float]]]:
    """Saving to and loading from a file; ours waits for the disk and checks sums, which save_file does not."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "a.safetensors"
        ways: dict[str, tuple[Callable[[], object], Callable[[], dict[str, Tensor]]]] = {
            "file, prunus: save_sparse, load_sparse": (
                lambda: save_sparse({"a": tensor}, path),
                lambda: load_sparse(path, device),
            ),
            "file, dense: safetensors save_file, load_file and read": (
                lambda: save_file({"a": tensor}, path),
                lambda: {"a": load_file(path, str(device))["a"].clone()},  # it maps the file and reads nothing
            ),
        }
        for name, (save, load) in ways.items():
            save()
            _check(load()["a"], tensor)
            pack = median_ms(save, repeat, device, lambda: None)
            unpack = median_ms(load, repeat, device, lambda: None)
            yield name, _figures(tensor, pack, unpack, path.stat().st_size)


def _check(found: Tensor, wanted: Tensor) -> None:
    if found.dtype != wanted.dtype or not torch.equal(words_of(found), words_of(wanted)):
        raise RuntimeError("the bits that came back differ, so no speed is reported")


def _figures(tensor: Tensor, pack: float, unpack: float, size: int) -> dict[str, float]:
    return {
        "pack_gb_s": tensor.nbytes / pack / 1e6,
        "unpack_gb_s": tensor.nbytes / unpack / 1e6,
        "size": size / tensor.nbytes,
    }


def _row(way: str, dtype: str, sparsity: float, figures: dict[str, float]) -> dict[str, Any]:
    goal = GOALS[dtype, sparsity] if "prunus" in way else None
    return {"way": way, "dtype": dtype, "sparsity": sparsity, **figures, "size_goal": goal}
