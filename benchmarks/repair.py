"""Pruning with repair: what it costs on a random model of Mistral-7B's shape, and what it is worth on a trained model.

The weights of the first are random: it says nothing about quality. The second compares ways to prune on held-out
tokens, over several draws of the calibration windows.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import prunus
from prunus import NofM, PerLayer, PerRow, prune
from prunus.lab.study.tables import markdown_table
from prunus.lab.trained_model import ModelSource, load_trained
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, Record, Row, Section, timed
from .prune import MISTRAL, Level

SCOPES = {"layer": PerLayer(), "row": PerRow(), "2:4": NofM(2, 4)}
PARTS = ("forwards", "grams", "factorisations", "iterations", "refine", "tune")


@dataclass(frozen=True, kw_only=True)
class Repair(Benchmark):
    """Time repair on a random model of Mistral-7B's shape; or with --model compare ways to prune a trained one."""

    blocks: int = 32  # blocks of the model
    windows: int = 128  # calibration windows
    length: int = 2048  # tokens of each
    sparsity: float = 0.5  # fraction removed
    scope: Literal["layer", "row", "2:4"] = "layer"  # where weights are compared with each other
    iterations: int = 300  # of ADMM, at most
    refine: int = 10  # steps of conjugate gradients, at most
    offload: bool = False  # the model stays in main memory, one block at a time on the device
    device: str = "cuda"  # cpu or cuda
    model: Path | None = None  # Hugging Face folder of a trained model
    tokens: Path | None = None  # uint16 tokens to calibrate it on
    eval_tokens: Path | None = None  # held-out tokens
    eval_windows: int = 24  # held-out windows
    seeds: int = 3  # draws of the calibration windows

    def measure(self) -> Measured:
        device = device_of(self.device)
        if self.model is not None:
            return self._quality()
        place = "cpu" if self.offload else self.device
        model, tokens = Level(
            blocks=self.blocks, windows=self.windows, length=self.length, device=place
        ).model_and_tokens()
        repair = prunus.Repair(iterations=self.iterations, refine=self.refine)
        settings = {"blocks": self.blocks, "windows": self.windows, "length": self.length, **MISTRAL}
        settings |= {"sparsity": self.sparsity, "scope": self.scope, "refine": self.refine, "offload": self.offload}
        settings |= {"num_weights": sum(p.numel() for p in model.parameters())}
        row = measure_repair(model, tokens, self.sparsity, self.scope, repair, device if self.offload else None)
        return "repair", settings, [row]

    def _quality(self) -> Measured:
        settings = {"model": str(self.model and self.model.name), "windows": self.windows, "length": self.length}
        settings |= {"eval_windows": self.eval_windows, "seeds": self.seeds}
        return "repair quality", settings, measure_quality(self)


# ways to prune to a sparsity, by layer or 2:4
WAYS: dict[str, Callable[..., Any]] = {
    "WANDA": lambda *what, select: prune(*what, score="wanda", select=select, repair=None),
    "WANDA's mask, repaired": lambda *what, select: prune(*what, score="wanda", select=select),
    "repair, own targets": lambda *what, select: prune(*what, select=select, repair=prunus.Repair("own")),
    "repair": lambda *what, select: prune(*what, select=select),
    "repair, tuned": lambda *what, select: prune(*what, select=select, repair=prunus.Repair(tune=True)),
}
LEVELS = {"50 %": (0.5, None), "70 %": (0.7, None), "2:4": (0.5, NofM(2, 4))}


def measure_quality(command: Repair) -> list[Row]:
    """Mean and spread over seeds of the metric on held-out data, a row for each way and level."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    dense = 0.0
    for seed in range(command.seeds):
        source = ModelSource(str(command.model), command.tokens, command.eval_tokens, command.windows, command.length)
        source = replace(source, eval_windows=command.eval_windows, seed=seed, device=command.device)
        trained = load_trained(source)
        dense = trained.evaluate(trained.model)
        for way, run in WAYS.items():
            for name, (sparsity, select) in LEVELS.items():
                default = PerRow() if way.startswith("WANDA") else PerLayer()
                result = run(trained.model, trained.batches, sparsity, select=select or default)
                value = trained.evaluate(trained.model)
                found.setdefault((way, name), []).append((value, result.seconds))
                print(f"seed {seed}, {way}, {name}: {value:.3f} in {result.seconds:.1f} s", flush=True)
                result.undo_()
    rows: list[Row] = []
    for (way, name), values in found.items():
        metrics, seconds = zip(*values, strict=True)
        row = {"way": way, "level": name, "mean": statistics.mean(metrics), "seconds": statistics.mean(seconds)}
        rows.append(row | {"values": list(metrics), "dense": dense})
    return rows


def measure_repair(
    model: Any, tokens: Tensor, sparsity: float, scope: str, repair: prunus.Repair, offload: torch.device | None
) -> Row:
    """Seconds by part, peak memory and errors of one repair; the model comes back as it was."""
    seconds, result = timed(
        lambda: prune(model, [tokens], sparsity, select=SCOPES[scope], repair=repair, offload=offload),
        offload or tokens.device,
    )
    row = {"scope": scope, "seconds": seconds, "peak_gib": result.peak_bytes / 2**30, "sparsity": result.sparsity}
    parts = {part: result.parts[part] for part in PARTS if part in result.parts}
    row |= parts | {"other": seconds - sum(parts.values())}
    errors = [(layer.mask_error, layer.error) for layer in result.layers if layer.error is not None]
    for name, values in zip(("mask_error", "error"), zip(*errors, strict=True), strict=True):
        row[name] = sum(values) / len(values)
    repairs = result.repairs.values()
    row["mean_iterations"] = sum(found.iterations for found in repairs) / len(repairs)
    result.undo_()
    return row


REPAIR = """A random bfloat16 model of Mistral-7B's shape ({num_weights:,} weights, {blocks} blocks) pruned to \
{sparsity:.0%} with repair on {windows} windows of {length} tokens, by `python -m benchmarks repair`: what it costs, \
nothing about quality. Errors are means over layers of the relative error of their outputs: with the first mask and \
dense weights, and after the repair.
"""

REPAIR_COLUMNS = {"scope": "scope", "s": "seconds:.1f", "peak GiB": "peak_gib:.1f"}
REPAIR_COLUMNS |= {part: f"{part}:.1f" for part in (*PARTS, "other")}
REPAIR_COLUMNS |= {"mask error": "mask_error:.4f", "error": "error:.4f", "iterations of ADMM": "mean_iterations:.0f"}
QUALITY = """{model} pruned by several ways, perplexity on {eval_windows} held-out windows of {length} tokens; means \
over {seeds} draws of {windows} calibration windows, and the range, by `python -m benchmarks repair --model`.
"""


def _by_way(record: Record) -> str:
    """A line for each way, a column for each level."""
    lines = [{"way": "dense", **dict.fromkeys(LEVELS, f"{record['rows'][0]['dense']:.3f}")}]
    for way in dict.fromkeys(row["way"] for row in record["rows"]):
        here = [row for row in record["rows"] if row["way"] == way]
        cells = {
            row["level"]: f"{row['mean']:.3f} ({min(row['values']):.3f} - {max(row['values']):.3f})" for row in here
        }
        lines.append({"way": way, **cells, "s": f"{statistics.mean(row['seconds'] for row in here):.1f}"})
    return markdown_table(
        ["way", *LEVELS, "s"], [[line.get(key, "") for key in ("way", *LEVELS, "s")] for line in lines]
    )


SECTIONS = {
    "repair": Section("Repair: a 7 B model", REPAIR, REPAIR_COLUMNS),
    "repair quality": Section("Repair: a trained model", QUALITY, {}, below=_by_way),
}
