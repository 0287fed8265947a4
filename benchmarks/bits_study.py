"""What few bits are worth: models that are dense, sparse or smaller, in 16 bits and in fewer, on held-out data.

A model is made once, and quantised anew to each form. Bits a weight are those that a file needs for the blocks (masks,
codes and scales) over the weights that the blocks of the dense model have. A record is on disk after every figure, and
records of one model become one table of ``bits.md``.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from unittest import mock

import torch
from torch import nn

from prunus import prune
from prunus.eligible import eligible
from prunus.grids import check_on_grid, grid_of, on_grids
from prunus.oneshot import quantize_step
from prunus.oneshot.quantize import quantized_
from prunus.oneshot.shrink import shrink
from prunus.ops.grid import Grid
from prunus.trained.model import TrainedModel

from .benchmark import Row
from .clocks import timed
from .learning import Learning, LearningStudy, SeedCase
from .repair_study import BY_LAYER, REPAIR
from .study import share_of
from .wanda import their_oneshot

WHAT = "bits quality"
OURS, GPTQ, NEAREST = "GPTQ and descent", "GPTQ", "nearest"  # how weights are rounded
GROUPS = {8: 128, 4: 128, 3: 64, 2: 64}  # bits: columns that share a scale
SCALE_BITS = PLAIN_BITS = 16  # of a scale, and of a weight that has no code


@dataclass(frozen=True)
class Form:
    """How weights are stored: codes of ``bits`` bits, and a scale for ``group`` columns of a row."""

    bits: int
    group: int = 128
    rounding: str = OURS
    learns: bool = False  # the scales, afterwards
    peer: str = ""  # the package that quantises in our place

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group)


FORMS: dict[str, Form] = {
    **{f"{bits}": Form(bits, group) for bits, group in GROUPS.items()},
    **{f"{bits}-gptq": Form(bits, group, GPTQ) for bits, group in GROUPS.items()},
    **{f"{bits}-nearest": Form(bits, group, NEAREST) for bits, group in GROUPS.items()},
    "3-128": Form(3),
    "4-scales": Form(4, rounding=f"{OURS}, scales recovered", learns=True),
    "4-llmcompressor": Form(4, rounding="GPTQ of llm-compressor", peer="llmcompressor"),
    "4-torchao": Form(4, rounding="nearest of torchao", peer="torchao"),
}


@dataclass(frozen=True)
class BitsWay:
    """A model to quantise: what it starts from, and whether it learns from the dense one."""

    start: str
    title: str
    learns: bool = False


WAYS: dict[str, BitsWay] = {
    "dense": BitsWay("dense", "dense"),
    "repair": BitsWay("repair", "pruned and repaired"),
    "recover": BitsWay("repair", "pruned, repaired and recovered", learns=True),
    "trained": BitsWay("trained", "pruned while training"),
    "trained-recover": BitsWay("trained", "pruned while training, recovered", learns=True),
    "shrink": BitsWay("shrink", "shrunk and tuned"),
    "shrink-recover": BitsWay("shrink", "shrunk, tuned and recovered", learns=True),
    "small": BitsWay("small", "smaller from the start"),
}
SPARSE = ("repair", "trained")  # starts whose zeros a file marks by a bit a weight
if TYPE_CHECKING:
    WayName = FormName = str
else:
    WayName, FormName = Literal[tuple(WAYS)], Literal[tuple(FORMS)]


@dataclass(frozen=True, kw_only=True)
class BitsQuality(LearningStudy):
    """Quantise models that are dense, sparse or smaller, and evaluate each on held-out data, over several seeds.

    --model is a checkpoint of prunus, which knows its data ({seed} stands for the seed); or a Hugging Face folder, with
    --tokens and --eval-tokens, and to learn --train-tokens and --held-out-tokens. The record is written after every
    figure, and the same command continues it. Quantisers of other packages are left out where these are not installed.
    """

    what: ClassVar[str] = WHAT

    ways: tuple[WayName, ...] = ("dense", "repair", "recover", "shrink", "shrink-recover")  # what is quantised
    bits: tuple[FormName, ...] = ("8", "4", "4-nearest")  # to what, beside 16 bits
    levels: tuple[str, ...] = ("50", "80", "90")  # percent of the weights that are pruned
    removed: tuple[str, ...] = ("25", "50")  # percent of the blocks' weights that smaller models lack
    pruned: Path | None = None  # checkpoint of a run that pruned while training; {level} stands for the percent
    small: Path | None = None  # checkpoint of a smaller model; {level} stands for the percent that it lacks

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        """The dense model is always evaluated."""
        runs: dict[tuple[str, str], list[Learning]] = {("dense", ""): []}
        for name in self.ways:
            way = WAYS[name]
            for level in self._levels(way.start):
                here = runs.setdefault((way.start, level), [])
                for steps in self.steps if way.learns else (0,):
                    here += [Learning(name, level, steps)] if way.learns else []
                    here += [Learning(f"{name} {form}", level, steps) for form in self.bits if self._fits(form, way)]
        return runs

    def _levels(self, start: str) -> tuple[str, ...]:
        return ("",) if start == "dense" else self.levels if start in SPARSE else self.removed

    def _fits(self, form: str, way: BitsWay) -> bool:
        """Other packages quantise what is not sparse."""
        return not FORMS[form].peer or (way.start not in SPARSE and not way.learns)

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        with self._started(case, start, level) as (trained, seconds):
            quantising = Quantising(case, trained, start in SPARSE, max(self.steps))
            plain = {(start, 0): Learning(start, level, 0)}
            models = plain | {key: Learning(key[0], level, key[1]) for key in map(_model_of, runs)}
            for key, model in models.items():
                forms = [run.way.partition(" ")[2] for run in runs if _model_of(run) == key and " " in run.way]
                with ExitStack() as stack:
                    cost: Row = {"seconds": seconds}
                    if WAYS[model.way].learns:
                        cost = stack.enter_context(case.recovered(trained.model, model)).figures()
                    yield from quantising.rows(model, forms, cost | {"steps": model.steps})

    @contextmanager
    def _started(self, case: SeedCase, start: str, level: str) -> Iterator[tuple[TrainedModel, float]]:
        """The model to start from, and the seconds that it took; afterwards a dense one is as before."""
        trained, device = case.trained, torch.device(self.device)
        if start in ("trained", "small"):
            path = self.pruned if start == "trained" else self.small
            if path is None:
                raise ValueError(f"{start} needs {'--pruned' if start == 'trained' else '--small'}, a checkpoint")
            yield case.load(Path(str(path).replace("{level}", level))), 0.0
            return
        make = {"dense": None, "repair": _prune, "shrink": _shrink}[start]
        seconds, result = timed(lambda: make(trained, float(share_of(level))), device) if make else (0.0, None)
        try:
            yield trained, seconds
        finally:
            if result is not None:
                result.undo_()

    def count(self, row: Row) -> str:
        return f"{row['bits_a_weight']:.3f} bits a weight"


def _model_of(run: Learning) -> tuple[str, int]:
    return run.way.partition(" ")[0], run.steps


def _prune(trained: TrainedModel, share: float) -> Any:
    settings: dict[str, Any] = {"score": None, "select": BY_LAYER, "repair": REPAIR, "loss": trained.loss}
    return prune(trained.model, trained.batches, share, **settings, progress=False)


def _shrink(trained: TrainedModel, share: float) -> Any:
    return shrink(trained.model, trained.batches, size=1 - share, tune=True, progress=False)


# Quantising and counting


@dataclass
class Quantising:
    """One model in 16 bits and in each form, evaluated."""

    case: SeedCase
    trained: TrainedModel
    has_mask: bool
    steps: int  # in which scales learn

    def rows(self, model: Learning, forms: Sequence[str], cost: Row) -> Iterator[Row]:
        begun = time.perf_counter()
        about = {"way": model.way, "level": model.level, "steps": model.steps, "metric": self.trained.metric}
        with in_bfloat16(self.trained.model) as sixteen:
            yield cost | about | self._figures(sixteen) | {"elapsed": time.perf_counter() - begun}
        for name in forms:
            form, begun = FORMS[name], time.perf_counter()
            if form.peer and not (find_spec(form.peer) and hasattr(self.trained.model, "config")):
                needed = f"the package {form.peer} and a Hugging Face model"
                print(f"{model.way} {name}: left out, since it needs {needed}", flush=True)
                continue
            with self._quantised(form) as (quantised, seconds), ExitStack() as stack:
                row: Row = about | {"way": f"{model.way} {name}", "seconds": seconds}
                if form.learns:
                    learning = self.case.recovered(quantised, Learning(row["way"], model.level, self.steps))
                    row |= stack.enter_context(learning).figures() | {"steps": model.steps, "scale_steps": self.steps}
                    for weight, on_grid in on_grids(quantised).items():
                        check_on_grid(weight, quantised.get_parameter(weight), on_grid)
                row |= {form.peer: metadata.version(form.peer)} if form.peer else {}
                yield row | self._figures(quantised, form) | {"elapsed": time.perf_counter() - begun}

    @contextmanager
    def _quantised(self, form: Form) -> Iterator[tuple[nn.Module, float]]:
        """The model in that form, and the seconds that it took; afterwards it is as before."""
        model, batches = self.trained.model, self.trained.batches if form.rounding != NEAREST else []
        device = torch.device(self.case.options.device)
        if form.peer:
            seconds, theirs = timed(lambda: PEERS[form.peer](deepcopy(model), self.trained.batches), device)
            yield theirs, seconds
            return
        with plain_gptq() if form.rounding == GPTQ else nullcontext():
            seconds, undo = timed(lambda: quantize_model(model, batches, form.grid, self.has_mask), device)
        try:
            yield model, seconds
        finally:
            undo()

    def _figures(self, model: nn.Module, form: Form | None = None) -> Row:
        stored = stored_bits(model, self.has_mask, form.grid if form and form.peer else None)
        num = sum(weight.parameter.numel() for weight in eligible(self.case.dense).weights)
        total = stored["mask_bits"] + stored["code_bits"] + stored["scale_bits"]
        sizes = {"num_weights": num, "num_bytes": total / 8, "bits_a_weight": total / num}
        return {"value": self.trained.evaluate(model)} | stored | sizes


def stored_bits(model: nn.Module, has_mask: bool, others: Grid | None = None) -> dict[str, int]:
    """What the weights of the blocks take in a file; ``others`` is the grid of weights for which none is noted."""
    bits = {"kept": 0, "mask_bits": 0, "code_bits": 0, "scale_bits": 0}
    for weight in eligible(model).weights:
        num, on_grid = weight.parameter.numel(), grid_of(weight.module, weight.name.rpartition(".")[2])
        kept = int(weight.parameter.count_nonzero()) if has_mask else num
        grid = on_grid.grid if on_grid else others
        bits["kept"] += kept
        bits["mask_bits"] += num if has_mask else 0
        bits["code_bits"] += kept * (grid.bits if grid else PLAIN_BITS)
        bits["scale_bits"] += SCALE_BITS * math.prod(grid.scales_shape(weight.parameter.shape)) if grid else 0
    return bits


@contextmanager
@torch.no_grad()
def in_bfloat16(model: nn.Module) -> Iterator[nn.Module]:
    """The weights of the blocks are rounded to bfloat16; afterwards they are as before."""
    weights = [weight.parameter for weight in eligible(model).weights]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.copy_(weight.bfloat16())
    try:
        yield model
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


@torch.no_grad()
def quantize_model(model: nn.Module, batches: Sequence[Any], grid: Grid, has_mask: bool) -> Callable[[], None]:
    """Quantise the blocks in place, without batches to the nearest value; returns what undoes it.

    Without a mask no zero can be stored: zeros become the smallest numbers, and get codes as others do.
    """
    weights = [weight.parameter for weight in eligible(model).weights]
    zeros = [] if has_mask else [(weight, weight == 0) for weight in weights]
    for weight, where in zeros:
        weight[where] = torch.finfo(weight.dtype).tiny
    result = quantized_(model, batches, grid, progress=False)

    @torch.no_grad()
    def undo() -> None:
        result.undo_()
        for weight, where in zeros:
            weight[where] = 0

    return undo


def plain_gptq() -> AbstractContextManager[Any]:
    """Without the descent that follows GPTQ."""
    return mock.patch.object(quantize_step, "descended", lambda weight, values, scales, *rest: (values, scales))


# Other packages


def _by_llmcompressor(model: nn.Module, batches: Sequence[Any]) -> nn.Module:
    from llmcompressor.modifiers.gptq import GPTQModifier

    recipe = GPTQModifier(scheme="W4A16", targets=["Linear"], ignore=["re:.*lm_head"])
    their_oneshot(model, batches[0], recipe, "sequential")
    return model


def _by_torchao(model: nn.Module, batches: Sequence[Any]) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    blocks = {id(weight.module) for weight in eligible(model).weights}
    int4 = torch.int4  # pyrefly: ignore[missing-attribute]
    config = IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(128))
    quantize_(model, config, filter_fn=lambda module, name: id(module) in blocks)
    return model


PEERS = {"llmcompressor": _by_llmcompressor, "torchao": _by_torchao}
