"""How sparse a model can get within a limit on its quality: levels, each kept or taken back exactly."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..eligible import warn_if_much_stays_dense
from ..masks import Masks
from ..ops import bits
from ..select import Selector
from .calibration import Calibration, Patterns
from .journal import Folder, SearchJournal
from .level import Level
from .options import Bisection, Levels, Limit, Method, Repair, ScoreLike, TauTuning, Trial
from .probe.objective import Loss
from .probe.prober import Probe, Probed, taus
from .progress import Progress, progress_line
from .prune import prune_to
from .result import SearchResult
from .scoring import Packed, Scores

Evaluate = Callable[[nn.Module], float]


def search(
    model: nn.Module,
    batches: Iterable[Any],
    evaluate: Evaluate,
    limit: Limit,
    *,
    steps: Levels | Bisection = Levels(),
    tune_tau: TauTuning | None = None,
    compare: bool = True,
    on_trial: Callable[[Trial], None] | None = None,
    score: ScoreLike | None = None,
    select: Selector | None = None,
    probe: Probe | None = None,
    loss: Loss | None = None,
    repair: Repair | Literal["auto"] | None = "auto",
    moments: Mapping[str, Tensor] | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    only: Patterns = (),
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    checkpointing: bool = False,
    state: Folder | None = None,
    progress: Progress | bool | None = None,
) -> SearchResult:
    """Prune ``model`` in place as far as ``limit`` allows; ``evaluate(model)`` returns a metric on held-out data.

    Masks are cumulative: a level prunes within what the one before it kept. A level that fails is undone, bit for
    bit; if the first fails, the model is dense again. ``steps`` are the sparsities to try. With ``tune_tau`` a level
    that fails is tried again with smaller taus of its probe. ``compare`` also measures the same method without the
    probe, at the sparsity that was reached. ``on_trial`` is called after every trial.

    All other arguments are those of ``prune``, with the same defaults. With repair (the default without a probe) every
    level is repaired from the dense weights. With ``state``, a folder, a search that was killed resumes after its last
    finished trial, and a probe after its last group of weights, when you repeat the call with the same dense model.
    """
    if not isinstance(limit, Limit):
        raise ValueError(f"limit must be a Limit, such as Limit(relative=0.05, better='lower'), got {limit!r}")
    how: dict[str, Any] = {"loss": loss, "checkpointing": checkpointing, "moments": moments or {}}
    method = Method.of(batches, score, select, probe, repair, **how)
    if tune_tau and probe and probe.tau == "target":
        raise ValueError("tau='target' follows from the sparsity and cannot be tuned; give a number, or no tune_tau")
    which: dict[str, Any] = {"include": include, "exclude": exclude, "only": only}
    calibration = Calibration(model, batches, offload=offload, batch_size=batch_size, **which)
    warn_if_much_stays_dense(calibration.model, calibration.eligible)
    with calibration.open():
        scores = Scores(calibration, method)
        trying = _Search(scores, evaluate, limit, steps, probe, tune_tau, compare, state, progress, on_trial)
        return trying.run()


@dataclass
class _Kept:
    """A level that was kept; where levels are repaired, each begins with the dense weights."""

    target: float
    level: Level
    trial: Trial | None = None


@dataclass
class _Search:
    scores: Scores
    evaluate: Evaluate
    limit: Limit
    steps: Levels | Bisection
    probe: Probe | None
    tune_tau: TauTuning | None
    compare: bool
    state: Folder | None
    progress: Progress | bool | None
    on_trial: Callable[[Trial], None] | None
    kept: list[_Kept] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    passes: int = 0
    evaluations: int = 0
    dense: float = math.nan  # the metric of the dense model

    def run(self) -> SearchResult:
        began = time.perf_counter()
        try:
            self.dense = self._metric()
            if not math.isfinite(self.dense):
                raise ValueError(f"the metric of the dense model is {self.dense}, but a limit needs a finite one")
            state = self._state()
            while (target := self.steps.next(self.trials)) is not None:
                self._try(target, state)
            result = self._result()
        except BaseException:
            while self.kept:
                self._take_back()
            raise
        result.passes, result.seconds = self.passes, time.perf_counter() - began
        return result

    @property
    def live(self) -> Packed:
        return self.kept[-1].level.packed if self.kept else {}

    def _state(self) -> SearchJournal | None:
        """The folder of the search; the model is pruned by the trials in it."""
        if self.state is None:
            return None
        method = self.scores.method
        settings: dict[str, Any] = {"limit": self.limit, "probe": self.probe, "steps": self.steps}
        settings |= {"tune_tau": self.tune_tau, "samples": self.scores.calibration.samples.digest()}
        settings |= method.settings(self.scores.weights)
        if self.probe is not None and method.loss is not None:
            settings["loss"] = method.loss
        state = SearchJournal(self.state, settings, self.scores.weights)
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
            self._prune(before.target, levels[0], before.trial)
        self._prune(trial.target, levels[-1], trial)

    def _prune(self, target: float, packed: Packed, trial: Trial | None) -> None:
        """Prune to known masks, as one level."""
        if self.scores.method.repair is None:
            live = self.scores.live(self.live)
            self._apply(_Kept(target, Level(self.scores.weights, live, dict(packed)), trial))
            return
        self._to_dense()
        # masks that the solver found are found again, with the values that belong to them
        masks = None if self.scores.method.score is None else packed
        self.kept.append(_Kept(target, prune_to(self.scores, target, within=self.live, masks=masks), trial))

    def _apply(self, kept: _Kept) -> None:
        self._to_dense()
        self.kept.append(kept)
        kept.level.apply_()
        self.scores.changed()

    def _try(self, target: float, state: SearchJournal | None) -> None:
        """One trial: probe, evaluate, tune if that fails, and keep it or take it back."""
        began, number = time.perf_counter(), len(self.trials)
        passes, evaluations = self.passes, self.evaluations
        level = self._level(target, self.probe, state)
        tried, metric, scale = self._sparsity(), self._metric(), 1.0
        accepted = self.limit.allows(self.dense, metric)
        if not accepted and self.tune_tau and level.ratios:
            scale, metric = self._tuned(level, target, metric)
            accepted = scale < 1.0
        sparsity = self._sparsity() if accepted else tried
        if not accepted:
            self._take_back()
        cost = (self.passes - passes, self.evaluations - evaluations, time.perf_counter() - began)
        trial = Trial(target, sparsity, metric, accepted, scale, *cost)
        self.trials.append(trial)
        if accepted:
            self.kept[-1].trial = trial
        for kept in self.kept:
            kept.level.ratios.clear()  # tuning alone reads them, which are the largest part of a level
        if state is not None:
            state.finish(number, trial, [kept.level.packed for kept in self.kept])
        if self.on_trial is not None:
            self.on_trial(trial)

    def _level(self, target: float, probe: Probe | None, state: SearchJournal | None = None) -> Level:
        """Prune to ``target`` within what was kept, as a new level."""
        number = len(self.trials)
        done = state.groups(number) if state else None
        self.scores.refresh()

        def save(names: Sequence[str], probed: Probed) -> None:
            if state is not None:
                state.save_group(number, names, probed)

        self._to_dense()
        title = f"search, {target:.1%} ({self.limit.in_words(self.dense)})"
        try:
            with progress_line(self.progress, title) as report:
                how: dict[str, Any] = {"within": self.live, "done": done, "progress": report, "finished": save}
                level = prune_to(self.scores, target, probe, **how)
        except BaseException:
            self._from_dense()
            raise
        self.passes += level.cost.passes
        self.kept.append(_Kept(target, level))
        return level

    def _take_back(self) -> None:
        if self.scores.calibration.offload is not None:
            self.scores.calibration.offload.unload()
        self.kept.pop().level.undo_()
        self.scores.changed()
        self._from_dense()

    def _to_dense(self) -> None:
        """Take back a repaired level, whose masks stay."""
        if self.kept and self.scores.method.repair is not None:
            self.kept[-1].level.undo_()
            self.scores.changed()

    def _from_dense(self) -> None:
        """Bring back the level that ``_to_dense`` took back."""
        if self.kept and self.scores.method.repair is not None:
            self.kept[-1].level.apply_()
            self.scores.changed()

    def _tuned(self, level: Level, target: float, metric: float) -> tuple[float, float]:
        """The largest factor of tau that passes (1 if none), and its metric; the model is pruned by it."""
        tune = self.tune_tau
        assert tune is not None
        both = tune.both_steps and len(self.kept) > 1
        attempt = partial(self._both, target) if both else partial(self._single, level)
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
            if before is not None:  # comes back as it was, with an empty level in place of the one that failed
                self._take_back()
                self._take_back()
                self._apply(before)
                self.kept.append(_Kept(target, Level(self.scores.weights, before.level.packed, before.level.packed)))
        elif last != best[0]:
            attempt(best[0])
        return best

    def _single(self, level: Level, scale: float) -> float:
        """Metric of the level with tau scaled, from its stored ratios."""
        assert self.probe is not None
        scaled = self._scaled(scale)
        assert not isinstance(scaled.tau, str)
        level.retake_(scaled.tau)
        self.scores.changed()
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

    def _scaled(self, scale: float) -> Probe:
        assert self.probe is not None
        sizes = {name: weight.parameter.numel() for name, weight in self.scores.weights.items()}
        by_name = taus(self.probe.tau, sizes, self.probe.base)
        return replace(self.probe, tau={name: scale * tau for name, tau in by_name.items()})

    @torch.no_grad()
    def _metric(self) -> float:
        self.evaluations += 1
        metric = self.evaluate(self.scores.calibration.model)
        try:
            if isinstance(metric, str):
                raise TypeError
            return float(metric)
        except (TypeError, ValueError, RuntimeError):
            what = f"{metric!r}, a {type(metric).__name__}"[:100]
            raise ValueError(f"evaluate must return a number, got {what}; end it with return float(...)") from None

    def _sparsity(self) -> float:
        packed = self.scores.live(self.live)
        num_weights = sum(weight.parameter.numel() for weight in self.scores.weights.values())
        return (num_weights - sum(int(bits.count(mask)) for mask in packed.values())) / num_weights

    def _result(self) -> SearchResult:
        trial = self.kept[-1].trial if self.kept else None
        parameters = {name: weight.parameter for name, weight in self.scores.weights.items()}
        masks = Masks(parameters, self.scores.live(self.live))
        metric = trial.metric if trial else self.dense
        result = SearchResult(masks, self._sparsity(), metric, self.dense, self.trials, self.limit)
        if trial and self.probe and self.compare:
            result.alone, result.alone_sparsity = self._alone(result.sparsity)
        return result

    def _alone(self, sparsity: float) -> tuple[float, float]:
        """Metric and sparsity of the method without the probe, pruned at once from the dense model."""
        levels = list(self.kept)
        while self.kept:
            self._take_back()
        self._level(sparsity, None)
        metric, reached = self._metric(), self._sparsity()
        self._take_back()
        for kept in levels:
            self._apply(kept)
        return metric, reached
