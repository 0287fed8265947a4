"""A run is a value: everything that decides what a training does, without importing torch."""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..files.json_file import read_json
from ..schedule import Constant, OneShot, Ramp, Schedule, check_sparsity, check_step
from ..score import SCORES
from ..select import SELECTORS

if TYPE_CHECKING:
    ScoreName = SelectorName = ModelName = str
else:
    ScoreName, SelectorName = Literal[("none", *SCORES)], Literal[tuple(SELECTORS)]
    GPTS = "gpt2-tiny gpt2-mini gpt2-small8 gpt2 gpt2-medium gpt2-large gpt2-xl"
    ModelName = Literal[tuple(f"{GPTS} lenet5 resnet18 resnet20 resnet50".split())]
TRACKERS = ("wandb", "tensorboard", "trackio")
Parallel = Literal["none", "ddp", "fsdp"]


def is_launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


FROM_ZERO = ("width", "layers", "eval_size", "save_every", "warmup", "lr", "min_lr", "weight_decay", "clip", "eps")
# far beyond use; more would only fill the memory
MOST = {"batch": 2**20, "context": 2**20, "vocab_size": 2**20, "width": 2**15, "layers": 2**10}

DECAY = 0.4  # of the run, where wsd names no decay; run.json does not hold it: another value would change begun runs
MAY_CHANGE = ("out", "parallel")  # when a run is resumed


@dataclass(frozen=True)
class Run:
    """Train a network, pruning it on the way, and write a run folder.

    The folder holds run.json (configuration and environment), metrics.jsonl, checkpoint.pt and, at
    the end, result.json. Interrupt it at any time: --resume continues to the same result, bit for bit.
    On several GPUs or processes: torchrun --nproc-per-node N -m prunus train --parallel fsdp ...
    """

    # what is trained
    model: ModelName = "gpt2-tiny"  # network to train
    width: int = 0  # width of a GPT; 0 takes the model's own
    layers: int = 0  # number of blocks of a GPT; 0 takes the model's own
    data: str = "stdlib"  # "stdlib", "digits", a file of text or uint16 tokens, or a folder of MNIST or CIFAR-10
    validation: Path | None = None  # held-out file; default: the last 5 % of the data
    vocab_size: int | None = None  # vocabulary of a token file; default: its largest token, rounded up
    context: int = 128  # tokens per window
    augment: bool = False  # shift and flip training images

    # how it is pruned
    score: ScoreName = "bitter7"  # what makes a weight matter; none trains densely
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    schedule: Literal["linear", "cubic", "zhu_gupta", "constant", "one_shot"] = "linear"  # how sparsity grows
    begin: int | float = 0.4  # first event: a step, or a fraction of the run if it has a decimal point
    end: int | float = 0.8  # last event of a ramp: a step, or a fraction of the run
    every: int | None = None  # steps from one event to the next; by default a ramp has about 20 events
    allocate: SelectorName = "global"  # how the sparsity is divided: over all weights, by layer, by row or in groups
    include: tuple[str, ...] = ()  # globs over names of weights to prune besides linear and convolution weights
    exclude: tuple[str, ...] = ()  # globs over names of weights to leave dense; wins over the others
    only: tuple[str, ...] = ()  # globs over names: prune no other weights
    regrow: float = 0.0  # fraction of the live weights that an event swaps for pruned ones; falls to 0 over the ramp
    regrow_by: Literal["snr", "momentum", "gradient"] = "snr"  # how to rank the pruned weights that may come back
    rate_power: float = 1.0  # learning rate of a pruned layer times density^-power; 0, or no score: times 1
    replay: str = ""  # dense only: pruned run whose rates to replay: a folder, or a name beside --out, with {seed}
    eps: float | None = None  # added under roots and in denominators of the score (older scripts: 1e-8)
    exponent: float | None = None  # q of the score fisher: |w| v^q

    # how it learns
    optimizer: Literal["adamw", "adamwprune", "adam", "nadam", "sgd"] = "adamw"  # sgd has momentum 0.9
    spam: bool = False  # clip spikes and reset moments (adamwprune only)
    lr: float = 2e-3  # highest learning rate
    lr_schedule: Literal["cosine", "linear", "wsd"] = "wsd"  # how the learning rate falls; wsd: warm-up, stable, decay
    min_lr: float = 0.0  # learning rate at the end, as a fraction of --lr
    decay: int | float | None = None  # wsd only: steps of the fall at the end, or a fraction of the run; default: 0.4
    warmup: int | float = 0.17  # linear warm-up: steps, or a fraction of the run if it has a decimal point
    weight_decay: float = 0.1  # decay of weight matrices
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.99  # decay of the second moment
    clip: float = 1.0  # largest gradient norm; 0 does not clip
    batch: int = 16  # windows or images per forward pass, over all ranks together
    accumulate: int = 1  # forward passes per step
    steps: int = 1000  # optimizer steps
    budget_scale: float = 1.0  # factor on the steps, for arms with a longer budget; the result records it
    seed: int = 0  # initial weights and order of the data

    # how it runs
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 by autocast
    parallel: Parallel = "none"  # under torchrun: the model on every rank (ddp), or a part of each weight (fsdp)
    compile: bool = False  # torch.compile the model
    device: str = "auto"  # cuda where there is one, else cpu
    eval_every: int = 250  # steps between evaluations; the end is always evaluated
    eval_size: int = 256  # held-out windows or images, the first ones; 0 takes all
    save_every: int = 250  # steps between checkpoints; 0 writes only the last
    log_every: int = 10  # steps between lines of metrics.jsonl
    out: Path = Path("runs/latest")  # run folder
    track: tuple[str, ...] = ()  # trackers that get the metrics too: wandb, tensorboard, trackio
    resume: bool = False  # continue the run in --out; other options are taken from its run.json

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        for name in ("steps", "batch", "accumulate", "every", "eval_every", "log_every", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:
                raise ValueError(f"{name} must be at most {most:,}, got {getattr(self, name):,}")
        for name in FROM_ZERO:
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        check_step("warmup", self.warmup)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number of at most 63 bits, got {self.seed}")
        if not 0 < self.budget_scale < math.inf:
            raise ValueError(f"budget_scale must be positive and finite, got {self.budget_scale}")
        self._check_decay()
        if self.spam and self.optimizer != "adamwprune":
            raise ValueError(f"spam is part of adamwprune, not of {self.optimizer}; pass --optimizer adamwprune")
        if self.exponent is not None and self.score != "fisher":
            raise ValueError(f"exponent is for the score fisher, but the score is {self.score}")
        score = SCORES.get(self.score)
        if self.optimizer == "sgd" and score and score.reads_moments:
            raise ValueError(f"{self.score} reads Adam's moments, which sgd does not keep; pass --score magnitude")
        if self.allocate == "2:4" and self.score != "none" and self.schedule not in ("one_shot", "constant"):
            raise ValueError(f"2:4 has one sparsity, not a {self.schedule} ramp; pass --schedule one_shot or constant")
        if self.eps is not None and not (score and score.takes_eps):
            raise ValueError(f"eps is for scores that read moments, bitter0 and bitter3 to bitter9, not {self.score}")
        if not 0 <= self.rate_power <= 2:
            raise ValueError(f"rate_power must lie in [0, 2], got {self.rate_power}")
        if self.replay and self.score != "none":
            raise ValueError(f"replay is for dense runs, but the score is {self.score}; pass --score none")
        self._check_regrowth()
        named = (name for names in self.track for name in names.split(",") if name)
        object.__setattr__(self, "track", tuple(dict.fromkeys(named)))
        if unknown := [name for name in self.track if name not in TRACKERS]:
            raise ValueError(f"there is no tracker {unknown[0]!r}; the trackers are {', '.join(TRACKERS)}")
        if self.score != "none":
            self.sparsity_schedule()

    def _check_decay(self) -> None:
        if self.decay is None:
            return
        if self.lr_schedule != "wsd":
            raise ValueError(f"decay is for wsd, but lr_schedule is {self.lr_schedule}; pass --lr-schedule wsd")
        check_step("decay", self.decay)
        if not self.decay:
            raise ValueError("wsd needs a decay above 0; pass --decay 0.4 to lower lr over the last 40 %")
        if self.step_of(self.warmup) + self.step_of(self.decay) > self.total_steps:
            raise ValueError(
                f"warm-up of {self.step_of(self.warmup)} steps and decay of {self.step_of(self.decay)} must fit into "
                f"the run's {self.total_steps} steps; shorten one of them"
            )

    def _check_regrowth(self) -> None:
        if not 0 <= self.regrow < 1:
            raise ValueError(f"regrow must be a fraction in [0, 1), got {self.regrow}")
        if not self.regrow and self.regrow_by != "snr":
            raise ValueError(f"regrow_by is {self.regrow_by}, but regrow is 0; pass --regrow 0.1")
        if not self.regrow:
            return
        if self.score == "none" or not self.sparsity or self.schedule in ("constant", "one_shot"):
            raise ValueError("regrow needs a score and a ramp to a sparsity above 0: linear, cubic or zhu_gupta")
        if self.allocate == "2:4":
            raise ValueError("regrow works with every allocation except 2:4")
        if self.optimizer == "sgd" and self.regrow_by == "snr":
            raise ValueError("sgd keeps no second moment; pass --regrow-by momentum or gradient")

    def check_launch(self) -> None:
        ranks = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
        if self.parallel == "none" and ranks > 1:
            raise ValueError(
                f"{ranks} ranks were started, but parallel is none; pass --parallel ddp or --parallel fsdp"
            )
        if self.parallel != "none" and not is_launched():
            raise ValueError(
                f"parallel is {self.parallel}, but there is only one process; start it with torchrun --nproc-per-node "
                "N -m prunus train ..., or leave off --parallel"
            )
        if self.batch % ranks:
            raise ValueError(
                f"batch is split over {ranks} ranks, but {self.batch} is not a multiple of that; choose another"
            )

    @property
    def total_steps(self) -> int:
        return round(self.steps * self.budget_scale)

    @property
    def decay_steps(self) -> int:
        """Steps at the end in which lr falls: all after the warm-up, or for wsd as many as ``decay`` says."""
        if self.decay is not None:
            return self.step_of(self.decay)
        after_warmup = max(0, self.total_steps - self.step_of(self.warmup))
        return min(after_warmup, self.step_of(DECAY)) if self.lr_schedule == "wsd" else after_warmup

    @property
    def replayed(self) -> str:
        """What ``replay`` names, with the seed in place of ``{seed}``."""
        return self.replay.replace("{seed}", str(self.seed))

    def step_of(self, moment: int | float) -> int:
        """A step given as such, or as a fraction of the run."""
        return moment if isinstance(moment, int) else round(moment * self.total_steps)

    def sparsity_schedule(self) -> Schedule:
        """The schedule in steps; ValueError where it does not lie within the run."""
        if self.schedule == "constant":
            return Constant(self.sparsity)
        if self.schedule == "one_shot":
            return OneShot(self.sparsity, self.begin).over(self.total_steps)
        return Ramp(self.sparsity, self.begin, self.end, self.schedule).over(self.total_steps)

    @property
    def event_period(self) -> int:
        return self.every or getattr(self.sparsity_schedule(), "period", 1)

    @property
    def choice(self) -> dict[str, Any]:
        return {"include": self.include, "exclude": self.exclude, "only": self.only}

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON holds it, without ``resume``, which does not change the result."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        values.pop("resume")
        return json.loads(json.dumps(values))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Run":
        """The run with these fields; ValueError where one is unknown, missing, or cannot have its value."""
        names = FIELDS.keys() - {"resume"}
        if wrong := values.keys() ^ names:
            name = min(wrong)
            raise ValueError(f"the run {'lacks the field' if name in names else 'has an unknown field'} {name!r}")
        for name, value in values.items():
            check_field(name, value, "the run")
        typed: dict[str, Any] = {name: tuple(values[name]) for name in ("include", "exclude", "only", "track")}
        typed |= {name: Path(values[name]) for name in ("out", "validation") if values[name] is not None}
        return cls(**values | typed)

    def continuing(self, begun: "Run") -> "Run":
        """The run that was begun, to be resumed; ValueError where an option given now contradicts it."""
        default, before = Run().to_json(), begun.to_json()
        for name, value in self.to_json().items():
            if name not in MAY_CHANGE and value not in (default[name], before[name]):
                raise ValueError(
                    f"the run in {self.out} has {name} = {before[name]}, not {value}; a resumed run keeps its options: "
                    "leave it out, or choose another --out"
                )
        parallel = begun.parallel if self.parallel == "none" and is_launched() else self.parallel
        return replace(begun, out=self.out, resume=True, parallel=parallel)

    def check_trained(self, trained: "Run", checkpoint: str) -> None:
        """ValueError where run.json, which this run was read from, is not what a checkpoint was trained with."""
        before = trained.to_json()
        for name, value in self.to_json().items():
            if name not in (*MAY_CHANGE, "device", "track") and value != before[name]:
                raise ValueError(
                    f"{self.out / 'run.json'} says {name} = {value}, but {checkpoint} was trained with {before[name]}; "
                    "restore run.json, or start another run in a new --out"
                )


FIELDS = {  # what each field of a run takes
    name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for name, hint in get_type_hints(Run).items()
}


def check_field(name: str, value: Any, where: str) -> None:
    """ValueError where ``value``, as JSON holds it, is nothing for the field ``name``."""
    for kind in FIELDS[name]:
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif get_origin(kind) is tuple:
            fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        elif kind in (Path, str, bool, NoneType):
            fits = isinstance(value, str if kind is Path else kind)
        else:
            fits = type(value) in (int, kind) and abs(value) < (2**63 if type(value) is int else math.inf)
        if fits:
            return
    choices = [str(c) for kind in FIELDS[name] for c in (get_args(kind) if get_origin(kind) is Literal else (kind,))]
    names = ", ".join(choice.removeprefix("<class '").removesuffix("'>") for choice in choices)
    raise ValueError(f"{where}: {name} cannot be {repr(value)[:60]}; it takes {names}")


def read_run(folder: Path) -> Run:
    path = folder / "run.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no run.json")
    return run_of(read_json(path), path)


def run_of(values: dict[str, Any], path: Path) -> Run:
    if not isinstance(values.get("run"), dict):
        raise ValueError(f"{path} does not describe a run: expected an object with the field 'run'")
    try:
        return Run.from_json(values["run"])
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
