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
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
from torch import nn

from prunus.eligible import eligible
from prunus.grids import check_on_grid, grid_of, on_grids
from prunus.oneshot import quantize, quantizer
from prunus.oneshot.forward import swapped
from prunus.ops.grid import Grid
from prunus.trained.model import TrainedModel

from .benchmark import Row
from .clocks import timed
from .repair_study import changed, started
from .study import Learning, LearningStudy, SeedCase
from .wanda import their_oneshot

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
    together: bool = False  # with pruning, layer by layer, by prune(bits=)

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group)


FORMS: dict[str, Form] = {
    **{f"{bits}": Form(bits, group) for bits, group in GROUPS.items()},
    **{f"{bits}-gptq": Form(bits, group, GPTQ) for bits, group in GROUPS.items()},
    **{f"{bits}-nearest": Form(bits, group, NEAREST) for bits, group in GROUPS.items()},
    "3-128": Form(3),
    "4-32": Form(4, 32, f"{OURS}, groups of 32"),
    "4-32-nearest": Form(4, 32, f"{NEAREST}, groups of 32"),
    **{f"{bits}-together": Form(bits, rounding=f"{OURS}, while pruning", together=True) for bits in (8, 4, 3)},
    "4-scales": Form(4, rounding=f"{OURS}, scales recovered", learns=True),
    "4-llmcompressor": Form(4, 32, "GPTQ of llm-compressor, groups of 32", peer="llmcompressor"),
    **{f"{bits}-torchao": Form(bits, rounding="nearest of torchao", peer="torchao") for bits in (8, 4)},
}


@contextmanager
def quantised(
    model: nn.Module, batches: Sequence[Any], form: Form, has_mask: bool
) -> Iterator[tuple[nn.Module, float]]:
    """The model in a form, or a copy by another package, and the seconds that it took; afterwards it is as before."""
    device = next(model.parameters()).device
    if form.peer:
        seconds, theirs = timed(lambda: PEERS[form.peer](deepcopy(model), batches, form), device)
        yield theirs, seconds
        return
    read = [] if form.rounding.startswith(NEAREST) else batches
    plain = mock.patch.object(quantizer, "descended", lambda weight, values, scales, *rest: (values, scales))
    with plain if form.rounding == GPTQ else nullcontext():  # without the descent that follows GPTQ
        seconds, undo = timed(lambda: quantize_model(model, read, form.grid, has_mask), device)
    try:
        yield model, seconds
    finally:
        undo()


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


def in_bfloat16(model: nn.Module) -> AbstractContextManager[None]:
    """The weights of the blocks are rounded to bfloat16; afterwards they are as before."""
    weights = [weight.parameter for weight in eligible(model).weights]
    return swapped({weight: weight.data.bfloat16().to(weight.dtype) for weight in weights})


@torch.no_grad()
def quantize_model(model: nn.Module, batches: Sequence[Any], grid: Grid, has_mask: bool) -> Callable[[], None]:
    """Quantise the blocks in place, without batches to the nearest value; returns what undoes it.

    Without a mask no zero can be stored: zeros become the smallest numbers, and get codes as others do.
    """
    weights = [weight.parameter for weight in eligible(model).weights]
    zeros = [] if has_mask else [(weight, weight == 0) for weight in weights]
    for weight, where in zeros:
        weight[where] = torch.finfo(weight.dtype).tiny
    result = quantize(model, batches, grid, progress=False)

    @torch.no_grad()
    def undo() -> None:
        result.undo_()
        for weight, where in zeros:
            weight[where] = 0

    return undo


# Other packages


def _by_llmcompressor(model: nn.Module, batches: Sequence[Any], form: Form) -> nn.Module:
    # groups of 32 columns: it refuses rows that no group divides, and few models have a multiple of 128
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    their_oneshot(model, batches[0], "GPTQModifier", **groups)
    return model


def _by_torchao(model: nn.Module, batches: Sequence[Any], form: Form) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    blocks = {id(weight.module) for weight in eligible(model).weights}
    kind = getattr(torch, f"int{form.bits}")
    config = IntxWeightOnlyConfig(weight_dtype=kind, granularity=PerGroup(form.group))
    quantize_(model, config, filter_fn=lambda module, name: id(module) in blocks)
    return model


PEERS = {"llmcompressor": _by_llmcompressor, "torchao": _by_torchao}


WHAT = "bits quality"


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
WayName = Literal[tuple(WAYS)]  # pyrefly: ignore[invalid-literal]
FormName = Literal[tuple(FORMS)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class BitsQuality(LearningStudy):
    """Quantise models that are dense, sparse or smaller, and evaluate each on held-out data, over several seeds.

    The record is written after every figure, and the same command continues it. Quantisers of other packages are left
    out where these are not installed.
    """

    what: ClassVar[str] = WHAT

    ways: tuple[WayName, ...] = ("dense", "repair", "recover", "shrink", "shrink-recover")  # what is quantised
    bits: tuple[FormName, ...] = ("8", "4", "4-nearest")  # to what, beside 16 bits
    levels: tuple[str, ...] = ("50", "80", "90")  # percent of the weights that are pruned
    removed: tuple[str, ...] = ("25", "50")  # percent of the blocks' weights that smaller models lack
    pruned: Path | None = None  # checkpoint of a run that pruned while training; {level} stands for the percent
    small: Path | None = None  # checkpoint of a smaller model; {level} stands for the percent that it lacks

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        runs: dict[tuple[str, str], list[Learning]] = {}
        for name in self.ways:
            way = WAYS[name]
            levels = ("",) if way.start == "dense" else self.levels if way.start in SPARSE else self.removed
            for level, steps in product(levels, self.steps if way.learns else (0,)):
                here = runs.setdefault((way.start, level), [])
                here += [Learning(name, level, steps)] if way.learns else []
                here += [Learning(f"{name} {form}", level, steps) for form in self.bits if _fits(FORMS[form], way)]
        return runs

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        with started(case, start, level, {"trained": self.pruned, "small": self.small}) as (trained, took, pruned):
            quantising = Quantising(case, trained, start in SPARSE, max(self.steps), pruned)
            models = dict.fromkeys([Learning(start, level, 0), *map(_model_of, runs)])
            for model in models:
                forms = [run.way.partition(" ")[2] for run in runs if _model_of(run) == model and " " in run.way]
                with ExitStack() as stack:
                    cost: Row = {"seconds": took["seconds"]}
                    if WAYS[model.way].learns:
                        cost = stack.enter_context(case.recovered(trained.model, model)).figures()
                    yield from quantising.rows(model, forms, cost)

    def count(self, row: Row) -> str:
        return f"{row['bits_a_weight']:.3f} bits a weight"


def _fits(form: Form, way: BitsWay) -> bool:
    """Other packages quantise what is not sparse, and prune(bits=) what it prunes."""
    if form.together:
        return way is WAYS["repair"]
    return not form.peer or (way.start not in SPARSE and not way.learns)


def _model_of(run: Learning) -> Learning:
    return run._replace(way=run.way.partition(" ")[0])


@contextmanager
def _together(trained: TrainedModel, pruned: Any, level: str, bits: int) -> Iterator[tuple[nn.Module, float]]:
    """The model pruned and quantised in one loop, and the seconds; afterwards it is pruned alone, as before."""
    pruned.undo_()
    device = next(trained.model.parameters()).device
    seconds, both = timed(lambda: changed(trained, "repair", level, bits), device)
    try:
        yield trained.model, seconds
    finally:
        both.undo_()
        pruned.apply_()


@dataclass
class Quantising:
    """One model in 16 bits and in each form, evaluated."""

    case: SeedCase
    trained: TrainedModel
    has_mask: bool
    steps: int  # in which scales learn
    pruned: Any = None  # what pruning did to the model

    def rows(self, model: Learning, forms: Sequence[str], cost: Row) -> Iterator[Row]:
        begun = time.perf_counter()
        with in_bfloat16(self.trained.model):
            yield cost | self._figures(self.trained.model, model) | {"elapsed": time.perf_counter() - begun}
        for name in forms:
            form, begun = FORMS[name], time.perf_counter()
            if form.peer and not (find_spec(form.peer) and hasattr(self.trained.model, "config")):
                needed = f"the package {form.peer} and a Hugging Face model"
                print(f"{model.way} {name}: left out, since it needs {needed}", flush=True)
                continue
            way = quantised(self.trained.model, self.trained.batches, form, self.has_mask)
            if form.together:
                way = _together(self.trained, self.pruned, model.level, form.bits)
            run = model._replace(way=f"{model.way} {name}")
            with way as (stored, seconds), ExitStack() as stack:
                row: Row = {"seconds": seconds}
                if form.learns:
                    learning = self.case.recovered(stored, run._replace(steps=self.steps))
                    row |= stack.enter_context(learning).figures() | {"scale_steps": self.steps}
                    for weight, on_grid in on_grids(stored).items():
                        check_on_grid(weight, stored.get_parameter(weight), on_grid)
                row |= {form.peer: metadata.version(form.peer)} if form.peer else {}
                yield row | self._figures(stored, run, form) | {"elapsed": time.perf_counter() - begun}

    def _figures(self, model: nn.Module, run: Learning, form: Form | None = None) -> Row:
        is_theirs = form is not None and bool(form.peer)
        counted = self.trained.model if is_theirs else model  # their layers are of other kinds
        stored = stored_bits(counted, self.has_mask, form.grid if form and is_theirs else None)
        num = sum(weight.parameter.numel() for weight in eligible(self.case.dense).weights)
        total = stored["mask_bits"] + stored["code_bits"] + stored["scale_bits"]
        sizes = {"num_weights": num, "num_bytes": total / 8, "bits_a_weight": total / num}
        return self.case.evaluated(replace(self.trained, model=model), *run) | stored | sizes
