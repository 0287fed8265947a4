"""One-shot WANDA beside llmcompressor's, in one process on a CPU, with equal masks or no figures.

In an environment of its own, from the root of the checkout:

    python -m venv /tmp/llmc
    /tmp/llmc/bin/pip install --constraint constraints.txt llmcompressor==0.14.0.1
    PYTHONPATH=. /tmp/llmc/bin/python benchmarks/wanda_llmcompressor.py path/to/stories15M calib.u16

Theirs is timed twice on the model: its functions alone, called from plain hooks over the model's own forward, and the
way its users take, ``oneshot`` with the basic pipeline, which calibrates the whole model before it prunes, as we do.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmcompressor import __version__ as their_version
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import WandaPruningModifier
from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import (
    accumulate_row_scalars,
    make_empty_row_scalars,
    sparsify_weight,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prunus import PerRow, prune
from prunus.eligible import eligible
from prunus.lab.bench.measure import record
from prunus.ops import bits
from prunus.ops.lazy import Lazy
from prunus.score import SCORES, wanda

SPARSITY = 0.5
Weights = Mapping[str, Tensor]  # pruned, by name


def timed(way: Callable[[], Weights]) -> tuple[Weights, float, float]:
    """What it made, seconds, and seconds of all CPU cores."""
    began, cpu = time.perf_counter(), time.process_time()
    found = way()
    return found, time.perf_counter() - began, time.process_time() - cpu


def compared(task: str, ways: Mapping[str, Callable[[], Weights]], repeat: int) -> list[dict[str, Any]]:
    """A row for each way, in turns; the first is ours, and what the others prune elsewhere is counted."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    pruned: dict[str, Weights] = {}
    for _ in range(repeat + 1):  # the first is to warm up
        for name, way in ways.items():
            pruned[name], *seconds = timed(way)
            runs[name].append((seconds[0], seconds[1]))
    rows = [_row(task, name, runs[name][1:], pruned[name], next(iter(pruned.values()))) for name in ways]
    for row in rows:
        row["times_ours"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
    return rows


def _row(task: str, name: str, runs: list[tuple[float, float]], pruned: Weights, ours: Weights) -> dict[str, Any]:
    different = sum(int(((pruned[key] == 0) != (value == 0)).sum()) for key, value in ours.items())
    total = sum(value.numel() for value in ours.values())
    if different > 1e-4 * total:
        raise RuntimeError(f"{task}, {name}: {different} of {total} weights differ, so no speed is reported")
    seconds, cpu = (statistics.median(each) for each in zip(*runs, strict=True))
    row = {"task": task, "way": name, "seconds": seconds, "cpu_seconds": cpu}
    return row | {"different": different, "num_weights": total}


def layer_rows(repeat: int) -> list[dict[str, Any]]:
    """One layer of 4096 x 4096 whose input norms are known."""
    layer = nn.Linear(4096, 4096, bias=False)
    squares = torch.rand(4096) + 0.1

    def ours() -> Weights:
        weight = layer.weight.detach()
        reads = {"weight": weight, "input_norm": squares.sqrt()}
        masks = PerRow().packed([Lazy("w", weight, wanda, reads, formula=SCORES["wanda"].formula)], SPARSITY, {})
        pruned = weight.clone()
        bits.zero_(pruned, masks["w"])
        return {"w": pruned}

    def theirs() -> Weights:
        return {"w": sparsify_weight(layer, {layer: squares}, SPARSITY, 0, 0)}

    return compared("a layer of 4096 x 4096", {"prunus": ours, "llmcompressor, its function": theirs}, repeat)


def model_rows(folder: Path, windows: Tensor, repeat: int) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    names = [weight.name for weight in eligible(model).weights]

    def ours() -> Weights:
        copy = deepcopy(model)
        prune(copy, [windows], SPARSITY, "wanda")
        return _named(copy, names)

    def functions() -> Weights:
        copy = deepcopy(model)
        _by_their_functions(copy, windows)
        return _named(copy, names)

    def command() -> Weights:
        copy = deepcopy(model)
        _by_their_command(copy, windows)
        return _named(copy, names)

    ways = {"prunus": ours, "llmcompressor, its functions": functions, "llmcompressor, oneshot": command}
    return compared(folder.name, ways, repeat)


def _named(model: nn.Module, names: list[str]) -> Weights:
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach() for name in names}


@torch.no_grad()
def _by_their_functions(model: nn.Module, windows: Tensor) -> None:
    """Norms by a hook a layer, a sample at a time as is their default, then each layer."""
    layers = [weight.module for weight in eligible(model).weights]
    scalars = {layer: make_empty_row_scalars(layer) for layer in layers}
    seen = dict.fromkeys(layers, 0)

    def hook(layer: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        scalars[layer], seen[layer] = accumulate_row_scalars(args[0], layer, scalars[layer], seen[layer])

    handles = [layer.register_forward_hook(hook) for layer in layers]
    for window in windows.split(1):
        model(input_ids=window, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer in layers:
        layer.weight.data = sparsify_weight(layer, scalars, SPARSITY, 0, 0)


def _by_their_command(model: nn.Module, windows: Tensor) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # asked for wherever data is given; what is given here is tokens already
    unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), pad_token="a")
    recipe = WandaPruningModifier(sparsity=SPARSITY, mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"])
    data = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        processor=unused,
        pipeline="basic",
        num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("tokens", type=Path, help="uint16 tokens to calibrate on")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    torch.manual_seed(0)
    tokens = np.fromfile(given.tokens, "<u2")[: given.windows * given.length].astype(np.int64)
    windows = torch.from_numpy(tokens.reshape(given.windows, given.length))
    rows = layer_rows(given.repeat) + model_rows(given.model, windows, given.repeat)
    settings = {"llmcompressor": their_version, "sparsity": SPARSITY, "repeat": given.repeat}
    settings |= {"windows": given.windows, "length": given.length}
    for row in rows:
        print(row)
    print(f"written to {record('wanda', settings, rows, given.results)}")


if __name__ == "__main__":
    main()
