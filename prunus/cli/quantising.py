"""How ``prunus prune --bits`` and ``prunus export --bits`` put the kept weights of a model onto a grid of few bits."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ..export.huggingface import LOAD_STATE
from ..files.writer import Saved
from ..lab.trained_run import from_checkpoint
from ..oneshot import QuantizeResult, quantize
from ..oneshot.level import Level
from ..oneshot.originals import Originals
from ..trained.model import TrainedModel, load_without_data
from .console import print, wide_console
from .model_options import ModelCommand
from .model_work import (
    Measure,
    cost_figures,
    is_to_do,
    loaded,
    offload_device,
    patterns_of,
    print_written,
    publish,
    source_of,
    sparsity_report,
    working,
    write_folder,
)
from .prune_tables import models_table, quantised_table
from .shared_options import Bits


@dataclass(frozen=True, kw_only=True)
class Quantising(ModelCommand):
    """What ``prunus export --bits`` does, as a command that changes a model and writes it to a new folder."""

    name: ClassVar[str] = "export"

    bits: Bits
    samples: int | None = None

    @property
    def has_data(self) -> bool:
        """Whether there are samples: those of an option, or those of the run that trained the model."""
        return bool(self.text or self.tokens or self.batches) or not (Path(self.model) / "config.json").is_file()


def export(command: Quantising) -> None:
    if not is_to_do(command):
        return
    with working(command):
        if command.has_data:
            trained, _ = loaded(command, from_checkpoint)
        else:
            trained = load_without_data(source_of(command), Path(command.model))
            print(
                "Each weight is rounded to the nearest value; --text, --tokens or --batches to calibrate on lose less."
            )
        warn_if_dense(command, trained.model)
        measure = Measure(command, trained)
        rows = {"as it came": measure()} if command.has_data else {}
        result = quantised(command, trained, command.bits)
        rows |= {f"in {command.bits} bits": measure()} if command.has_data else {}
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in result.layers]
        figures = {"rows": rows, "layers": layers, "bits_a_weight": result.level.bits_a_weight}
        saved = write_folder(command, trained, figures | cost_figures(result.cost, None), small=True, of_prunable=True)
    assert saved is not None
    console = wide_console()
    console.print(quantised_table(result, {row.name: row for row in saved.rows}, console.width))
    if rows:
        console.print(models_table(rows, trained.metric))
    print(*result.notes)
    print_bits(command, command.bits, result.level, saved)
    print_written(command, result.cost, None, "quantised")
    publish(command)


def quantised(command: ModelCommand, trained: TrainedModel, bits: int) -> QuantizeResult:
    """What was done to the model, without the values that it had before; killed, the same call goes on."""
    how: dict[str, Any] = {"batch_size": command.batch or None, **patterns_of(command)}
    how |= {"offload": offload_device(command, trained)}
    result = quantize(trained.model, trained.batches, bits, state=command.unfinished / "bits", **how)
    result.level.originals = Originals()
    return result


def warn_if_dense(command: ModelCommand, model: nn.Module) -> None:
    """Name the tools for dense models in few bits, for which there is no small file here."""
    if not sparsity_report(command, model).sparsity:
        print(
            f"{command.model} has no zeros: to quantise dense models, use torchao, llm-compressor or llama.cpp.",
            "It is quantised for comparison; its file is not smaller than without --bits.",
        )


def print_bits(command: ModelCommand, bits: int, level: Level, saved: Saved) -> None:
    of = "" if len(level.grids) == len(level.weights) else f" in {len(level.grids)} of {len(level.weights)} layers"
    size, dense = sum((command.out / path.name).stat().st_size for path in saved.files), saved.dense_bytes
    if size < dense:  # a dense model has no codes in its file
        print(f"{bits} bits a kept weight{of}; with masks and scales {level.bits_a_weight:.2f} bits a weight")
    print(f"{command.out}: {dense:,} bytes of weights became {size:,} ({size / max(1, dense):.4f})")
    if not any((command.out / name).is_file() for name in ("config.json", "run.json")):
        print(f"Build the model, then load the weights: {LOAD_STATE.format(folder=command.out)}")
