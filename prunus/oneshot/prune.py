"""Prune a trained model: a strategy proposes weights, and a probe may keep some of them."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..allocate import clipped
from ..eligible import eligible, unwrapped_model, warn_if_much_stays_dense
from ..input_statistics import eagerly
from ..ops import bits
from ..ranks import is_dtensor
from ..select import Global, PerLayer, Quota, Selector, Shape
from .batch_norms import renew_batch_norms
from .drop_experts import drop_experts_
from .options import Repair
from .probe.engine import Engine
from .probe.objective import Loss, Objective
from .probe.prober import Finished, Probe, Probed, Prober
from .progress import Progress, progress_line
from .repair import RepairWalk
from .resources import Clock, Peak
from .result import Result
from .samples import check_batches, digest
from .solver import keep, keep_all_but
from .state import Folder, RepairState
from .strategy import ScoreLike, Strategy, default_select, moment_sources
from .walk import Originals, Walk


def prune(
    model: nn.Module,
    batches: Iterable[Any] = (),
    sparsity: float | None = None,
    score: ScoreLike | None = None,
    select: Selector | None = None,
    probe: Probe | None = None,
    loss: Loss | None = None,
    *,
    repair: Repair | Literal["auto"] | None = "auto",
    moments: Mapping[str, Tensor] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    experts: float | None = None,
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    checkpointing: bool = False,
    state: Folder | None = None,
    progress: Progress | bool | None = None,
) -> Result:
    """Prune ``model`` in place to ``sparsity`` of its prunable weights, and return what was done.

    Where batches are given, the weights that stay are repaired: solved for, block after block, so that the outputs of
    the dense model stay. Without a ``score`` the solver also finds which weights stay; a named score gives its mask,
    and ``repair=None`` leaves it at that. Without batches the score is magnitude, and nothing is repaired.

    The sparsity, by default a half, counts all zeros, and weights that are zero already go first. Where the model, or
    a row that is compared by itself, has more zeros than asked for, none comes back.

    ``batches`` are tensors, pairs (input, target) or dicts, read once; a sample is one index of dimension 0, and
    its loss is that of a batch of one. ``loss(output, target)`` defaults to the model's own for Hugging Face models.
    Scores: ``magnitude``, ``|w|``; ``wanda``, ``|w|`` times the norm of the input; ``fisher``, ``w^2`` times the mean
    squared gradient; ``path``, ``|w| (G0 + G1)`` with the largest gradients of any sample in the model and with what
    magnitude would prune reduced to a tenth; ``random``; a function of ``weight``, ``input_norm`` or ``position``.
    Fisher and path read losses, so that models without a loss of their own need ``loss`` and targets.
    ``select`` defaults to ``PerLayer`` without a score, to ``PerRow`` for wanda and to ``Global`` for the rest.
    ``PerLayer("moments")`` reads ``moments``, the ``exp_avg_sq`` that Adam kept of each weight in training, by name.

    ``experts`` drops ``round(experts * E)`` of the E experts of each layer first, those that matter least on the
    batches (REAP), with the router's rows: the model gets smaller, and its configuration says so. Without a
    ``sparsity`` nothing else is pruned. ``result.experts`` says which ones went, and why.

    A probe keeps some of what the strategy proposes, so the sparsity ends below the one asked for, unless its tau is
    ``target``; nothing is repaired then unless ``repair`` says so. With ``offload``, a device, the model's blocks are
    moved there one at a time, and everything else stays there until the end: the masks are the same. With
    ``checkpointing`` blocks after the probed one run again for the backward instead of keeping their activations; this
    is also done where a single sample does not fit. With ``state``, a folder, a repair that was killed goes on where
    it was when it is called again with the same dense model, and ends with the same bits.

    ``progress`` is a bar in a terminal and in a notebook, and elsewhere a line on standard error for every tenth of a
    call that takes more than a few seconds; False shows nothing. A function in its place gets steps done, steps in all,
    and what is being done.

    The model comes back in its mode and with its buffers, but for batch norms, whose statistics a repair renews; after
    an exception with its weights too.
    """
    if sparsity is None:
        sparsity = getattr(select, "sparsity", None) or (0.5 if experts is None else 0.0)
    dropped, began = None, time.perf_counter()
    if experts is not None:
        if not sparsity:
            given = {"score": score, "select": select, "probe": probe, "repair": None if repair == "auto" else repair}
            if unread := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"experts are dropped and nothing else, so nothing reads {unread[0]}; give a sparsity")
            repair = None
        check_batches(batches)
        batches, inner = list(batches), unwrapped_model(model)
        walk = Walk(inner, eligible(inner, include, exclude).weights, batches, offload)
        with progress_line(progress, "experts") as report:
            walk.meter.begin(report, len(walk.samples))
            dropped = drop_experts_(walk, experts, batch_size)
    dropping = time.perf_counter() - began
    try:
        score, repair = method(batches, score, probe, repair)
        plan = Plan(score, select, loss, include, exclude, batch_size, offload, checkpointing, repair, moments or {})
        job = Job(model, batches, plan)
        with job.open(), progress_line(progress, "prune") as report:
            result = job.prune(sparsity, probe, Start(state=state), progress=report)
    except BaseException:
        if dropped is not None:
            dropped.undo_()
        raise
    if dropped is not None:
        result.experts, result.parts["experts"] = dropped, dropping
        result.seconds, result.forwards = result.seconds + dropping, result.forwards + dropped.forwards
    return result


def method(
    batches: Any, score: ScoreLike | None, probe: Probe | None, repair: Repair | Literal["auto"] | None
) -> tuple[ScoreLike | None, Repair | None]:
    """Score and repair that stand for what was left open; no score stands for the solver."""
    has_batches = not (isinstance(batches, Sized) and len(batches) == 0)
    if not has_batches and batches != ():
        raise ValueError("no calibration samples were given: batches is empty; leave it out to prune by magnitude")
    if repair == "auto":
        repair = Repair() if has_batches and probe is None else None
    if repair is not None and not isinstance(repair, Repair):
        raise ValueError(f"repair is Repair(...), or None for masks alone, got {repair!r}")
    if repair is not None and not has_batches:
        raise ValueError("a repair needs calibration samples: give batches, or leave out repair")
    if score is None and (repair is None or probe is not None):
        score = "magnitude"
    return score, repair


@dataclass(frozen=True)
class Plan:
    """What is the same for every level: strategy, loss, and which weights."""

    score: ScoreLike | None = "magnitude"  # None: the solver of the repair finds which weights stay
    select: Selector | None = None
    loss: Loss | None = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    batch_size: int | None = None
    offload: str | torch.device | None = None  # where blocks go one at a time
    checkpointing: bool = False
    repair: Repair | None = None
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # Adam's second ones, by weight


@dataclass(frozen=True)
class _Counted(Selector):
    """By layer, with numbers that are known."""

    num_drop: Mapping[str, int]
    group = "layer"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        return [Quota((shape.name,), shape.numel, self.num_drop[shape.name]) for shape in shapes]


@dataclass
class Start:
    """Where a level begins: the masks so far, and the weights of this level that are done."""

    live: Mapping[str, Tensor] = field(default_factory=dict)  # packed; for a missing name all that is not zero
    done: Probed | None = None
    state: Folder | None = None  # of a repair
    masks: Mapping[str, Tensor] | None = None  # packed: what this level has chosen before, to be repaired again


class Job:
    """A model with its samples and strategy; levels of pruning can be run on it one after another."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], plan: Plan) -> None:
        if plan.batch_size is not None and not (isinstance(plan.batch_size, Integral) and plan.batch_size >= 1):
            raise ValueError(f"batch_size is a number of samples, at least 1, or None, got {plan.batch_size!r}")
        if not isinstance(model, nn.Module):
            raise ValueError(f"the first argument is a model, then come batches, got {type(model).__name__}")
        if isinstance(plan.select, type):
            raise ValueError(f"select is a selector, {plan.select.__name__}(), got the class itself")
        self.model = unwrapped_model(model)
        self.plan = plan
        found = eligible(self.model, plan.include, plan.exclude)
        warn_if_much_stays_dense(self.model, found)
        weights = found.weights
        self.weights = {weight.name: weight for weight in weights}
        if sharded := [weight.name for weight in weights if is_dtensor(weight.parameter)]:
            raise ValueError(f"{sharded[0]} is sharded over ranks; prune the whole model in one process, then shard it")
        self.walk = Walk(self.model, weights, batches, plan.offload)
        self.clock = Clock(self.walk.device)
        self.select = plan.select or (PerLayer() if plan.score is None else default_select(plan.score))
        self.strategy = Strategy(self.walk, self.engine, plan.score or "magnitude", self.select)
        self._engine: Engine | None = None
        self._repair_forwards = 0
        self._is_open = False
        self._is_checked = False  # the model has run on the first sample

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model as it is worked on; afterwards all but its weights is as before."""
        with self.walk.open():
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

    def engine(self) -> Engine:
        """The engine of the model's gradients, made when it is first asked for."""
        if self._engine is None:
            objective = Objective(self.model, self.plan.loss)
            objective.check(self.walk.batch(next(self.walk.samples.chunks(1))))
            self.walk.meter.show("inspection of the model")
            with self.clock.part("inspection"):
                self._engine = Engine(self.walk, objective, self.plan.batch_size, self.plan.checkpointing)
        return self._engine

    def _counts(self) -> tuple[int, int]:
        """Passes of one sample so far: forward and backward, forward alone."""
        engine = self._engine
        forwards = self.strategy.forwards + self._repair_forwards + (engine.forwards if engine else 0)
        return (engine.passes if engine else 0, forwards)

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
            raise ValueError(f"sparsity must be a number in [0, 1), as 0.5 for a half, got {sparsity!r}")
        began, peak, start = time.perf_counter(), Peak(self.walk.device), start or Start()
        passes, forwards = self._counts()
        self.clock.seconds = {}
        result = Result(self.weights, {}, {})
        try:
            self.walk.meter.begin(progress, self._num_steps(probe))
            with eagerly():
                if not self._is_checked and (self.plan.repair or probe or self._num_passes(probe)):
                    self.walk.check_model()
                    self._is_checked = True
                done = "probed" if probe else "repaired" if self.plan.repair else "pruned"
                self._level(result, sparsity, probe, start, self._on_finished(finished, done))
            self.walk.meter.finish()
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
        if isinstance(self.select, PerLayer) and self.select.allocate in ("fisher", "moments"):
            with self.clock.part("strategy"):
                self.strategy.select = self._allocated(self.select.allocate, sparsity, live)
        if start.masks is not None:
            result.candidates = {name: live[name] & ~start.masks[name] for name in self.weights}
            self._repair(result, start.masks, sparsity, live, start, finished)
            return
        if self.plan.score is None and probe is None:
            result.candidates = live  # until the solver has chosen
            self._repair(result, None, sparsity, live, start, finished)
            result.candidates = {name: live[name] & ~result.packed[name] for name in self.weights}
            return
        pool = probe.pool_sparsity(sparsity) if probe else sparsity
        with self.clock.part("strategy"):
            keep = self.strategy.keep(pool, live)
            exact = self.strategy.keep(sparsity, live) if pool != sparsity else keep
        result.candidates = {name: live[name] & ~keep[name] for name in self.weights}
        if probe is None:
            if self.plan.repair is not None:
                self._repair(result, keep, sparsity, live, start, finished)
                return
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
            self.walk.meter.step("what was done before", len(done))
        with self.clock.part("records"):
            found = prober.run(finished, done)
        result.ratios, result.taus = found.ratios, found.taus
        result.packed = {name: live[name] & ~found.pruned[name] for name in self.weights}
        if self.plan.repair is not None:
            result.originals.restore_()

            def repair(result: Result) -> None:
                with nullcontext() if self._is_open else self.open(), torch.no_grad(), eagerly():
                    self._repair(result, result.packed, sparsity, live, start, self._on_finished(None, "repaired"))

            result.repair_again = repair
            repair(result)

    def _repair(
        self,
        result: Result,
        masks: Mapping[str, Tensor] | None,
        sparsity: float,
        live: Mapping[str, Tensor],
        start: Start,
        finished: Finished,
    ) -> None:
        """Repair masks that are known, or have the solver find them."""
        assert self.plan.repair is not None
        self.walk.meter.show("order of the layers")
        num_drop = self._num_drop(sparsity, live)
        walk = RepairWalk(
            self.walk,
            self.plan.repair,
            keep(self.strategy.select, sparsity) if num_drop is None else keep_all_but(num_drop),
            result.originals,
            num_drop=num_drop,
            masks=masks,
            live=live if start.live else None,
            size=self.plan.batch_size,
            clock=self.clock,
            state=self._state(start.state, sparsity),
        )
        walk.run(lambda names: finished(names, Probed()))
        if self.plan.repair.batch_norm:
            self.walk.meter.show("statistics of batch norms")
            with self.clock.part("batch norms"):
                renew_batch_norms(self.walk, walk.streams.blocks, walk.streams.size, result.originals)
        result.tuned_whole = walk.tune_whole()
        result.packed, result.repairs, result.tuned = walk.packed, walk.found, walk.tuned
        result.not_tuned = walk.not_tuned
        self._repair_forwards += walk.streams.forwards
        self.changed()

    def _state(self, folder: Folder | None, sparsity: float) -> RepairState | None:
        if folder is None:
            return None
        settings = {"sparsity": sparsity, **self.settings(), "repair": self.plan.repair}
        return RepairState(folder, settings, self.weights)

    def settings(self) -> dict[str, Any]:
        """What the masks follow from, beside the model and the sparsity."""
        found: dict[str, Any] = {"score": self.plan.score, "select": self.select}
        found |= {"samples": self.walk.samples.digest()}
        allocate = getattr(self.select, "allocate", None)
        if allocate == "moments":
            found["moments"] = digest([(name, self.plan.moments.get(name)) for name in self.weights])
        if self.plan.loss is not None and (allocate == "fisher" or self.plan.score in ("fisher", "path")):
            found["loss"] = self.plan.loss
        return found

    def _num_drop(self, sparsity: float, live: Mapping[str, Tensor]) -> dict[str, int] | None:
        """How many of each weight go; None where rows or neighbours are compared by themselves."""
        select = self.strategy.select
        if select.group == "all":
            masks = self.strategy.keep(sparsity, live)
            return {name: self._num_pruned(name, masks) for name in self.weights}
        shapes = [Shape(name, tuple(weight.parameter.shape), weight.outputs) for name, weight in self.weights.items()]
        pruned = {name: self._num_pruned(name, live) for name in self.weights}
        quotas = select.quota(shapes, sparsity, pruned)
        return {quota.names[0]: quota.num_drop for quota in quotas} if select.group == "layer" else None

    def _allocated(self, how: str, sparsity: float, live: Mapping[str, Tensor]) -> Selector:
        """By layer, with about as many of each as one global selection would prune."""
        if how == "moments":
            masks = Global().packed(moment_sources(self.walk.weights, self.plan.moments), sparsity, live)
        else:
            masks = Strategy(self.walk, self.engine, "fisher", Global()).keep(sparsity, live)
        sizes = [weight.parameter.numel() for weight in self.weights.values()]
        wish, gone = ([self._num_pruned(name, packed) for name in self.weights] for packed in (masks, live))
        return _Counted(dict(zip(self.weights, clipped(wish, sizes, sparsity, gone), strict=True)))

    def _num_pruned(self, name: str, packed: Mapping[str, Tensor]) -> int:
        return self.weights[name].parameter.numel() - int(bits.count(packed[name]))

    def live(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Packed bits of what is not zero, within ``given``: a weight that is zero counts as pruned."""
        found = {name: bits.pack(weight.parameter.detach() != 0) for name, weight in self.weights.items()}
        return {name: here & given[name] if name in given else here for name, here in found.items()}

    def _num_steps(self, probe: Probe | None) -> int:
        """Of a level, for its progress: weights, samples that a choice reads, and epochs of tuning."""
        num_passes = self._num_passes(probe)
        num = len(self.weights) + (num_passes * len(self.walk.samples) if num_passes else 0)
        if self.plan.repair is None:
            return num
        distill = self.plan.repair.distill
        tuned = len(self.walk.blocks) * distill.epochs + distill.whole_epochs if distill else 0
        return num + tuned + (len(self.weights) if probe is not None else 0)

    def _num_passes(self, probe: Probe | None) -> int:
        """Over all samples, that score, allocation and a joint probe take."""
        num = self.strategy.num_passes if self.plan.score is not None else 0
        num += getattr(self.select, "allocate", None) == "fisher"
        return num + 2 * (probe is not None and probe.schedule == "joint")

    def _on_finished(self, finished: Finished | None, done: str) -> Finished:
        """Called when a group is ``done``: probed, repaired or pruned."""

        def call(names: Sequence[str], found: Probed) -> None:
            if finished is not None:
                finished(names, found)
            self.walk.meter.step(f"{done} {names[-1]}", len(names))

        return call
