"""Whole training steps: dense with torch's fused AdamW, ours with our optimizer, ours by hooks on torch's."""

import gc
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...ops.machine import wait_for
from ..run import Run
from ..trainer import Training
from .measure import timed

ARMS: dict[str, dict[str, Any]] = {
    "dense, torch AdamW(fused=True)": {"score": "none", "optimizer": "adamw"},
    "Pruner + AdamWPrune": {"score": "bitter7", "optimizer": "adamwprune"},
    "Pruner by hooks on AdamW(fused=True)": {"score": "bitter7", "optimizer": "adamw"},
}


def bench_train(base: Run, warm: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each arm: milliseconds a step over rounds of ``every`` steps, each round with one event, and memory."""
    rows: list[dict[str, Any]] = []
    for name, fields in ARMS.items():
        torch.compiler.reset()  # so that no arm inherits what the one before left
        gc.collect()
        torch.cuda.empty_cache()
        training = Training(replace(base, **fields))
        _steps(training, warm)
        wait_for(training.device)
        if training.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        a_round = partial(_steps, training, base.every)
        times = [1e3 * timed(a_round, training.device)[0] / base.every for _ in range(rounds)]
        rows.append(
            {
                "arm": name,
                "ms": statistics.median(times),
                "ratio": statistics.median(times) / (rows[0]["ms"] if rows else statistics.median(times)),
                "spread": max(times) - min(times),
                "tokens_a_second": 1e3 * base.batch * base.accumulate * base.context / statistics.median(times),
                "peak_mib": _mib(torch.cuda.max_memory_allocated) if training.device.type == "cuda" else None,
                "steady_mib": _mib(torch.cuda.memory_allocated) if training.device.type == "cuda" else None,
                "sparsity": training.sparsity(),
            }
        )
        del training, a_round
    return rows


def _steps(training: Training, num: int) -> None:
    for _ in range(num):
        training.train_step()


def _mib(measure: Any) -> float:
    return measure() / 2**20
