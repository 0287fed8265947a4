"""How fast a model runs on this machine, one sample at a time: text that it writes, or samples that it reads."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from ..oneshot.forward import first_tensor, modes_kept, outputs
from ..oneshot.samples import Chunk, moved, samples_of
from ..ops.machine import wait_for
from .data import is_causal, text_config

PROMPT, NEW = 16, 32  # tokens to begin with, and to write
ROUNDS = 5  # each model is timed once in every round
SECONDS = 0.2  # at least, of one timing
LONGEST = 60.0  # seconds after which no other round begins
SLOW = 10.0  # seconds after which a text ends


@dataclass(frozen=True)
class Speed:
    """Medians: tokens that ``generate`` writes, or images or samples that the model reads, in a second."""

    unit: str
    per_second: dict[str, float]  # by model


@torch.no_grad()
def compare_speed(model: nn.Module, batches: Iterable[Any], states: Mapping[str, Callable[[], None]]) -> Speed:
    """The speed of a model in each state, which its function enters; in turns, so that a slow moment meets all."""
    seconds: dict[str, list[float]] = {name: [] for name in states}
    began = time.perf_counter()
    with modes_kept(model):
        model.eval()
        unit, run = _work(model, batches)
        for number in range(ROUNDS):
            if number and time.perf_counter() - began > LONGEST:
                break
            for name, enter in states.items():
                enter()
                run()  # kernels are chosen and memory is taken for these shapes
                start, num = time.perf_counter(), 0
                while not num or time.perf_counter() - start < SECONDS:
                    num += run()
                seconds[name].append((time.perf_counter() - start) / num)
    return Speed(unit, {name: 1 / median(each) for name, each in seconds.items()})


def _work(model: Any, batches: Iterable[Any]) -> tuple[str, Callable[[], int]]:
    """What is counted, and a function that does some of it and returns how much."""
    device = next(model.parameters()).device
    sample = moved(samples_of(batches).tree(Chunk(0, 0, 1)), device)
    if hasattr(model, "can_generate") and is_causal(model):
        from transformers import GenerationConfig

        ids = sample["input_ids"] if isinstance(sample, Mapping) else sample
        longest = getattr(text_config(model), "max_position_embeddings", None) or PROMPT + NEW
        num_new = max(1, min(NEW, longest - 1))
        prompt = ids[:, : max(1, min(PROMPT, longest - num_new))]

        def write(num: int) -> int:
            how = GenerationConfig(do_sample=False, max_new_tokens=num, min_new_tokens=num, pad_token_id=0)
            text = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how).cpu()
            return text.shape[1] - prompt.shape[1]

        began = time.perf_counter()
        write(1)
        return "tokens", partial(write, max(1, min(num_new, int(SLOW / (time.perf_counter() - began)))))

    def read() -> int:
        outputs(model, sample)
        wait_for(device)
        return 1

    return "images" if first_tensor(sample).ndim == 4 else "samples", read
