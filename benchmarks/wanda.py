"""One-shot WANDA beside llmcompressor's, in one process on a CPU, with equal masks or no figures.

In an environment of its own, from the root of the checkout:

    python -m venv /tmp/llmc
    /tmp/llmc/bin/pip install --constraint constraints.txt llmcompressor==0.14.0.1 tyro
    /tmp/llmc/bin/python -m benchmarks wanda path/to/stories15M calib.u16

Theirs is timed twice on the model: its functions alone, called from plain hooks over the model's own forward, and the
way its users take, ``oneshot`` with the basic pipeline, which calibrates the whole model before it prunes, as we do.
"""

import statistics
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from prunus import PerRow, prune
from prunus.eligible import eligible
from prunus.ops import bits
from prunus.ops.lazy import Lazy
from prunus.score import formula_of, wanda
from prunus.trained.tokens import read_tokens

from .benchmark import SPARSITY, Benchmark, Measured, RecordTable, Row
from .clocks import in_turns
from .prune import num_different

Weights = Mapping[str, Tensor]  # pruned, by name


@dataclass(frozen=True, kw_only=True)
class Wanda(Benchmark):
    """Prune a layer and a model by WANDA, and by llmcompressor's, which must be installed."""

    model: tyro.conf.Positional[Path]  # Hugging Face folder
    tokens: tyro.conf.Positional[Path]  # uint16 tokens to calibrate on
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    repeat: int = 5  # runs that the median is taken over

    def measure(self) -> Measured:
        from llmcompressor import __version__

        torch.manual_seed(0)
        tokens = read_tokens(self.tokens)[: self.windows * self.length].astype("int64")
        windows = torch.from_numpy(tokens.reshape(self.windows, self.length))
        settings = {"llmcompressor": __version__, "sparsity": SPARSITY, "repeat": self.repeat}
        settings |= {"windows": self.windows, "length": self.length}
        return "wanda", settings, layer_rows(4096, self.repeat) + model_rows(self.model, windows, self.repeat)


def compared(task: str, ways: Mapping[str, Callable[[], Weights]], repeat: int) -> list[Row]:
    """A row for each way, in turns; the first is ours, and what the others prune elsewhere is counted."""
    turns = in_turns(ways, repeat, torch.device("cpu"))
    masks = {name: {key: value != 0 for key, value in turn.result.items()} for name, turn in turns.items()}
    rows: list[Row] = []
    for name, turn in turns.items():
        different, total = num_different(f"{task}, {name}", masks[name], next(iter(masks.values())))
        cpu = statistics.median(turn.cpu_seconds)
        row = {"task": task, "way": name, "seconds": turn.ms / 1e3, "cpu_seconds": cpu, "different": different}
        rows.append(row | {"num_weights": total, "times_ours": cpu / (rows[0]["cpu_seconds"] if rows else cpu)})
    return rows


def layer_rows(dim: int, repeat: int) -> list[Row]:
    """One square layer whose input norms are known."""
    from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import sparsify_weight

    layer = nn.Linear(dim, dim, bias=False)
    squares = torch.rand(dim) + 0.1

    def ours() -> Weights:
        weight = layer.weight.detach()
        reads = {"weight": weight, "input_norm": squares.sqrt()}
        masks = PerRow().packed([Lazy("w", weight, wanda, reads, formula=formula_of(wanda))], SPARSITY, {})
        pruned = weight.clone()
        bits.zero_(pruned, masks["w"])
        return {"w": pruned}

    def theirs() -> Weights:
        return {"w": sparsify_weight(layer, {layer: squares}, SPARSITY, 0, 0)}

    return compared(f"a layer of {dim} x {dim}", {"prunus": ours, "llmcompressor, its function": theirs}, repeat)


def model_rows(folder: Path, windows: Tensor, repeat: int) -> list[Row]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    names = [weight.name for weight in eligible(model).weights]

    def by(way: Callable[[nn.Module, Tensor], object]) -> Callable[[], Weights]:
        def pruned() -> Weights:
            copy = deepcopy(model)
            way(copy, windows)
            return {name: copy.get_parameter(name).detach() for name in names}

        return pruned

    theirs = {"modifier": "WandaPruningModifier", "sparsity": SPARSITY, "mask_structure": "0:0"}
    ways = {
        "prunus": by(lambda copy, windows: prune(copy, [windows], SPARSITY, score="wanda", repair=None)),
        "llmcompressor, its functions": by(_by_their_functions),
        "llmcompressor, oneshot": by(partial(their_oneshot, pipeline="basic", **theirs)),
    }
    return compared(folder.name, ways, repeat)


@torch.no_grad()
def _by_their_functions(model: nn.Module, windows: Tensor) -> None:
    """Norms by a hook a layer, a sample at a time as is their default, then each layer."""
    from llmcompressor.modifiers.pruning.wanda import wanda_sparsify as theirs

    layers = [weight.module for weight in eligible(model).weights]
    scalars = {layer: theirs.make_empty_row_scalars(layer) for layer in layers}
    seen = dict.fromkeys(layers, 0)

    def hook(layer: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        scalars[layer], seen[layer] = theirs.accumulate_row_scalars(args[0], layer, scalars[layer], seen[layer])

    handles = [layer.register_forward_hook(hook) for layer in layers]
    for window in windows.split(1):
        model(input_ids=window, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer in layers:
        layer.get_parameter("weight").data = theirs.sparsify_weight(layer, scalars, SPARSITY, 0, 0)


def their_oneshot(model: nn.Module, windows: Tensor, modifier: str, pipeline: str = "sequential", **how: Any) -> None:
    """Change a Hugging Face model in place as users of llmcompressor do, on windows (num, length) of tokens.

    The pipeline is its own default for most modifiers: block after block.
    """
    from datasets import Dataset
    from llmcompressor import oneshot
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # required wherever data is given, although this data is tokens already
    unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), pad_token="a")
    data = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    module = import_module(f"llmcompressor.modifiers.{'gptq' if modifier == 'GPTQModifier' else 'pruning'}")
    oneshot(
        model=model,
        dataset=data,
        recipe=getattr(module, modifier)(**how, targets=["Linear"], ignore=["re:.*lm_head"]),
        processor=unused,
        pipeline=pipeline,
        num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1],
    )


TABLES = {
    "wanda": RecordTable(
        "task and way = {task}: {way} | s = seconds:.3f | CPU s = cpu_seconds:.3f | times ours = times_ours:.2f | "
        "weights pruned elsewhere = {different:,} of {num_weights:,}"
    )
}
