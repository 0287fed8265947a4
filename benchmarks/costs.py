"""What repair and shrinking cost: on random models of known shapes, and of repair on a trained one.

The weights of random models say nothing about quality, which ``repair_study`` and ``shrink_study`` measure.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import prunus
from prunus import prune, shrink
from prunus.oneshot.changed import ChangedModel
from prunus.oneshot.shrink_step import cheapest
from prunus.ops.machine import device_of
from prunus.trained.model import ModelSource, load_trained

from .benchmark import SPARSITY, Benchmark, Measured, Record, RecordTable, Row, random_llama, write_record
from .clocks import timed
from .prune import MISTRAL

Changed = TypeVar("Changed", bound=ChangedModel)
LLAMA_70B = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
SHAPES = {"Mistral-7B": MISTRAL, "Llama-3-70B": LLAMA_70B}  # of repair
LLAMA_7B = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
LLAMA_7B |= {"num_key_value_heads": 32, "max_position_embeddings": 4096}
PARTS = ("forwards", "grams", "factorisations", "iterations", "refine", "tune")
WHOLE = 32  # blocks of Llama-2-7B
SHRINK_GOALS = {"seconds": (300.0, "s"), "peak_gib": (24.0, "GiB")}  # of all of its blocks; the memory with offload
GOAL_WINDOWS = 512  # of these goals
SELECTION = (14336, 4096, 1 / 3)  # neurons, outputs, and the share that goes


@dataclass(frozen=True, kw_only=True)
class RepairTime(Benchmark):
    """Time repair, part by part, on a random model of a known shape, or with --model on a trained one."""

    shape: Literal["Mistral-7B", "Llama-3-70B"] = "Mistral-7B"  # of the random model
    blocks: int = 32  # blocks of the random model
    model: Path | None = None  # Hugging Face folder of a trained model instead
    tokens: Path | None = None  # uint16 tokens to calibrate it on
    windows: int = 128  # calibration windows
    length: int = 2048  # tokens of each
    tune: bool = False  # every block, then the whole model, learns the outputs of the dense one
    whole: bool = True  # --no-whole leaves it at the blocks
    offload: bool = False  # the model stays in main memory, one block at a time on the device
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device, place = device_of(self.device), "cpu" if self.offload else self.device
        if self.model is not None:
            source = ModelSource(str(self.model), self.tokens, self.tokens, self.windows, self.length, device=place)
            trained = load_trained(source)
            model, (tokens,), about = trained.model, trained.batches, self.model.name
        else:
            model, tokens = random_llama(SHAPES[self.shape], self.blocks, (self.windows, self.length), device, place)
            about = f"{self.blocks} blocks of {self.shape}'s shape"
        parameters = list(model.parameters())
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        options = ["tune" if self.whole else "tune blocks"] * self.tune + ["offload"] * self.offload
        settings = {"weights": ", ".join([about, *options]), "dtype": dtype, "sparsity": SPARSITY}
        settings |= {"windows": self.windows, "length": self.length, "offload": self.offload}
        settings |= {} if self.model else {"blocks": self.blocks}
        settings |= {"num_weights": sum(p.numel() for p in parameters)}
        tune = self.tune and (prunus.BlockTuning() if self.whole else prunus.BlockTuning(whole_epochs=0))
        repair, offload = prunus.Repair(tune=tune), device if self.offload else None
        return "repair", settings, [measure_repair(model, tokens, repair, offload)]


def measure_repair(model: Any, tokens: Tensor, repair: prunus.Repair, offload: torch.device | None) -> Row:
    """Seconds by part and peak memory of one repair; the model comes back as it was."""
    row, result = measured_cost(
        lambda: prune(model, [tokens], SPARSITY, repair=repair, offload=offload), offload or tokens.device
    )
    parts, sparsity = {part: result.cost.parts[part] for part in PARTS if part in result.cost.parts}, result.sparsity
    result.undo_()
    return row | parts | {"other": row["seconds"] - sum(parts.values()), "sparsity": sparsity}


def measured_cost(call: Callable[[], Changed], device: torch.device) -> tuple[Row, Changed]:
    """What a call takes that changes a model, and what it returned."""
    cpu = time.process_time()
    seconds, result = timed(call, device)
    cpu = time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_gib": result.cost.peak_bytes / 2**30}, result


@dataclass(frozen=True, kw_only=True)
class ShrinkTime(Benchmark):
    """Time shrinking, part by part, on a random model of Llama-2-7B's shape.

    Two numbers of blocks give what a block takes, and so an estimate for all 32 of them: the rest of the model is read
    once, whatever their number.
    """

    blocks: tuple[int, ...] = (32,)  # of the random model, one run for each
    windows: int = 512  # calibration windows
    length: int = 2048  # tokens of each
    size: float = 0.7  # share of the blocks' weights that stays
    offload: bool = False  # the model stays in main memory, one block at a time on the device
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device, place = device_of(self.device), "cpu" if self.offload else self.device
        settings = {"weights": f"Llama-2-7B's shape{', offload' if self.offload else ''}", "offload": self.offload}
        settings |= {"windows": self.windows, "length": self.length, "size": self.size, "dtype": "bfloat16"}
        rows: list[Row] = []
        for num in sorted(self.blocks):
            model, tokens = random_llama(LLAMA_7B, num, (self.windows, self.length), device, place)
            rows.append({"blocks": num} | self._row(model, tokens, device))
            write_record("shrink time", settings, rows, self.results)  # a run that is killed keeps what it has
            del model
            gc.collect()
        return "shrink time", settings, [*rows, selection(device)]

    def _row(self, model: Any, tokens: Tensor, device: torch.device) -> Row:
        how: dict[str, Any] = {"size": self.size, "offload": device if self.offload else None, "progress": False}
        row, result = measured_cost(lambda: shrink(model, [tokens], **how), device)
        weights = {"weights": result.after.weights, "weights_before": result.before.weights}
        parts = result.cost.parts | {"other": row["seconds"] - sum(result.cost.parts.values())}
        in_words = "; ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
        return row | weights | {"removed": ", ".join(result.removed), "parts": in_words}


def selection(device: torch.device) -> Row:
    """The removal of a third of the neurons of one wide layer, by itself."""
    num, num_outputs, share = SELECTION if device.type == "cuda" else (96, 32, 1 / 3)
    torch.manual_seed(0)
    weight, inputs = torch.randn(num_outputs, num, device=device), torch.randn(2 * num, num, device=device)
    inverse = torch.linalg.inv(inputs.T @ inputs)
    places, removed = torch.arange(num, device=device)[:, None], int(share * num)
    seconds = min(timed(lambda: cheapest(weight, inverse, places, removed), device)[0] for _ in range(2))
    return {"blocks": None, "removed": f"{removed:,} of {num:,} neurons of one layer, chosen", "seconds": seconds}


def extrapolated(record: Record) -> str:
    """The estimate for all blocks from the two largest numbers of them, with its arithmetic, beside the goals."""
    rows, settings = [row for row in record["rows"] if row.get("blocks")], record["settings"]
    if not rows or (len(rows) < 2 and rows[-1]["blocks"] < WHOLE):
        return ""
    many, estimates, goals = rows[-1], [], []
    more = WHOLE - many["blocks"]
    for key, (goal, unit) in SHRINK_GOALS.items():
        whole = many[key]
        if more:
            few, num = rows[-2], many["blocks"] - rows[-2]["blocks"]
            whole += more * ((many[key] - few[key]) / num)
            sums = f"{many[key]:.2f} + {more} x ({many[key]:.2f} - {few[key]:.2f}) / {num}"
            estimates.append(f"- {WHOLE} blocks, estimated: {sums} = {whole:.1f} {unit}")
        if key == "peak_gib" and not settings["offload"]:
            continue
        if settings["windows"] < GOAL_WINDOWS:
            goals.append(f"- the goal, at most {goal:g} {unit}, is for {GOAL_WINDOWS} windows; these were fewer")
            continue
        outcome = "met" if whole <= goal else f"**missed by {whole / goal - 1:.0%}**"
        goals.append(f"- goal for {WHOLE} blocks: at most {goal:g} {unit}; {outcome}: {whole:.1f} {unit}")
    return "\n\n" + "\n".join([*estimates, *goals])


SHRINK_TABLE = RecordTable(
    "blocks | removed | s = seconds:.2f | CPU s = cpu_seconds:.1f | peak GiB = peak_gib:.1f | s by part = parts",
    below=extrapolated,
)
