"""Seconds a level of the gradient probe on a model of Mistral-7B's shape, beside the plain scheme on some weights.

Its weights are random: this says what a level costs, nothing about quality.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...oneshot import Probe, prune
from ..gpu import Sampler, utilisation_reader
from .measure import timed
from .prune import largest_gradient

PEAK = 989e12  # bfloat16 FLOP/s of a H100 or H200 without sparsity, as its data sheet says
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY = 32000
SCHEDULES = ("block", "block", "sequential")  # the first compiles kernels and warms up the libraries
KINDS = 7  # weights of a block


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
        torch.set_default_dtype(torch.bfloat16)
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


def bench_level(level: Level, sparsity: float, device: torch.device) -> list[dict[str, Any]]:
    """A row for the plain scheme, scaled from some weights, and one for each schedule of ours."""
    rows = [_plain(level, device)]
    for number, schedule in enumerate(SCHEDULES):
        cold = ", first in its process" if number == 0 else ""
        rows.append({"way": schedule + cold} | _ours(level, schedule, sparsity, device))
    return rows


def _ours(level: Level, schedule: Any, sparsity: float, device: torch.device) -> dict[str, Any]:
    marks: list[float] = []
    with Sampler(utilisation_reader(device)).running() as busy:
        seconds, result = timed(
            lambda: prune(
                level.model,
                [level.tokens],
                sparsity,
                "wanda",
                probe=Probe(1.0, schedule=schedule),
                progress=lambda *_: marks.append(time.perf_counter()),
            ),
            device,
        )
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


def _plain(level: Level, device: torch.device) -> dict[str, Any]:
    """A level of one sample a pass, two records a weight, from passes for three weights over four samples."""
    num, samples = level.num_blocks, level.tokens[:4]
    chosen = sorted({0, num // 2, num - 1})
    seconds = 0.0
    flags = [(parameter, parameter.requires_grad) for parameter in level.model.parameters()]
    for i in chosen:
        record = partial(largest_gradient, level.model, level.model.model.layers[i].mlp.up_proj.weight)
        record(samples[:1])  # warms up
        seconds += timed(partial(record, samples), device)[0]
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    passes = 2 * KINDS * num * len(level.tokens)
    a_pass = seconds / len(chosen) / len(samples)
    return {"way": "plainly, scaled", "seconds": passes * a_pass, "passes": passes}
