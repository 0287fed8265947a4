"""Seconds and memory of pruning with repair on a random model of Mistral-7B's shape, by part of the work.

Its weights are random: this says what a repair costs, nothing about quality.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from prunus import NofM, PerLayer, PerRow, Repair, prune
from prunus.ops.machine import device_of

from . import level
from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import timed

SCOPES = {"layer": PerLayer(), "row": PerRow(), "2:4": NofM(2, 4)}
PARTS = ("forwards", "grams", "factorisations", "iterations", "refine", "tune")


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Prune a random model of Mistral-7B's shape with repair, by default on a GPU; on a CPU take few blocks."""

    blocks: int = 32  # blocks of the model
    windows: int = 128  # calibration windows
    length: int = 2048  # tokens of each
    sparsity: float = 0.5  # fraction removed
    scope: Literal["layer", "row", "2:4"] = "layer"  # where weights are compared with each other
    iterations: int = 300  # of ADMM, at most
    refine: int = 10  # steps of conjugate gradients, at most
    offload: bool = False  # the model stays in main memory, one block at a time on the device
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        made = level.level_of(self.blocks, self.windows, self.length, torch.device("cpu") if self.offload else device)
        repair = Repair(iterations=self.iterations, refine=self.refine)
        settings = {"blocks": self.blocks, "windows": self.windows, "length": self.length, **level.SHAPE}
        settings |= {"sparsity": self.sparsity, "scope": self.scope, "refine": self.refine, "offload": self.offload}
        settings |= {"num_weights": sum(p.numel() for p in made.model.parameters())}
        return "repair", settings, [measure_repair(made, self.sparsity, self.scope, repair, device, self.offload)]


def measure_repair(
    made: level.Level, sparsity: float, scope: str, repair: Repair, device: torch.device, offload: bool
) -> Row:
    """Seconds by part, peak memory and errors of one repair; the model comes back as it was."""
    place = device if offload else None
    seconds, result = timed(
        lambda: prune(made.model, [made.tokens], sparsity, select=SCOPES[scope], repair=repair, offload=place), device
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


def repair_section(record: Record) -> str:
    columns = {"scope": "scope", "s": "seconds:.1f", "peak GiB": "peak_gib:.1f"}
    columns |= {part: f"{part}:.1f" for part in (*PARTS, "other") if any(part in row for row in record["rows"])}
    columns |= {"mask error": "mask_error:.4f", "error": "error:.4f", "iterations of ADMM": "mean_iterations:.0f"}
    return section("Repair: a 7 B model", record, REPAIR, table_of(record["rows"], columns))


SECTIONS = {"repair": repair_section}
