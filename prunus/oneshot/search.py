"""The search for how sparse a model can get within a limit on its quality: levels, each kept or taken back exactly."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..masks import Masks
from ..ops import bits
from ..select import Selector
from .limit import Limit, SearchOptions, Trial
from .options import Repair
from .probe.decide import taus
from .probe.objective import Loss
from .probe.prober import Probe, Probed
from .progress import progress_line
from .prune import Job, Plan, Start, method
from .result import Found, Result
from .state import State
from .strategy import ScoreLike
from .walk import Originals

Evaluate = Callable[[nn.Module], float]
Packed = Mapping[str, Tensor]


def search(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Evaluate,
    limit: Limit,
    probe: Probe | None = None,
    *,
    score: ScoreLike | None = None,
    select: Selector | None = None,
    repair: Repair | None = None,
    loss: Loss | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    batch_size: int | None = None,
    options: SearchOptions = SearchOptions(),
) -> Found:
    """Prune ``model`` in place as far as ``limit`` allows for ``evaluate(model)``, a metric on held-out data.

    Masks are cumulative: a level prunes within what the one before it kept. A level that fails is taken back bit for
    bit; if the first fails, the model comes back dense. With ``options.state``, a folder, a search that was
    killed resumes after its last finished group of weights when it is called again with the same dense model.

    With ``repair`` every level is repaired, from the dense weights on. Without a ``score`` the solver of the repair
    then chooses what stays; otherwise the score is magnitude.
    """
    if not isinstance(limit, Limit):
        raise ValueError(f"limit must be Limit(relative=0.05, better='lower') or the like, got {limit!r}")
    score, repair = method(batches, score, probe, repair)
    if options.tune and probe and probe.tau == "target":
        raise ValueError("tau='target' cannot be tuned: it follows from the sparsity; give a number, or no tune")
    plan = Plan(score, select, loss, include, exclude, batch_size, options.offload, options.checkpointing, repair)
    job = Job(model, batches, plan)
    with job.open():
        return _Search(job, evaluate, limit, probe, options).run()


@dataclass
class _Kept:
    """A level that was kept: what it changed, and the masks after it."""

    target: float
    originals: Originals
    packed: Packed
    trial: Trial | None = None
    result: Result | None = None  # where levels are repaired: each begins with the dense weights


@dataclass
class _Search:
    job: Job
    evaluate: Evaluate
    limit: Limit
    probe: Probe | None
    options: SearchOptions
    kept: list[_Kept] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    passes: int = 0
    evaluations: int = 0
    dense: float = math.nan  # the metric of the dense model

    def run(self) -> Found:
        began = time.perf_counter()
        try:
            self.dense = self._metric()
            if not math.isfinite(self.dense):
                raise ValueError(f"the metric of the dense model is {self.dense}; a limit needs a finite one")
            state = self._state()
            while (target := self.options.steps.next(self.trials)) is not None:
                self._try(target, state)
            found = self._found()
        except BaseException:
            while self.kept:
                self._take_back()
            raise
        found.passes, found.seconds = self.passes, time.perf_counter() - began
        return found

    @property
    def live(self) -> Packed:
        return self.kept[-1].packed if self.kept else {}

    def _state(self) -> State | None:
        """The folder of the search; the model is pruned by the trials in it."""
        if self.options.state is None:
            return None
        settings: dict[str, Any] = {"limit": self.limit, "probe": self.probe, "steps": self.options.steps}
        settings |= {"tune": self.options.tune, **self.job.settings()}
        if self.job.plan.repair is not None:
            settings["repair"] = self.job.plan.repair
        if self.probe is not None and self.job.plan.loss is not None:
            settings["loss"] = self.job.plan.loss
        state = State(self.options.state, settings, self.job.weights)
        self.trials = state.trials()
        for number, trial in enumerate(self.trials):
            if trial.accepted:
                self._replay(trial, state.levels(number))
        return state

    def _replay(self, trial: Trial, levels: Sequence[Packed]) -> None:
        """Prune as a finished trial did; tuning may have changed the level before it too."""
        if len(levels) > 1 and any(not torch.equal(mask, self.live[name]) for name, mask in levels[0].items()):
            before = self.kept[-1]
            self._take_back()
            self._apply(before.target, levels[0], before.trial)
        self._apply(trial.target, levels[-1], trial)

    def _apply(self, target: float, packed: Packed, trial: Trial | None, result: Result | None = None) -> None:
        """Prune to known masks, as one level; ``result`` has repaired weights that are known too."""
        if self.job.plan.repair is not None:
            self._to_dense()
            if result is None:
                # masks that the solver found are found again, with the values that belong to them
                masks = None if self.job.plan.score is None else packed
                result = self.job.prune(target, None, Start(self.live, masks=masks))
            else:
                result.apply_()
            self.kept.append(_Kept(target, result.originals, packed, trial, result))
            return
        level, before = _Kept(target, Originals(), packed, trial), self.job.live(self.live)
        self.kept.append(level)
        for name, weight in self.job.weights.items():
            gone = before[name] & ~packed[name]
            level.originals.prune_(weight.parameter, bits.unpack(gone, weight.parameter.shape))
        self.job.changed()

    def _try(self, target: float, state: State | None) -> None:
        """One trial: probe, evaluate, tune if that fails, and keep it or take it back."""
        began, number = time.perf_counter(), len(self.trials)
        passes, evaluations = self.passes, self.evaluations
        result = self._level(target, self.probe, state)
        tried, metric, scale = result.sparsity, self._metric(), 1.0
        accepted = self.limit.allows(self.dense, metric)
        if not accepted and self.options.tune and result.ratios:
            scale, metric = self._tuned(result, target, metric)
            accepted = scale < 1.0
        sparsity = self._sparsity() if accepted else tried
        if not accepted:
            self._take_back()
        cost = (self.passes - passes, self.evaluations - evaluations, time.perf_counter() - began)
        trial = Trial(target, sparsity, metric, accepted, scale, *cost)
        self.trials.append(trial)
        if accepted:
            self.kept[-1].trial = trial
        if state is not None:
            state.finish(number, trial, [level.packed for level in self.kept])
        if self.options.on_trial is not None:
            self.options.on_trial(trial)

    def _level(self, target: float, probe: Probe | None, state: State | None = None) -> Result:
        """Prune to ``target`` within what was kept, as a new level."""
        number = len(self.trials)
        start = Start(self.live, state.groups(number) if state else None)
        self.job.strategy.refresh()

        def save(names: Sequence[str], found: Probed) -> None:
            if state is not None and found.ratios:
                state.save_group(number, names, found)

        self._to_dense()
        title = f"search, {target:.1%} ({self.limit.in_words(self.dense)})"
        try:
            with progress_line(self.options.progress, title) as report:
                result = self.job.prune(target, probe, start, progress=report, finished=save)
        except BaseException:
            self._from_dense()
            raise
        self.passes += result.passes
        repaired = result if self.job.plan.repair is not None else None
        self.kept.append(_Kept(target, result.originals, result.packed, result=repaired))
        return result

    def _take_back(self) -> None:
        self._to_dense()  # what was repaired may be wanted again
        self.job.undo_(self.kept.pop().originals)
        self._from_dense()

    def _to_dense(self) -> None:
        """Take back a repaired level, whose masks stay."""
        if self.kept and (result := self.kept[-1].result):
            result.undo_()
            self.job.changed()

    def _from_dense(self) -> None:
        """Bring back the level that ``_to_dense`` took back."""
        if self.kept and (result := self.kept[-1].result):
            result.apply_()
            self.job.changed()

    def _tuned(self, result: Result, target: float, metric: float) -> tuple[float, float]:
        """The largest factor of tau that passes (1 if none), and its metric; the model is pruned by it."""
        tune = self.options.tune
        assert tune is not None
        both = tune.both_steps and len(self.kept) > 1
        attempt = partial(self._both, target) if both else partial(self._single, result)
        before = self.kept[-2] if both else None
        low, high, scale, best = 0.0, 1.0, 0.0, (1.0, metric)
        last = 1.0
        for _ in range(tune.steps):
            value, last = attempt(scale), scale
            if self.limit.allows(self.dense, value):
                low, best = scale, (scale, value)
            elif scale == 0.0:
                break  # it fails even where no increase is allowed
            else:
                high = scale
            scale = (low + high) / 2
        if best[0] == 1.0:
            if before is not None:
                self._restore_level(before, target)
        elif last != best[0]:
            attempt(best[0])
        return best

    def _single(self, result: Result, scale: float) -> float:
        """Metric of the level with tau scaled, from its stored ratios."""
        assert self.probe is not None
        scaled = self._scaled(scale)
        assert not isinstance(scaled.tau, str)
        result.retake_(scaled.tau)
        self.kept[-1].packed = result.packed
        self.job.changed()
        return self._metric()

    def _both(self, target: float, scale: float) -> float:
        """Metric after this level and the one before it were probed again with tau scaled."""
        before = self.kept[-2].target
        self._take_back()
        self._take_back()
        scaled = self._scaled(scale)
        self._level(before, scaled)
        self._level(target, scaled)
        return self._metric()

    def _restore_level(self, before: _Kept, target: float) -> None:
        """Put the level before back as it was, and an empty level in place of the one that failed."""
        self._take_back()
        self._take_back()
        self._apply(before.target, before.packed, before.trial, before.result)
        self.kept.append(_Kept(target, Originals(), before.packed))

    def _scaled(self, scale: float) -> Probe:
        assert self.probe is not None
        sizes = {name: weight.parameter.numel() for name, weight in self.job.weights.items()}
        by_name = taus(self.probe.tau, sizes, self.probe.base)
        return replace(self.probe, tau={name: scale * tau for name, tau in by_name.items()})

    @torch.no_grad()
    def _metric(self) -> float:
        self.evaluations += 1
        found = self.evaluate(self.job.model)
        try:
            if isinstance(found, str):
                raise TypeError
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            what = f"{found!r}, a {type(found).__name__}"[:100]
            raise ValueError(f"evaluate must return a number, got {what}; end it with return float(...)") from None

    def _sparsity(self) -> float:
        packed = self.job.live(self.live)
        num_weights = sum(weight.parameter.numel() for weight in self.job.weights.values())
        return 1 - sum(int(bits.count(mask)) for mask in packed.values()) / num_weights

    def _found(self) -> Found:
        trial = self.kept[-1].trial if self.kept else None
        parameters = {name: weight.parameter for name, weight in self.job.weights.items()}
        masks = Masks(parameters, self.job.live(self.live))
        metric = trial.metric if trial else self.dense
        found = Found(masks, self._sparsity(), metric, self.dense, self.trials, self.limit)
        if trial and self.probe and self.options.compare:
            found.alone, found.alone_sparsity = self._alone(found.sparsity)
        return found

    def _alone(self, sparsity: float) -> tuple[float, float]:
        """Metric and sparsity of the strategy without the probe, one shot from the dense model."""
        levels = list(self.kept)
        while self.kept:
            self._take_back()
        result = self._level(sparsity, None)
        metric, reached = self._metric(), result.sparsity
        self._take_back()
        for level in levels:
            self._apply(level.target, level.packed, level.trial, level.result)
        return metric, reached
