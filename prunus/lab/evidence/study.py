"""The study of one model and one calibration seed; each finished step is on disk before the next begins."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ...oneshot import Probe
from ...oneshot.prune import Job, Plan
from ...oneshot.result import Result
from ...select import Global, PerLayer, PerRow, Selector
from ..files import write_json
from ..tracking import environment
from ..trained_model import TrainedModel
from .cases import Case
from .masks import Masks, drawn, exactly, pruned_by, replaced_veto, share_beyond, vetoed_by_lot

STRATEGIES: dict[str, tuple[str, Selector]] = {
    "magnitude, global": ("magnitude", Global()),
    "magnitude, layer": ("magnitude", PerLayer()),
    "WANDA, row": ("wanda", PerRow()),
    "WANDA, layer": ("wanda", PerLayer()),
}
UNPROBED: dict[str, tuple[str, Selector]] = {"fisher, global": ("fisher", Global()), "path, global": ("path", Global())}
RANDOM = "random"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Design:
    """What is asked of every model."""

    levels: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7)
    taus: tuple[float, ...] = (0.5, 1.0, 5.0)


@dataclass(frozen=True)
class Row:
    """One model that was evaluated.

    ``way`` is how it came about: ``alone``, by the strategy; ``probed``, by the probe as it is defined, with
    ``alone, as sparse`` and ``by lot`` beside it; ``exact`` and ``target``, by the probe at the very sparsity.
    """

    strategy: str
    level: float
    way: str
    tau: float | None
    sparsity: float
    value: float | None  # None: not a finite number
    beyond: float | None = None  # exact: fraction of the pruned that tau would have kept


class Study:
    """Rows of one case and seed, in a file that an interrupted run takes up again."""

    def __init__(self, case: Case, design: Design, seed: int, folder: Path) -> None:
        self.case, self.design, self.seed = case, design, seed
        self.path = folder / f"probe_{case.name.lower()}_seed{seed}.json"
        settings = {"case": case.name, "about": case.about, "seed": seed, **case.settings}
        self.settings = settings | {"levels": list(design.levels), "taus": list(design.taus)}
        self.content = self._taken_up()

    def _taken_up(self) -> dict[str, Any]:
        if not self.path.is_file():
            about = {"what": "probe evidence", "settings": self.settings, "num_steps": len(self.steps)}
            about |= {"done": {}, "rows": []}
            return about | {"date": str(date.today()), "environment": environment()}
        before = json.loads(self.path.read_text())
        for name, value in self.settings.items():
            if before["settings"].get(name) != value:
                raise ValueError(
                    f"{self.path} has {name} = {before['settings'].get(name)}, not {value}; give another --results"
                )
        return before

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Strategy and what is done with it, a step each."""
        found = [(RANDOM, f"{level}") for level in (0.0, *self.design.levels)]
        for strategy in (*STRATEGIES, *UNPROBED):
            ways = ("alone", "exact", "probed") if strategy in STRATEGIES else ("alone",)
            found += [(strategy, f"{way} {level}") for level in self.design.levels for way in ways]
        return found

    def left(self, strategy: str) -> list[str]:
        """What of a strategy is still to be done."""
        return [step for which, step in self.steps if which == strategy and f"{which}: {step}" not in self.done]

    @property
    def done(self) -> dict[str, float]:
        return self.content["done"]

    @property
    def finished(self) -> bool:
        return len(self.done) == len(self.steps)

    def run(self, load: Callable[[], TrainedModel], say: Say) -> None:
        """Do what is left; ``load`` gives the model, where there is something left."""
        if self.finished:
            return
        subject = load()
        self.content["metric"] = subject.metric
        for strategy in (RANDOM, *STRATEGIES, *UNPROBED):
            if left := self.left(strategy):
                score, select = (STRATEGIES | UNPROBED).get(strategy, ("magnitude", Global()))
                job = Job(subject.model, subject.batches, Plan(score, select, subject.loss))
                with job.open():
                    arm = Arm(self, strategy, select, job, subject)
                    for step in left:
                        self._step(arm, step, say)

    def _step(self, arm: "Arm", step: str, say: Say) -> None:
        began = time.perf_counter()
        self.content["rows"] += [asdict(row) for row in arm.rows(step)]
        self.done[f"{arm.strategy}: {step}"] = round(time.perf_counter() - began, 3)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)
        say(f"{self.case.name}, seed {self.seed}: {len(self.done)} of {len(self.steps)}, {arm.strategy} {step}")


@dataclass
class Arm:
    """One strategy on one model, which is dense between the steps."""

    study: Study
    strategy: str
    select: Selector
    job: Job
    subject: TrainedModel

    def rows(self, step: str) -> Iterator[Row]:
        way, _, level = step.rpartition(" ")
        return getattr(self, f"_{way or 'random'}")(float(level))

    def _row(self, level: float, way: str, sparsity: float, tau: float | None = None) -> Row:
        value = self.subject.evaluate(self.subject.model)
        return Row(self.strategy, level, way, tau, sparsity, value if math.isfinite(value) else None)

    def _random(self, level: float) -> Iterator[Row]:
        yield self._by(drawn(list(self.job.weights.values()), level, self._generator()), level, "alone")

    def _alone(self, level: float) -> Iterator[Row]:
        with self._pruned(level) as result:
            yield self._row(level, "alone", result.sparsity)

    def _exact(self, level: float) -> Iterator[Row]:
        """The probe of more candidates than are needed, all at once, for every tau; and tau by the sparsity."""
        with self._pruned(level, Probe("target", schedule="joint")) as result:
            yield self._row(level, "target", result.sparsity)
        sources = self.job.strategy.sources(level, {})
        for tau in self.study.design.taus:
            masks = replaced_veto(result, sources, tau, self.select, level)
            yield replace(self._by(masks, level, "exact", tau), beyond=share_beyond(result, masks, tau))

    def _probed(self, level: float) -> Iterator[Row]:
        """The probe as it is defined; joint ratios serve every tau, others are recorded for each."""
        schedule, taus = self.study.case.schedule, self.study.design.taus
        if schedule != "joint":
            for tau in taus:
                with self._pruned(level, Probe(tau, schedule=schedule)) as result:
                    yield self._row(level, "probed", result.sparsity, tau)
                yield from self._beside(result, level, tau)
            return
        with self._pruned(level, Probe(taus[0], schedule=schedule)) as result:
            pass
        for tau in taus:
            result.retake_(tau)
            yield self._row(level, "probed", result.sparsity, tau)
            self.job.undo_(result.originals)
            yield from self._beside(result, level, tau)

    def _beside(self, result: Result, level: float, tau: float) -> Iterator[Row]:
        """The strategy alone and a veto by lot, as sparse as the probe left the model."""
        yield self._by(exactly(self.job, result.sparsity, self._generator()), level, "alone, as sparse", tau)
        yield self._by(vetoed_by_lot(result, self._generator()), level, "by lot", tau)

    def _by(self, masks: Masks, level: float, way: str, tau: float | None = None) -> Row:
        with pruned_by(self.job, masks) as sparsity:
            return self._row(level, way, sparsity, tau)

    @contextmanager
    def _pruned(self, sparsity: float, probe: Probe | None = None) -> Iterator[Result]:
        result = self.job.prune(sparsity, probe)
        try:
            yield result
        finally:
            self.job.undo_(result.originals)

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.job.walk.device).manual_seed(self.study.seed)
