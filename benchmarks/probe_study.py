"""The study of the probe on one model and one calibration seed; each step is on disk before the next begins."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunus import Global, PerLayer, PerRow, Probe
from prunus.eligible import Weight
from prunus.files.json_file import write_json
from prunus.lab.tracking import environment
from prunus.lab.trained_model import TrainedModel
from prunus.oneshot.probe.decide import is_allowed
from prunus.oneshot.prune import Job, Plan
from prunus.oneshot.result import Result
from prunus.oneshot.walk import Originals
from prunus.ops import bits
from prunus.ops.lazy import Lazy
from prunus.select import Selector

from .probe_models import Case

STRATEGIES: dict[str, tuple[str, Selector]] = {
    "magnitude, global": ("magnitude", Global()),
    "magnitude, layer": ("magnitude", PerLayer()),
    "WANDA, row": ("wanda", PerRow()),
    "WANDA, layer": ("wanda", PerLayer()),
}
UNPROBED: dict[str, tuple[str, Selector]] = {"fisher, global": ("fisher", Global()), "path, global": ("path", Global())}
RANDOM = "random"
BEYOND, OUTSIDE = (
    2.0,
    4.0,
)  # where candidates beyond tau, and weights that are no candidates, begin; scores are at most 1
Masks = Mapping[str, Tensor]  # True where the weight stays


@dataclass(frozen=True)
class Design:
    """The levels and taus that every model is pruned with."""

    levels: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7)
    taus: tuple[float, ...] = (0.5, 1.0, 5.0)


@dataclass(frozen=True)
class Row:
    """One model that was evaluated.

    ``way`` is how it was made: ``alone``, by the strategy; ``probed``, by the probe as it is defined, with
    ``alone, as sparse`` and ``by lot`` beside it; ``exact`` and ``target``, by the probe at exactly the level.
    """

    strategy: str
    level: float
    way: str
    tau: float | None
    sparsity: float
    value: float | None  # None: not a finite number
    beyond: float | None = None  # exact: fraction of the pruned that tau would have kept


class Study:
    """Rows of one case and seed, in a file that an interrupted run continues."""

    def __init__(self, case: Case, design: Design, seed: int, folder: Path) -> None:
        self.case, self.design, self.seed = case, design, seed
        self.path = folder / f"probe_{case.name.lower()}_seed{seed}.json"
        settings = {"case": case.name, "about": case.about, "seed": seed, **case.settings}
        settings |= {"levels": list(design.levels), "taus": list(design.taus)}
        self.content: dict[str, Any] = {"what": "probe evidence", "settings": settings, "num_steps": len(self.steps)}
        self.content |= {"done": {}, "rows": [], "date": str(date.today()), "environment": environment()}
        if self.path.is_file():
            self.content = json.loads(self.path.read_text())
            for name, value in settings.items():
                before = self.content["settings"].get(name)
                if before != value:
                    raise ValueError(f"{self.path} has {name} = {before}, not {value}; give another --results")

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Strategy and what is done with it, a step each."""
        found = [(RANDOM, f"{level}") for level in (0.0, *self.design.levels)]
        for strategy in (*STRATEGIES, *UNPROBED):
            ways = ("alone", "exact", "probed") if strategy in STRATEGIES else ("alone",)
            found += [(strategy, f"{way} {level}") for level in self.design.levels for way in ways]
        return found

    def run(self, load: Callable[[], TrainedModel]) -> None:
        """Do the steps that are left; ``load`` gives the model, and is not called where there are none."""
        done: dict[str, float] = self.content["done"]
        left = [(strategy, step) for strategy, step in self.steps if f"{strategy}: {step}" not in done]
        if not left:
            return
        subject = load()
        self.content["metric"] = subject.metric
        for strategy in dict.fromkeys(strategy for strategy, _ in left):
            score, select = (STRATEGIES | UNPROBED).get(strategy, ("magnitude", Global()))
            job = Job(subject.model, subject.batches, Plan(score, select, subject.loss))
            with job.open():
                arm = Arm(self, strategy, select, job, subject)
                for step in (step for which, step in left if which == strategy):
                    began = time.perf_counter()
                    self.content["rows"] += [asdict(row) for row in arm.rows(step)]
                    done[f"{strategy}: {step}"] = round(time.perf_counter() - began, 3)
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    write_json(self.path, self.content)
                    print(f"{self.case.name}, seed {self.seed}: {len(done)} of {len(self.steps)}, {strategy} {step}")


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


# Masks that are compared with those of ``prune``


def replaced_veto(result: Result, sources: Sequence[Lazy], tau: float, select: Selector, sparsity: float) -> Masks:
    """Exactly ``sparsity`` of the weights, in the strategy's scope: of its candidates those within ``tau`` first.

    The lowest scores go first. Where too few are within tau, the lowest scores beyond it follow, so that the count is
    exact whatever the probe says.
    """
    where = {source.name: bits.unpack(result.candidates[source.name], source.shape) for source in sources}
    scores = {source.name: source.all()[where[source.name]].float() for source in sources}
    top = max(float(each.max()) for each in scores.values() if len(each)) or 1.0
    order = {}
    for name, mask in where.items():
        passes = is_allowed(result.ratios[name].q, tau)
        order[name] = torch.full(mask.shape, OUTSIDE, device=mask.device)
        order[name][mask] = scores[name] / top + torch.where(passes, 0.0, BEYOND)
    return select(order, sparsity)


def share_beyond(result: Result, masks: Masks, tau: float) -> float:
    """Fraction of what the masks prune that the probe would have kept."""
    num_beyond = num_pruned = 0
    for name, mask in masks.items():
        where = bits.unpack(result.candidates[name], mask.shape)
        num_beyond += int((~is_allowed(result.ratios[name].q, tau) & ~mask[where]).sum())
        num_pruned += int((~mask).sum())
    return num_beyond / max(1, num_pruned)


def vetoed_by_lot(result: Result, generator: torch.Generator) -> Masks:
    """As many candidates of each weight kept as the probe kept, drawn at random: what its choice is worth."""
    found = {}
    for name, mask in result.masks.items():
        where = bits.unpack(result.candidates[name], mask.shape)
        found[name] = torch.ones_like(mask)
        found[name][where] = ~_lots(int(where.sum()), int((where & ~mask).sum()), generator)
    return found


def exactly(job: Job, sparsity: float, generator: torch.Generator) -> Masks:
    """The strategy's masks with exactly that sparsity over all weights.

    Scopes round by row or layer, which can shift the sparsity by more than the effect under study. Here every
    row or layer gives the whole number below its share, and lots decide which of them give one more.
    """
    select, sources = job.strategy.select, job.strategy.sources(sparsity, {})
    if isinstance(select, Global):
        return _unpacked(sources, select.packed(sources, sparsity, {}))
    many: dict[str, Tensor] = {}  # what stays where each row or layer drops the whole number below its share
    between: dict[str, Tensor] = {}  # what would go if each dropped one more
    for source in sources:
        size = source.num_inputs if isinstance(select, PerRow) else source.numel
        drop = int(sparsity * size)
        shares = (drop / size, min(drop + 1, size) / size)
        below, above = (_unpacked([source], select.packed([source], share, {})) for share in shares)
        many |= below
        between[source.name] = below[source.name] & ~above[source.name]
    missing = round(sparsity * sum(source.numel for source in sources)) - sum(int((~m).sum()) for m in many.values())
    counts = [int(each.sum()) for each in between.values()]
    gone = _lots(sum(counts), missing, generator)
    for (name, where), part in zip(between.items(), gone.split(counts), strict=True):
        many[name][where] = ~part
    return many


def _unpacked(sources: Sequence[Lazy], packed: Masks) -> dict[str, Tensor]:
    return {source.name: bits.unpack(packed[source.name], source.shape) for source in sources}


def _lots(num: int, num_drawn: int, generator: torch.Generator) -> Tensor:
    """True at ``num_drawn`` of ``num`` places."""
    found = torch.zeros(num, dtype=torch.bool, device=generator.device)
    found[torch.rand(num, generator=generator, device=generator.device).argsort()[:num_drawn]] = True
    return found


def drawn(weights: Sequence[Weight], sparsity: float, generator: torch.Generator) -> Masks:
    """Weights of all layers by lot."""
    draw = {w.name: torch.rand(w.parameter.shape, generator=generator, device=w.parameter.device) for w in weights}
    return Global()(draw, sparsity)


@contextmanager
def pruned_by(job: Job, masks: Masks) -> Iterator[float]:
    """The job's model, pruned by masks for a while, and its sparsity."""
    originals = Originals()
    try:
        for name, mask in masks.items():
            originals.prune_(job.weights[name].parameter, ~mask)
        yield sum(int((~mask).sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    finally:
        job.undo_(originals)
