"""How long the decoder takes for a token of a dense model, told without loading the model."""

import statistics
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .decoder import Decoder


def dense_step_seconds(source: Any, dtype: torch.dtype, device: torch.device, batch: int) -> float | None:
    """Seconds of a step with a dense model like that of ``source``, a model or its folder; None if it cannot be run.

    Models of its configuration with one and with two blocks, and random weights, are run: each further block is taken
    to take as long as the second.
    """
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
