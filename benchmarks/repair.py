"""What pruning with repair costs: on a random model of Mistral-7B's shape, and on a trained one.

The weights of the first are random: it says nothing about quality, which ``repair_study`` measures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import prunus
from prunus import prune
from prunus.oneshot.changed import ChangedModel
from prunus.ops.machine import device_of
from prunus.trained.model import ModelSource, load_trained

from .benchmark import SPARSITY, Benchmark, Measured, Row, random_llama
from .clocks import timed
from .prune import MISTRAL

Changed = TypeVar("Changed", bound=ChangedModel)
PARTS = ("forwards", "grams", "factorisations", "iterations", "refine", "tune")


@dataclass(frozen=True, kw_only=True)
class RepairTime(Benchmark):
    """Time repair, part by part, on a random model of Mistral-7B's shape, or with --model on a trained one."""

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
            model, tokens = random_llama(MISTRAL, self.blocks, (self.windows, self.length), device)
            model, tokens = model.to(place), tokens.to(place)
            about = f"{self.blocks} blocks of Mistral-7B's shape"
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
