"""Prune a trained model: a strategy proposes weights, and a probe may keep some of them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import eligible, unwrapped_model
from ..input_statistics import eagerly
from ..ops import bits
from ..ranks import is_dtensor
from ..select import Selector
from .limit import Progress
from .probe.engine import Engine
from .probe.objective import Loss, Objective
from .probe.prober import Finished, Probe, Probed, Prober
from .resources import Clock, Peak
from .result import Result
from .strategy import ScoreLike, Strategy, default_select
from .walk import Originals, Walk


def prune(
    model: nn.Module,
    batches: Iterable[Any] = (),
    sparsity: float = 0.5,
    score: ScoreLike = "magnitude",
    select: Selector | None = None,
    probe: Probe | None = None,
    loss: Loss | None = None,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    checkpointing: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Prune ``model`` in place to ``sparsity`` of its prunable weights, and return what was done.

    The sparsity counts all zeros, and weights that are zero already go first. Where the model, or a row that is
    compared by itself, has more zeros than asked for, none comes back.

    ``batches`` are tensors, pairs (input, target) or dicts, read once; a sample is one index of dimension 0, and
    its loss is that of a batch of one. They may be left out where nothing reads them: magnitude without a probe.
    ``loss(output, target)`` defaults to the model's own for Hugging Face models. ``select`` defaults to ``PerRow``
    for wanda and to ``Global`` for the rest.

    A probe keeps some of what the strategy proposes, so the sparsity ends below the one asked for, unless its tau is
    ``target``. With ``offload``, a device, the model's blocks are moved there one at a time, and everything else
    stays there until the end: the masks are the same. With ``checkpointing`` blocks after the probed one run again
    for the backward instead of keeping their activations; this is also done where a single sample does not fit.

    The model comes back in its mode and with its buffers; after an exception with its weights too.
    """
    job = Job(model, batches, Plan(score, select, loss, include, exclude, batch_size, offload, checkpointing))
    with job.open():
        return job.prune(sparsity, probe, progress=progress)


@dataclass(frozen=True)
class Plan:
    """What is the same for every level: strategy, loss, and which weights."""

    score: ScoreLike = "magnitude"
    select: Selector | None = None
    loss: Loss | None = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    batch_size: int | None = None
    offload: str | torch.device | None = None  # where blocks go one at a time
    checkpointing: bool = False


@dataclass
class Start:
    """Where a level begins: the masks so far, and the weights of this level that are done."""

    live: Mapping[str, Tensor] = field(default_factory=dict)  # packed; for a missing name all that is not zero
    done: Probed | None = None


class Job:
    """A model with its samples and strategy; levels of pruning can be run on it one after another."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], plan: Plan) -> None:
        if plan.batch_size is not None and not (isinstance(plan.batch_size, Integral) and plan.batch_size >= 1):
            raise ValueError(f"batch_size is a number of samples, at least 1, or None, got {plan.batch_size!r}")
        self.model = unwrapped_model(model)
        self.plan = plan
        weights = eligible(self.model, plan.include, plan.exclude).weights
        self.weights = {weight.name: weight for weight in weights}
        if sharded := [weight.name for weight in weights if is_dtensor(weight.parameter)]:
            raise ValueError(f"{sharded[0]} is sharded over ranks; prune the whole model in one process, then shard it")
        self.walk = Walk(self.model, weights, batches, plan.offload)
        self.clock = Clock(self.walk.device)
        select = plan.select or default_select(plan.score)
        self.strategy = Strategy(self.walk, self.engine, plan.score, select)
        self._engine: Engine | None = None

    def open(self) -> AbstractContextManager[None]:
        """The model as it is worked on; afterwards all but its weights is as before."""
        return self.walk.open()

    def engine(self) -> Engine:
        """The engine of the model's gradients, made when it is first asked for."""
        if self._engine is None:
            objective = Objective(self.model, self.plan.loss)
            with self.clock.part("inspection"):
                self._engine = Engine(self.walk, objective, self.plan.batch_size, self.plan.checkpointing)
        return self._engine

    def _counts(self) -> tuple[int, int]:
        """Passes of one sample so far: forward and backward, forward alone."""
        engine = self._engine
        return (engine.passes if engine else 0, self.strategy.forwards + (engine.forwards if engine else 0))

    def changed(self) -> None:
        """Drop what the engine stored: weights were changed outside it."""
        if self._engine is not None:
            self._engine.changed(list(self.weights))

    def prune(
        self,
        sparsity: float,
        probe: Probe | None = None,
        start: Start | None = None,
        *,
        progress: Progress | None = None,
        finished: Finished | None = None,
    ) -> Result:
        """One level: candidates once, then the probe; on an exception the weights are as before."""
        if not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must be a number in [0, 1), got {sparsity!r}")
        began, peak, start = time.perf_counter(), Peak(self.walk.device), start or Start()
        passes, forwards = self._counts()
        self.clock.seconds = {}
        result = Result(self.weights, {}, {})
        try:
            with eagerly():
                self._level(result, sparsity, probe, start, self._on_finished(progress, finished))
        except BaseException:
            self.undo_(result.originals)
            raise
        result.passes, result.forwards = self._counts()[0] - passes, self._counts()[1] - forwards
        result.seconds, result.peak_bytes = time.perf_counter() - began, peak.bytes()
        result.parts = dict(self.clock.seconds)
        if self._engine is not None:
            result.rows, result.halved = self._engine.size, self._engine.halved
            result.checkpointing = self._engine.checkpointing
        return result

    def undo_(self, originals: Originals) -> None:
        """Take changes back."""
        if self.walk.offload is not None:
            self.walk.offload.unload()
        originals.restore_()
        self.changed()

    @torch.no_grad()
    def _level(self, result: Result, sparsity: float, probe: Probe | None, start: Start, finished: Finished) -> None:
        live = self.live(start.live)
        pool = probe.pool_sparsity(sparsity) if probe else sparsity
        with self.clock.part("strategy"):
            keep = self.strategy.keep(pool, live)
            exact = self.strategy.keep(sparsity, live) if pool != sparsity else keep
        result.candidates = {name: live[name] & ~keep[name] for name in self.weights}
        if probe is None:
            result.packed = keep
            for name, weight in self.weights.items():
                where = bits.unpack(result.candidates[name], weight.parameter.shape)
                result.originals.prune_(weight.parameter, where)
            self.changed()
            finished(list(self.weights), Probed())
            return
        num_prune = {name: int(bits.count(live[name] & ~exact[name])) for name in self.weights}
        prober = Prober(self.engine(), probe, result.candidates, num_prune, result.originals)
        done = list(start.done.pruned) if start.done else []
        if start.done:
            prober.resume(start.done)
        with self.clock.part("records"):
            found = prober.run(finished, done)
        result.ratios, result.taus = found.ratios, found.taus
        result.packed = {name: live[name] & ~found.pruned[name] for name in self.weights}

    def live(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Packed bits of what is not zero, within ``given``: a weight that is zero counts as pruned."""
        found = {name: bits.pack(weight.parameter.detach() != 0) for name, weight in self.weights.items()}
        return {name: here & given[name] if name in given else here for name, here in found.items()}

    def _on_finished(self, progress: Progress | None, finished: Finished | None) -> Finished:
        """Calls both when a group is done."""
        num_done = 0

        def call(names: Sequence[str], found: Probed) -> None:
            nonlocal num_done
            num_done += len(names)
            if finished is not None:
                finished(names, found)
            if progress is not None:
                progress(num_done, len(self.weights), names[-1])

        return call
