"""Seconds a level of the gradient probe on a model of Mistral-7B's shape, beside the plain scheme on some weights.

Its weights are random: this says what a level costs, nothing about quality.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunus import Probe, prune
from prunus.lab.gpu import Sampler, utilisation_reader
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import timed
from .prune import largest_gradient

PEAK = 989e12  # bfloat16 FLOP/s of a H100 or H200 without sparsity, as its data sheet says
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY, DTYPE = 32000, torch.bfloat16
SCHEDULES = {"block, first in its process": "block", "block": "block", "sequential": "sequential"}  # the first warms up
KINDS = 7  # weights of a block


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Run a level of the gradient probe on a random model of Mistral-7B's shape."""

    blocks: int = 32  # blocks of the model
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    sparsity: float = 0.5  # fraction removed
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        level = level_of(self.blocks, self.windows, self.length, device_of(self.device))
        settings = {"blocks": self.blocks, "windows": self.windows, "length": self.length, **SHAPE}
        settings |= {"sparsity": self.sparsity, "num_weights": sum(p.numel() for p in level.model.parameters())}
        return "level", settings, measure_level(level, self.sparsity)


@dataclass(frozen=True)
class Level:
    """A model and samples (num, length) of random tokens for it."""

    model: Any
    tokens: Tensor

    @property
    def num_blocks(self) -> int:
        return len(self.model.model.layers)


def level_of(num_blocks: int, num_samples: int, length: int, device: torch.device) -> Level:
    """A random bfloat16 model of Mistral-7B's shape with ``num_blocks`` blocks, and random samples."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=VOCABULARY, num_hidden_layers=num_blocks, sliding_window=None, **SHAPE)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(DTYPE)
        with device:
            model = MistralForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return Level(model, torch.randint(0, VOCABULARY, (num_samples, length), device=device))


def flops(level: Level, schedule: str) -> float:
    """Operations of matrix products: two variants, forward and back through what follows, and the outer products."""
    block = sum(p.numel() for p in level.model.model.layers[0].parameters() if p.ndim == 2)
    suffixes = sum(i * block + level.model.lm_head.weight.numel() for i in range(1, level.num_blocks + 1))
    times = KINDS if schedule == "sequential" else 1
    return 2 * level.tokens.numel() * (4 * times * suffixes + 2 * level.num_blocks * block)


def measure_level(level: Level, sparsity: float) -> list[Row]:
    """A row for the plain scheme, scaled from some weights, and one for each schedule of ours."""
    plain = _plain(level)
    return [plain, *({"way": way} | _ours(level, schedule, sparsity) for way, schedule in SCHEDULES.items())]


def _ours(level: Level, schedule: Any, sparsity: float) -> Row:
    device = level.tokens.device
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    def run() -> Any:
        probe = Probe(1.0, schedule=schedule)
        return prune(level.model, [level.tokens], sparsity, "wanda", probe=probe, progress=mark)

    with Sampler(utilisation_reader(device)).running() as busy:
        seconds, result = timed(run, device)
    result.undo_()
    return {
        "seconds": seconds,
        "seconds_after_first_group": marks[-1] - marks[0],
        "utilisation": busy.mean,
        "share_of_peak": flops(level, schedule) / seconds / PEAK if device.type == "cuda" else None,
        "peak_gib": result.peak_bytes / 2**30,
        "passes": result.passes,
        "sparsity": result.sparsity,
    }


def _plain(level: Level) -> Row:
    """A level of one sample a pass, two records a weight, from passes for three weights over four samples."""
    num, samples = level.num_blocks, level.tokens[:4]
    chosen = sorted({0, num // 2, num - 1})
    seconds = 0.0
    flags = [(parameter, parameter.requires_grad) for parameter in level.model.parameters()]
    for i in chosen:
        record = partial(largest_gradient, level.model, level.model.model.layers[i].mlp.up_proj.weight)
        record(samples[:1])  # warms up
        seconds += timed(partial(record, samples), samples.device)[0]
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    passes = 2 * KINDS * num * len(level.tokens)
    a_pass = seconds / len(chosen) / len(samples)
    return {"way": "plainly, scaled", "seconds": passes * a_pass, "passes": passes}


LEVEL = """One level, WANDA candidates and the probe at {sparsity:.0%}, on a random bfloat16 model of Mistral-7B's \
shape ({num_weights:,} weights, {blocks} blocks, {windows} samples of {length} tokens): what a level costs, nothing \
about quality. Plainly is the probe by its definition, one sample a pass, all other weights frozen, two records a \
weight; it was timed for three weights over four samples and scaled to all. The first level of a process also compiles \
kernels, which stay on disk. Busy is the driver's figure; the share of peak counts matrix products alone, against 989 \
TFLOP/s.
"""


def level_section(record: Record) -> str:
    plain = record["rows"][0]["seconds"]
    rows = [row | {"times_faster": plain / row["seconds"]} for row in record["rows"]]
    columns = {"way": "way", "s a level": "seconds:.1f", "times faster": "times_faster:.1f", "busy": "utilisation:.0%"}
    columns |= {"of peak": "share_of_peak:.0%", "peak GiB": "peak_gib:.1f", "passes": "passes:,"}
    body = table_of(rows, columns | {"sparsity": "sparsity:.2%"})
    return section("The gradient probe: a level of a 7 B model", record, LEVEL, body)


SECTIONS = {"level": level_section}
