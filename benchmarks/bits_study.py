"""What few bits are worth: models that are dense, sparse or smaller, in 16 bits and in fewer, on held-out data.

A model is made once, and quantised anew to each form. Bits a weight are those that a file needs for the blocks (masks,
codes and scales) over the weights that the blocks of the dense model have. A record is on disk after every figure, and
records of one model become one table of ``bits.md``.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from prunus.eligible import eligible
from prunus.grids import check_on_grid, on_grids
from prunus.trained.model import TrainedModel

from .benchmark import Row
from .bits_forms import FORMS, Form, in_bfloat16, quantised, stored_bits
from .clocks import timed
from .repair_study import changed, started
from .study import Learning, LearningStudy, SeedCase

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
        with in_bfloat16(self.trained.model) as sixteen:
            yield cost | self._figures(sixteen, model) | {"elapsed": time.perf_counter() - begun}
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
