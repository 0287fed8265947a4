"""Whole training steps: dense with torch's fused AdamW, ours with our optimizer, ours by hooks on torch's."""

import gc
import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from prunus.lab.run import ModelName, Run
from prunus.lab.trainer import Training
from prunus.ops.machine import wait_for

from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import timed

ARMS: dict[str, dict[str, Any]] = {
    "dense, torch AdamW(fused=True)": {"score": "none", "optimizer": "adamw"},
    "Pruner + AdamWPrune": {"score": "bitter7", "optimizer": "adamwprune"},
    "Pruner by hooks on AdamW(fused=True)": {"score": "bitter7", "optimizer": "adamw"},
}
WARM_UP = 51  # steps


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Train GPT-2 124M, dense and pruned."""

    data: str = "stdlib"  # what to read
    model: ModelName = "gpt2"  # network
    context: int = 1024  # tokens a window
    batch: int = 32  # windows a step
    compile: bool = True  # torch.compile the model
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16 by autocast
    sparsity: float = 0.5  # fraction removed
    repeat: int = 15  # a third of it, at least three, is the number of rounds of 50 steps
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        rounds = max(3, self.repeat // 3)
        steps = 50 * (rounds + 2)
        options = ("model", "data", "context", "batch", "compile", "precision", "device", "sparsity")
        base = Run(**{name: getattr(self, name) for name in options}, steps=steps, begin=1, end=steps)
        settings = {
            name: getattr(base, name) for name in ("model", "context", "batch", "compile", "precision", "every")
        }
        return "train", settings | {"sparsity": self.sparsity, "rounds": rounds}, measure_arms(base, rounds)


def measure_arms(base: Run, rounds: int) -> list[Row]:
    """A row for each arm: milliseconds a step over rounds of ``every`` steps, each round with one event, and memory."""
    rows: list[Row] = []
    for name, fields in ARMS.items():
        torch.compiler.reset()  # so that no arm inherits what the one before left
        gc.collect()
        torch.cuda.empty_cache()
        training = Training(replace(base, **fields))
        on_gpu = training.device.type == "cuda"
        _steps(training, WARM_UP)
        wait_for(training.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(rounds):
            seconds, _ = timed(lambda training=training: _steps(training, base.every), training.device)
            times.append(1e3 * seconds / base.every)
        median = statistics.median(times)
        rows.append(
            {
                "arm": name,
                "ms": median,
                "ratio": median / (rows[0]["ms"] if rows else median),
                "spread": max(times) - min(times),
                "tokens_a_second": 1e3 * base.batch * base.accumulate * base.context / median,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
                "steady_mib": torch.cuda.memory_allocated() / 2**20 if on_gpu else None,
                "sparsity": training.sparsity(),
            }
        )
        del training
    return rows


def _steps(training: Training, num: int) -> None:
    for _ in range(num):
        training.train_step()


TRAIN = """Training {model}, context {context}, batch {batch}, {precision}, compile {compile}, an event every {every} \
steps counted in; medians of {rounds} rounds of {every} steps, to {sparsity:.0%}.
"""


def train_section(record: Record) -> str:
    columns = {"arm": "arm", "ms a step": "ms:.2f", "ratio": "ratio:.4f", "spread": "spread:.2f"}
    columns |= {"tokens/s": "tokens_a_second:,.0f", "peak MiB": "peak_mib:,.0f", "steady MiB": "steady_mib:,.1f"}
    return section("Whole training", record, TRAIN, table_of(record["rows"], columns))


SECTIONS = {"train": train_section}
