"""The study of the probe on one model and one calibration seed; each step is on disk before the next begins."""

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

from prunus import Global, PerLayer, PerRow
from prunus.lab.tracking import environment
from prunus.oneshot import Probe
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.forward import swapped
from prunus.oneshot.level import Level
from prunus.oneshot.options import Method
from prunus.oneshot.probe.prober import ProbeSchedule, is_allowed
from prunus.oneshot.prune import prune_to
from prunus.oneshot.scoring import Scores
from prunus.ops import bits
from prunus.ops.lazy import Lazy
from prunus.select import Selector
from prunus.trained.model import ModelSource, TrainedModel, load_trained

from .study import StudyFile, image_model

STRATEGIES: dict[str, tuple[str, Selector]] = {
    "magnitude, global": ("magnitude", Global()),
    "magnitude, layer": ("magnitude", PerLayer()),
    "WANDA, row": ("wanda", PerRow()),
    "WANDA, layer": ("wanda", PerLayer()),
}
UNPROBED: dict[str, tuple[str, Selector]] = {"fisher, global": ("fisher", Global()), "path, global": ("path", Global())}
RANDOM = "random"
BEYOND, OUTSIDE = 2.0, 4.0  # added to scores of at most 1: of candidates beyond tau, of weights that are no candidates
Masks = Mapping[str, Tensor]  # True where the weight stays


@dataclass(frozen=True)
class StudyModel:
    case: str
    about: str
    schedule: ProbeSchedule
    samples: int  # calibration windows or images
    held_out: int  # windows or images
    length: int = 256  # tokens of a window
    levels: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7)
    taus: tuple[float, ...] = (0.5, 1.0, 5.0)

    def small(self) -> "StudyModel":
        """The same in seconds, to try whether it runs: its figures mean nothing."""
        return replace(self, samples=4, held_out=4, length=16, levels=(0.5,), taus=(1.0,))


MODELS = [
    StudyModel("stories15M", "Llama, 15 M weights, float32; TinyStories", "sequential", 16, 128),
    StudyModel(
        "SmolLM2-135M",
        "SmolLM2-135M-Instruct, Llama with grouped queries, 135 M weights, read from a file that was quantised to "
        "Q4_1 and computed in float32; the validation text of wikitext-2, in two halves",
        "joint",
        16,
        64,
    ),
    StudyModel("ResNet-20", "ResNet-20, 0.27 M weights, float32; CIFAR-10", "sequential", 128, 10_000),
]


# Models and their data


def load_model(case: StudyModel, data: Path, seed: int, device: torch.device) -> TrainedModel:
    """The case's model, samples and metric; ``seed`` chooses the calibration samples."""
    folder = data / case.case
    if not folder.is_dir():
        raise ValueError(f"{data} has no folder {case.case}; python -m benchmarks evidence --help says what it holds")
    if any(folder.glob("*batch*")):
        paths = sorted(folder.glob("*.th"))
        if not paths:
            raise ValueError(f"{folder} holds no weights; put resnet20_cifar10.th there")
        return image_model(paths[0], folder, case.samples, case.held_out, seed, device)
    packed = next(iter(sorted(folder.glob("*.gguf"))), None)
    tokens: dict[str, Any] = {"tokens": folder / "calib.u16", "eval_tokens": folder / "valid.u16"}
    tokens |= {"samples": case.samples, "length": case.length, "eval_windows": case.held_out}
    tokens |= {"gguf_file": packed.name if packed else None}
    return load_trained(ModelSource(str(folder), **tokens, seed=seed, dtype="float32", device=str(device)))


# The study


@dataclass(frozen=True)
class Evaluated:
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


class ProbeStudy:
    """Rows of one case and seed, in a file that an interrupted run continues."""

    def __init__(self, case: StudyModel, seed: int, folder: Path) -> None:
        self.case, self.seed = case, seed
        self.steps = [(RANDOM, f"{level}") for level in (0.0, *case.levels)]  # strategy, what is done with it
        for strategy in (*STRATEGIES, *UNPROBED):
            ways = ("alone", "exact", "probed") if strategy in STRATEGIES else ("alone",)
            self.steps += [(strategy, f"{way} {level}") for level in case.levels for way in ways]
        self.path = folder / f"probe_{case.case.lower()}_seed{seed}.json"
        settings = asdict(case) | {"seed": seed, "levels": list(case.levels), "taus": list(case.taus)}
        record = {"what": "probe evidence", "settings": settings, "num_steps": len(self.steps), "done": {}, "rows": []}
        self.file = StudyFile(self.path, record | {"date": str(date.today()), "environment": environment()})

    def run(self, load: Callable[[], TrainedModel]) -> None:
        """Do the steps that are left; ``load`` gives the model, and is not called where there are none."""
        done: dict[str, float] = self.file.record["done"]
        left = [(strategy, step) for strategy, step in self.steps if f"{strategy}: {step}" not in done]
        if not left:
            return
        trained = load()
        self.file.record["metric"] = trained.metric
        for strategy in dict.fromkeys(strategy for strategy, _ in left):
            score, select = (STRATEGIES | UNPROBED).get(strategy, ("magnitude", Global()))
            calibration = Calibration(trained.model, trained.batches)
            with calibration.open():
                scores = Scores(calibration, Method(score, select, loss=trained.loss))
                probed = ProbedStrategy(self, strategy, select, scores, trained)
                for step in (step for which, step in left if which == strategy):
                    began = time.perf_counter()
                    rows = [asdict(row) for row in probed.rows(step)]
                    done[f"{strategy}: {step}"] = round(time.perf_counter() - began, 3)
                    self.file.add(rows)
                    print(f"{self.case.case}, seed {self.seed}: {len(done)} of {len(self.steps)}, {strategy} {step}")


@dataclass
class ProbedStrategy:
    """One strategy on one model, which is dense between the steps."""

    study: ProbeStudy
    strategy: str
    select: Selector
    scores: Scores
    trained: TrainedModel

    def rows(self, step: str) -> Iterator[Evaluated]:
        way, _, level = step.rpartition(" ")
        return getattr(self, f"_{way or 'random'}")(float(level))

    def _random(self, level: float) -> Iterator[Evaluated]:
        generator, device = self._generator(), self.scores.calibration.device
        shapes = {name: weight.parameter.shape for name, weight in self.scores.weights.items()}
        draw = {name: torch.rand(shape, generator=generator, device=device) for name, shape in shapes.items()}
        yield self._by(Global()(draw, level), level, "alone")

    def _alone(self, level: float) -> Iterator[Evaluated]:
        yield self._by(masks_of(self._result(level)), level, "alone")

    def _exact(self, level: float) -> Iterator[Evaluated]:
        """The probe of more candidates than are needed, all at once, for every tau; and tau by the sparsity."""
        result = self._result(level, Probe("target", schedule="joint"))
        yield self._by(masks_of(result), level, "target")
        sources = self.scores.sources(self.select, level, {})
        for tau in self.study.case.taus:
            masks = replaced_veto(result, sources, tau, self.select, level)
            yield replace(self._by(masks, level, "exact", tau), beyond=share_beyond(result, masks, tau))

    def _probed(self, level: float) -> Iterator[Evaluated]:
        """The probe as it is defined, with the strategy alone and a veto by lot as sparse beside it."""
        schedule, result = self.study.case.schedule, None
        for tau in self.study.case.taus:
            if result is None or schedule != "joint":  # joint ratios serve every tau
                result = self._result(level, Probe(tau, schedule=schedule))
            result.packed = result.packed_at(tau)
            probed = self._by(masks_of(result), level, "probed", tau)
            yield probed
            yield self._by(exactly(self.scores, probed.sparsity, self._generator()), level, "alone, as sparse", tau)
            yield self._by(vetoed_by_lot(result, self._generator()), level, "by lot", tau)

    def _result(self, sparsity: float, probe: Probe | None = None) -> Level:
        """What pruning would do; the model stays dense."""
        level = prune_to(self.scores, sparsity, probe)
        level.undo_()
        self.scores.changed()
        return level

    def _by(self, masks: Masks, level: float, way: str, tau: float | None = None) -> Evaluated:
        with pruned_by(self.scores, masks) as sparsity:
            value = self.trained.evaluate(self.trained.model)
        return Evaluated(self.strategy, level, way, tau, sparsity, value if math.isfinite(value) else None)

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.scores.calibration.device).manual_seed(self.study.seed)


# Masks that are compared with those of ``prune``


def masks_of(level: Level) -> Masks:
    return {name: bits.unpack(packed, level.weights[name].parameter.shape) for name, packed in level.packed.items()}


def replaced_veto(result: Level, sources: Sequence[Lazy], tau: float, select: Selector, sparsity: float) -> Masks:
    """Exactly ``sparsity`` of the weights, in the strategy's scope: candidates within ``tau`` go first."""
    where = {source.name: bits.unpack(result.candidates[source.name], source.shape) for source in sources}
    scores = {source.name: source.all()[where[source.name]].float() for source in sources}
    top = max(float(each.max()) for each in scores.values() if len(each)) or 1.0
    order = {}
    for name, mask in where.items():
        passes = is_allowed(result.ratios[name].q, tau)
        order[name] = torch.full(mask.shape, OUTSIDE, device=mask.device)
        order[name][mask] = scores[name] / top + torch.where(passes, 0.0, BEYOND)
    return select(order, sparsity)


def share_beyond(result: Level, masks: Masks, tau: float) -> float:
    """Fraction of what the masks prune that the probe would have kept."""
    num_beyond = num_pruned = 0
    for name, mask in masks.items():
        where = bits.unpack(result.candidates[name], mask.shape)
        num_beyond += int((~is_allowed(result.ratios[name].q, tau) & ~mask[where]).sum())
        num_pruned += int((~mask).sum())
    return num_beyond / max(1, num_pruned)


def vetoed_by_lot(result: Level, generator: torch.Generator) -> Masks:
    """As many candidates of each weight kept as the probe kept, drawn at random: what its choice is worth."""
    found = {}
    for name, mask in masks_of(result).items():
        where = bits.unpack(result.candidates[name], mask.shape)
        found[name] = torch.ones_like(mask)
        found[name][where] = ~_lots(int(where.sum()), int((where & ~mask).sum()), generator)
    return found


def exactly(scores: Scores, sparsity: float, generator: torch.Generator) -> Masks:
    """The strategy's masks at exactly that sparsity: each scope rounds down, and lots decide which give one more."""
    select = scores.method.select
    sources = scores.sources(select, sparsity, {})
    fewer = [replace(quota, num_drop=int(sparsity * quota.size)) for quota in select.quota_of(sources, sparsity)]
    more = [replace(quota, num_drop=min(quota.num_drop + 1, quota.size)) for quota in fewer]
    below, above = (select.cut(sources, quotas, {}) for quotas in (fewer, more))
    masks = {source.name: bits.unpack(below[source.name], source.shape) for source in sources}
    between = {source.name: masks[source.name] & ~bits.unpack(above[source.name], source.shape) for source in sources}
    missing = round(sparsity * sum(m.numel() for m in masks.values())) - sum(int((~m).sum()) for m in masks.values())
    counts = [int(each.sum()) for each in between.values()]
    gone = _lots(sum(counts), missing, generator)
    for (name, where), part in zip(between.items(), gone.split(counts), strict=True):
        masks[name][where] = ~part
    return masks


def _lots(num: int, num_drawn: int, generator: torch.Generator) -> Tensor:
    """True at ``num_drawn`` of ``num`` places."""
    found = torch.zeros(num, dtype=torch.bool, device=generator.device)
    found[torch.rand(num, generator=generator, device=generator.device).argsort()[:num_drawn]] = True
    return found


@contextmanager
def pruned_by(scores: Scores, masks: Masks) -> Iterator[float]:
    """The model, pruned by masks for a while, and its sparsity."""
    pruned: dict[Tensor, Tensor] = {}
    for name, mask in masks.items():
        weight = scores.weights[name].parameter
        pruned[weight] = weight.data.masked_fill(~mask.to(weight.device), 0.0)
    try:
        with swapped(pruned):
            yield sum(int((~mask).sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    finally:
        scores.changed()
