"""Whether a sparse model will be faster, measured on the machine at hand before time is spent on it.

Each kind of layer, its shape, type, sparsity and pattern, is measured once on a machine: dense, as it is kept by
``SparseLinear``, and where it is 2:4 and the GPU can, as a semi-structured tensor. What is faster here is what
``sparsify_`` and the decoder take.
"""

import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files.reader import open_tensors
from ..grids import OnGrid, grid_of
from ..ops.machine import device_of
from .choose import SPARSE_FROM, choose
from .decoder import Decoder
from .model_layers import check_values, chosen, linear_weight, why_not
from .product import check_device
from .times import Times, WeightKind, kind_of, machine_name, scales_of_codes, winner

EMBEDDING = re.compile(r"embed|wte|wpe|position")  # tables that are looked up in, not multiplied by
AnySource = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor]


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
    """One kind of layer, its layers, and microseconds in each format; one that is not possible is missing."""

    kind: WeightKind
    layers: list[str]
    decode: Times
    prefill: Times
    num_joined: int = 1  # layers that are one product, whose times these are

    @property
    def num_products(self) -> int:
        return len(self.layers) // self.num_joined


@dataclass(frozen=True)
class Advice:
    machine: str
    load: Load
    rows: list[LayerTimes]
    dense_bytes: int = 0  # of the linear layers that were not pruned
    step_us: float | None = None  # microseconds of a whole step of the decoder with the dense model, if it can be run

    def __str__(self) -> str:
        table = [*_table(self.rows, self.load), ""] if self.rows else []
        return "\n".join([*table, *self.verdict])

    @property
    def verdict(self) -> list[str]:
        if not self.rows:
            return [f"no linear layer has {SPARSE_FROM:.0%} zeros or more: there is nothing to gain; prune first"]
        if not any(winner(times) != "dense" for row in self.rows for times in (row.decode, row.prefill)):
            return [f"no layer is faster on {self.machine}: keep the dense file to run, the small file to store"]
        decode = _gain(f"decoding, {self.load.batch} at a time", [(row, row.decode) for row in self.rows])
        prefill = _gain(f"a prompt of {self.load.tokens} tokens", [(row, row.prefill) for row in self.rows])
        rest = "" if self.step_us else "; attention, norms and the host's launches are not in it"
        return [decode, *self._whole, prefill, f"measured on {self.machine}{rest}"]

    @property
    def _whole(self) -> list[str]:
        """The gain of a whole step; where none can be run, that of all products, whose dense ones read as fast."""
        read = sum(row.num_products * row.kind.num_bytes for row in self.rows)
        before, after = _totals([(row, row.decode) for row in self.rows])
        if after >= before:
            return []
        if self.step_us:
            sparse_us = max(after, self.step_us - (before - after))
            change = f"{sparse_us / 1e3:.2f} ms a token in place of {self.step_us / 1e3:.2f}"
            return [f"the decoder: about {self.step_us / sparse_us:.2f} times faster, {change}"]
        if not self.dense_bytes:
            return []
        rest = self.dense_bytes * before / read
        gain = (before + rest) / (after + rest)
        return [f"with the layers that stay dense, the products of a token are about {gain:.2f} times faster"]


def advise(source: AnySource, device: torch.device | str = "cpu", load: Load = Load()) -> Advice:
    """What is faster for each kind of linear layer of a model, a mapping of weights, or a folder or file of them."""
    device = device_of(device)
    check_device(device)
    kinds = {}
    with torch.no_grad():
        for name, weight, on_grid in _weights(source):
            check_values(name, weight)
            if why_not(weight) is None:
                kinds[name] = kind_of(weight, scales_of_codes(weight, on_grid))
    rows: dict[tuple[WeightKind, int], LayerTimes] = {}
    decode, prefill = (choose(kinds, vectors, device) for vectors in (load.batch, load.tokens))
    for one, many in zip(decode, prefill, strict=True):
        num = len(one.names)
        new = LayerTimes(one.kind, [], one.times, many.times, num_joined=num)
        rows.setdefault((one.kind.rounded, num), new).layers.extend(one.names)
    rest = [kind for name, kind in kinds.items() if kind.sparsity < SPARSE_FROM and not EMBEDDING.search(name)]
    dense_bytes, step = sum(kind.num_bytes for kind in rest), None
    if any(winner(row.decode) != "dense" for row in rows.values()) and not isinstance(source, Mapping):
        dtype = next(iter(kinds.values())).dtype
        step = dense_step_seconds(source, dtype, device, load.batch)
    return Advice(machine_name(device), load, list(rows.values()), dense_bytes, step and 1e6 * step)


def _weights(source: AnySource) -> Iterator[tuple[str, Tensor, OnGrid | None]]:
    """Matrices by name that may be weights of linear layers, one at a time, and their grids."""
    if isinstance(source, nn.Module):
        for name, layer in chosen(source).items():
            yield f"{name}.weight", linear_weight(layer), grid_of(layer)
    elif isinstance(source, Mapping):
        yield from ((name, weight.detach(), None) for name, weight in source.items() if weight.ndim == 2)
    else:
        with open_tensors(Path(source)) as tensors:
            for name, record in tensors.records.items():
                if record.same_as is None and len(record.layout.shape) == 2 and name.endswith("weight"):
                    yield name, *tensors.read_on_grid(name)


def _table(rows: list[LayerTimes], load: Load) -> list[str]:
    ways = [way for way in ("dense", "sparse", "2:4") if any(way in row.decode for row in rows)]
    lines = [["layer", "type", "layers", "zeros", *(f"{w}, {n}" for n in (load.batch, load.tokens) for w in ways)]]
    for row in rows:
        kind, dtype = row.kind, str(row.kind.dtype).removeprefix("torch.")
        zeros = f"{kind.sparsity:.1%}" + (" 2:4" if kind.two_of_four else "")
        cells = [f"{kind.shape[0]} x {kind.shape[1]}", dtype, str(len(row.layers)), zeros]
        for times in (row.decode, row.prefill):
            gains = {way: f" ({times['dense'] / times[way]:.2f}x)" for way in times if way != "dense"}
            cells += [f"{times[way]:,.1f} us{gains.get(way, '')}" if way in times else "-" for way in ways]
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _gain(what: str, timed: list[tuple[LayerTimes, Times]]) -> str:
    """One line: how many layers gain by what, and the linear layers as a whole."""
    before, after = _totals(timed)
    gains = {way: sum(len(row.layers) for row, times in timed if winner(times) == way) for way in ("sparse", "2:4")}
    kinds = " and ".join(f"{num} as {way}" for way, num in gains.items() if num)
    if not kinds:
        return f"{what}: no layer is faster than dense"
    total = sum(len(row.layers) for row, _ in timed)
    return f"{what}: of {total} sparse layers {kinds} are faster; together {before / after:.2f} times"


def _totals(timed: list[tuple[LayerTimes, Times]]) -> tuple[float, float]:
    """Microseconds of all products, dense and in the fastest format."""
    before = sum(row.num_products * times["dense"] for row, times in timed)
    return before, sum(row.num_products * times[winner(times)] for row, times in timed)


def dense_step_seconds(source: Any, dtype: torch.dtype, device: torch.device, batch: int) -> float | None:
    """Seconds of a dense step, from models of one and of two blocks with random weights; None if these do not run."""
    if not isinstance(source, nn.Module) and not (Path(source) / "config.json").is_file():
        return None
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        if isinstance(source, nn.Module):
            config: Any = source.config
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        num_blocks, seconds = config.num_hidden_layers, []
        for num in (1, 2):
            part = deepcopy(config)
            part.num_hidden_layers = num
            if getattr(part, "layer_types", None):
                part.layer_types = part.layer_types[:num]
            with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
                decoder = Decoder(AutoModelForCausalLM.from_config(part, dtype=dtype).eval())
            seconds.append(_seconds_a_token(decoder, batch))
    except Exception:  # advice goes without
        return None
    return seconds[0] + (num_blocks - 1) * max(0.0, seconds[1] - seconds[0])


def _seconds_a_token(decoder: Decoder, batch: int, num: int = 16) -> float:
    """Median of the time of ``num`` more tokens, divided by their number."""
    ids, times = torch.zeros(batch, 1, dtype=torch.int64), []
    for round in range(4):
        ends = [time.perf_counter()]
        for length in (2, 2 + num):
            decoder.generate(ids, max_new_tokens=length, eos_token_id=-1).cpu()
            ends.append(time.perf_counter())
        if round:  # the first one warms up
            times.append((ends[2] - ends[1] - (ends[1] - ends[0])) / num)
    return statistics.median(times)
