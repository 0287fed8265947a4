"""What pruning with repair costs: on a random model of Mistral-7B's shape, and on a trained one.

The weights of the first are random: it says nothing about quality, which ``repair_study`` measures.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import prunus
from prunus import NofM, PerLayer, PerRow, prune
from prunus.ops.machine import device_of
from prunus.trained.model import ModelSource, load_trained

from .benchmark import Benchmark, Measured, Row, timed
from .prune import MISTRAL, ProbeLevel

SCOPES = {"layer": PerLayer(), "row": PerRow(), "2:4": NofM(2, 4)}
PARTS = ("forwards", "grams", "factorisations", "iterations", "refine", "tune")


@dataclass(frozen=True, kw_only=True)
class RepairTime(Benchmark):
    """Time repair, part by part, on a random model of Mistral-7B's shape, or with --model on a trained one."""

    blocks: int = 32  # blocks of the random model
    model: Path | None = None  # Hugging Face folder of a trained model instead
    tokens: Path | None = None  # uint16 tokens to calibrate it on
    windows: int = 128  # calibration windows
    length: int = 2048  # tokens of each
    sparsity: float = 0.5  # fraction removed
    scope: Literal["layer", "row", "2:4"] = "layer"  # where weights are compared with each other
    iterations: int = 300  # of ADMM, at most
    refine: int = 10  # steps of conjugate gradients, at most
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
            size = ProbeLevel(blocks=self.blocks, windows=self.windows, length=self.length, device=self.device)
            model, tokens = size.model_and_tokens()  # on the device, where that is quick
            model, tokens = model.to(place), tokens.to(place)
            about = f"{self.blocks} blocks of Mistral-7B's shape"
        parameters = list(model.parameters())
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        options = ["tune" if self.whole else "tune blocks"] * self.tune + ["offload"] * self.offload
        settings = {"weights": ", ".join([about, *options]), "model": about, "dtype": dtype}
        settings |= {"windows": self.windows, "length": self.length, "sparsity": self.sparsity, "scope": self.scope}
        settings |= {"refine": self.refine, "tune": self.tune, "whole": self.whole, "offload": self.offload}
        settings |= {} if self.model else {"blocks": self.blocks, **MISTRAL}
        settings |= {"num_weights": sum(p.numel() for p in parameters)}
        tune = self.tune and (prunus.BlockTuning() if self.whole else prunus.BlockTuning(whole_epochs=0))
        repair = prunus.Repair(iterations=self.iterations, refine=self.refine, tune=tune)
        row = measure_repair(model, tokens, self.sparsity, self.scope, repair, device if self.offload else None)
        return "repair", settings, [row]


def measure_repair(
    model: Any, tokens: Tensor, sparsity: float, scope: str, repair: prunus.Repair, offload: torch.device | None
) -> Row:
    """Seconds by part, peak memory and errors of one repair; the model comes back as it was."""
    cpu = time.process_time()
    seconds, result = timed(
        lambda: prune(model, [tokens], sparsity, select=SCOPES[scope], repair=repair, offload=offload),
        offload or tokens.device,
    )
    cpu = time.process_time() - cpu
    row = {"scope": scope, "seconds": seconds, "cpu_seconds": cpu}
    row |= {"peak_gib": result.cost.peak_bytes / 2**30, "sparsity": result.sparsity}
    parts = {part: result.cost.parts[part] for part in PARTS if part in result.cost.parts}
    row |= parts | {"other": seconds - sum(parts.values())}
    errors = [(layer.mask_error, layer.error) for layer in result.layers if layer.error is not None]
    for name, values in zip(("mask_error", "error"), zip(*errors, strict=True), strict=True):
        row[name] = sum(values) / len(values)
    repairs = result.level.repairs.values()
    row["mean_iterations"] = sum(found.iterations for found in repairs) / len(repairs)
    result.undo_()
    return row
