"""Pruning while training: the optimizer's own step drives score, select, mask and apply."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from . import validation
from .eligible import Weight, eligible, warn_if_much_stays_dense
from .input_statistics import InputNorms
from .masking import ByHooks, InsideStep, Progress, check_state, is_initialising, unwrapped
from .masks import Masks, MaskStore, check_copies, digest, load_masks, unpack_like, unpack_saved_masks
from .ops.lazy import Lazy
from .ops.machine import is_capturing
from .ops.shard import together
from .optim import AdamWPrune
from .owners import check_free, claim, release
from .ranks import gather, is_dtensor, local, local_block, ranks_of, shard_of, shards_of
from .rate import Rate, lr_factors_of
from .regrow import Regrow, regrown_masks
from .reloaded import ReloadGuard
from .schedule import Schedule, progress_text
from .score import SCORES
from .select import Global, Selector, Shape
from .sparsity_report import SparsityReport, report
from .statistics import MOMENTS, Movement, check_moments, is_skipped, score_of, sources, without_gradient

LATER = "if no gradient comes before the first event, the event raises: exclude them, or pass no_gradient='dense'"


@dataclass(frozen=True)
class Event:
    """What one pruning event did; ``on_event`` is called with it."""

    step: int
    sparsity: float  # of the schedule
    seconds: float
    newly_pruned: int
    regrown: int = 0  # weights that came back
    bytes_exchanged: int = 0  # sent by this rank in sums over ranks
    rates: tuple[float, ...] = ()  # factor on the learning rate of each prunable weight, if rates follow densities


class Pruner:
    """Prunes a model while it trains: holds the masks; the optimizer's own step drives it.

    At an event: score -> select -> mask -> apply. Between events only gradients are masked, which keeps pruned weights
    at zero through decay, momentum and clipping; ``AdamWPrune`` masks them inside its step. Optimizers that mix the
    elements of a weight (Muon, LBFGS), or come from outside torch, also have pruned weights zeroed after each step.
    Optimizer state of a weight's shape must be plain floating-point tensors, not 8-bit codes.

    ``score`` is a name in SCORES, or a function whose argument names say what it reads (``weight``, ``grad``,
    ``exp_avg``, ``exp_avg_sq``, ``step``, ...). ``masks`` are the boolean masks to start from, by name, or ``"zeros"``
    for the zeros in the weights; without ``schedule`` they never change. ``every`` is the number of steps between
    events; by default a ramp has about 20 events. ``rate`` raises the learning rates of weight matrices as they lose
    density. ``regrow`` lets pruned weights come back until the ramp ends. Globs over names: ``include`` adds to the
    weights that are pruned by default, ``only`` restricts them, and ``exclude`` wins.

    Weights loaded without the pruner's state may be non-zero where the masks prune. The next step after the model's
    ``load_state_dict``, and every event, zeroes them again and warns once; with ``reloaded="raise"`` it raises a
    ValueError, and all ranks must load sharded weights: noticing that only one did would need communication at every
    step. If the optimizer has trained before and more than 5 % of the weights are zeros outside the masks, the first
    step raises, as does the step after an optimizer's state was loaded without masks; ``masks={}`` lets them fill.
    A step warns if part of the saved state was not loaded.

    A weight belongs to one Pruner at a time, and only that Pruner's optimizer may step it, until ``remove``. A Pruner
    over another optimizer takes the weights over with a warning, for example when a notebook cell runs again.

    A weight that no gradient has reached, such as an unused pooler, cannot be ranked by gradients or moments. The first
    step warns about it. The first event raises, or leaves it dense with ``no_gradient="dense"``.

    On several ranks the masks equal those of one process. Create the Pruner after DDP or ``fully_shard``, on every
    rank. Events are then collective; with DTensors, so are ``sparsity``, ``report``, ``digest``, ``full_masks``,
    ``state_dict`` and ``load_state_dict``. ``group`` is the group of ranks that train this model, if not all do.
    """

    @validation.explained
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        score: str | Callable[..., Tensor] = "bitter7",
        select: Selector = Global(),
        schedule: Schedule | None = None,
        every: int | None = None,
        regrow: Regrow | None = None,
        rate: Rate | None = None,
        masks: Mapping[str, Tensor] | Literal["zeros"] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        only: str | Sequence[str] = (),
        reloaded: Literal["zero", "raise"] = "zero",
        no_gradient: Literal["raise", "dense"] = "raise",
        score_options: Mapping[str, Any] | None = None,
        score_dtype: torch.dtype = torch.float32,
        on_event: Callable[[Event], None] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        validation.check_options(locals())
        optimizer = unwrapped(optimizer)
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            problem = "a Pruner takes a model, then the optimizer that trains it: Pruner(model, optimizer, ...)"
            raise ValueError(f"{problem}; got {type(model).__name__} and {type(optimizer).__name__}")
        schedule = schedule and schedule.over(None)  # refuses fractions: the length of the run is not known here
        self.model, self.optimizer, self.regrow = model, optimizer, regrow
        self.select, self.schedule = select, schedule
        self.every: int = getattr(schedule, "period", 1) if every is None else every
        self.score_options = dict(score_options or {})
        self.score = score_of(score, self.score_options)
        self._score_name = score if isinstance(score, str) else getattr(score, "__name__", type(score).__name__)
        self.score_dtype, self.on_event, self.reloaded = score_dtype, on_event, reloaded
        self.no_gradient = no_gradient
        self._reads = {*self.score.reads, *(regrow.reads if regrow else ())}
        trained = [p for of_group in optimizer.param_groups for p in of_group["params"]]
        self._eligible = eligible(model, include, exclude, only, trained=trained)
        warn_if_much_stays_dense(model, self._eligible)
        self._weights = {weight.name: weight.parameter for weight in self._eligible.weights}
        check_free(self._weights, optimizer)
        validation.check_devices(self._weights)
        self._ranks = ranks_of(self._weights, group)
        self._shards = shards_of(self._weights, self._ranks)
        shapes = [Shape(w.name, tuple(w.parameter.shape), w.outputs) for w in self._eligible.weights]
        validation.check_together(select, schedule, regrow, shapes, self._shards is not None)
        validation.check_eps(self._weights, optimizer)
        self._progress = Progress(schedule.end if regrow and schedule else None)
        self._movement = Movement(self._weights) if "movement" in self.score.reads else None
        self._inputs = InputNorms(self._eligible.weights, self._ranks) if "input_norm" in self.score.reads else None
        is_ours = isinstance(optimizer, AdamWPrune)  # whose step itself reads masks from its state
        self._store = MaskStore(self._weights, optimizer, self._ranks, self._shards, in_empty_state=is_ours)
        self._bits, self._holders = self._store.bits, self._store.holders
        self._masking = (InsideStep if is_ours else ByHooks)(self._store, self._progress, self._movement)
        self._guard = ReloadGuard(model, self._masking, reloaded, masks)
        self.rate = rate if rate and rate.power else None
        self._lr_factors = lr_factors_of(optimizer, self._weights) if self.rate else None
        if self._masking.start(masks) and schedule:
            self._guard.note("masks")
        claim(self._store, self.remove)
        if self._lr_factors:
            self._lr_factors.attach()  # before the masking, whose hooks read the lr that the step will use
            self._set_lr_factors()
        self._guard.attach()
        self._masking.attach()
        self._handles = [
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),
            optimizer.register_load_state_dict_post_hook(self._read_state),
            optimizer.register_state_dict_pre_hook(self._store.before_save),
            optimizer.register_state_dict_post_hook(unpack_saved_masks),
        ]
        self._collect_inputs()

    def __repr__(self) -> str:
        """Options and progress, from a count that is kept: printing a Pruner is cheap and never collective."""
        if "_handles" not in self.__dict__:  # its constructor raised
            return object.__repr__(self)
        num_weights = sum(p.numel() for p in self._weights.values())
        return (
            f"Pruner(score={self._score_name}, schedule={self.schedule}, step={self.step}, "
            f"sparsity={1 - self._store.num_kept / max(num_weights, 1):.4f} of {num_weights:,} "
            f"in {len(self._weights)} weights)"
        )

    def __reduce__(self) -> str:
        """Refuse copies and pickles: no optimizer would drive them."""
        what = "save its state_dict(), or make a new one for copies of the model and optimizer, which hold the masks"
        raise TypeError(f"a Pruner cannot be copied or pickled, since it is attached to its optimizer; {what}")

    @property
    def step(self) -> int:
        """Optimizer steps so far; set it yourself if you replay a CUDA graph of the step."""
        return self._progress.step

    @step.setter
    def step(self, step: int) -> None:
        self._progress.step = step

    @property
    def masks(self) -> Masks:
        """Boolean masks by name, True where the weight stays; for a DTensor, the mask of this rank's shard."""
        return Masks({name: local(weight) for name, weight in self._weights.items()}, self._bits)

    def full_masks(self) -> dict[str, Tensor]:
        """Boolean masks of the whole weights; collective if they are sharded."""
        if self._shards is None:
            return dict(self.masks)
        return {name: gather(mask.to(torch.uint8), self._shards[name]).bool() for name, mask in self.masks.items()}

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights, counted from their values."""
        return self.report().sparsity

    def report(self) -> SparsityReport:
        """Sparsity of every weight matrix, counted from its zeros, why some stay dense, and progress of the ramp."""
        validation.check_parameters(self.model, self._weights)
        lr_factors, progress = self._lr_factors.factors if self._lr_factors else {}, None
        if isinstance(self.schedule, Schedule):
            progress = progress_text(self.schedule, self.step)
        return report(self.model, self._eligible, self._holders, lr_factors, progress)

    def digest(self) -> str:
        """Hex string that depends on the masks alone, not on the number of ranks."""
        return digest(self.masks, self._shards)

    def mask_gradients(self) -> None:
        """Mask all gradients now. Call it before clipping under FSDP2's CPU offload, which masks only at the step."""
        self._masking.mask_gradients()

    @torch.no_grad()
    def apply_to(self, model: nn.Module) -> None:
        """Zero what the masks prune in a copy of the model, such as an average of its weights over steps.

            averaged = torch.optim.swa_utils.AveragedModel(model)
            ...  # train, and averaged.update_parameters(model)
            pruner.apply_to(averaged)  # before it is evaluated or saved

        The copy may be wrapped, cast, on another device or sharded differently; if either is sharded, the call
        is collective. The copy needs every prunable weight under its name and in its shape.
        """
        weights = validation.copied_weights(model, self._weights)
        for name, weight in weights.items():
            mask, ranks = unpack_like(self._weights[name], self._bits.get(name)), ranks_of({name: weight})
            shard = shard_of(name, weight, ranks) if ranks and is_dtensor(weight) else None
            keep = local_block(mask, weight, shard).to(weight.device)
            local(weight).masked_fill_(keep == 0, 0)

    @torch.no_grad()
    def update(self) -> None:
        """Run one event: find new masks at the schedule's sparsity for this step, and apply them.

        ``optimizer.step()`` calls it. If you replay a CUDA graph of the step, increase ``pruner.step`` yourself and
        call this when ``pruner.schedule.is_event(pruner.step, pruner.every)``; the graph stays valid.
        """
        sparsity = self.schedule(self.step) if self.schedule else 0.0
        if self._inputs:
            self._inputs.listen(False)
        if sparsity == 0:
            self._progress.is_due = False
            return
        started = time.perf_counter()
        if self._ranks:
            self._ranks.num_bytes = 0
        if self.no_gradient == "dense":
            self._leave_dense()
        norms = self._inputs.norms() if self._inputs else {}
        scores = together(self._ranks, lambda: self._scores(norms))
        before, regrown = self._store.num_kept, 0
        if self.regrow and (share := self.regrow.share(self.schedule, self.step)):
            back = partial(self.regrow.sources, self._eligible.weights, self.optimizer, self._shards)
            swap = partial(regrown_masks, self.select, scores, sparsity, (self._bits, before), share, back)
            masks, regrown = together(self._ranks, swap)
        else:
            masks = together(self._ranks, lambda: self.select.packed(scores, sparsity, self._bits, before))
        check_copies(self._ranks, self._weights, masks)
        self._progress.is_due = False  # not before: an event that failed is tried again after the next step
        self._masking.apply_(masks)
        if self.select.group == "all" and not self._lr_factors:  # no need to count
            [quota] = self.select.quota_of(scores, sparsity)
            self._store.num_kept = min(before, quota.size - quota.num_drop)
        else:
            self._store.count()
        self._set_lr_factors()
        newly_pruned = before - self._store.num_kept + regrown
        if self.on_event:
            num_bytes = self._ranks.num_bytes if self._ranks else 0
            lr_factors = tuple(self._lr_factors.factors.values()) if self._lr_factors else ()
            seconds = time.perf_counter() - started
            self.on_event(Event(self._progress.step, sparsity, seconds, newly_pruned, regrown, num_bytes, lr_factors))

    def remove(self) -> None:
        """Remove the hooks; the weights keep their zeros until an optimizer changes them."""
        for handle in self._handles:
            handle.remove()
        self._guard.detach()
        self._masking.detach()
        if self._lr_factors:
            self._lr_factors.detach()
            self._lr_factors = None
        if self._inputs:
            self._inputs.listen(False)
        release(self._store)
        for parameter in self._weights.values():
            self.optimizer.state.get(parameter, {}).pop("mask", None)

    def state_dict(self, *, unpacked: bool | None = None) -> dict[str, Any]:
        """Step, masks and movement sums: tensors and numbers only.

        Masks are packed bits. With ``unpacked``, the default for DTensors, every weight has a mask of zeros and ones
        in its own shape and placement, which ``torch.distributed.checkpoint`` loads at any world size.
        """
        if unpacked is False and self._shards:
            problem = "masks of DTensors cannot be packed, since the bits do not say which shard they belong to"
            raise ValueError(f"{problem}; pass unpacked=True")
        if unpacked is None:
            unpacked = any(map(is_dtensor, self._weights.values()))
        masks = {name: mask.clone() for name, mask in self._bits.items()}
        if unpacked:
            masks = {name: unpack_like(weight, self._bits.get(name)) for name, weight in self._weights.items()}
        return {
            "step": self._progress.step,
            "due": self._progress.is_due,
            "masks": masks,
            "movement": {name: s.clone() for name, s in self._movement.sums.items()} if self._movement else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``: take over its masks, and zero what they prune in weights and optimizer state.

        If the schedule has ended at a higher sparsity than these masks have, the next step is an event.
        """
        sums = self._movement.sums if self._movement else {}
        masks = together(self._holders, lambda: load_masks(state, self._store, sums))
        check_state(self._weights, self.optimizer)
        self._progress.step, self._progress.is_due = int(state["step"]), bool(state["due"])
        self._guard.note_pruner(masks)
        self._masking.apply_({name: self._store.full(name) for name in self._bits} | masks)
        self._store.count()
        self._set_lr_factors()
        self._progress.is_due = self._progress.is_due or self._falls_short()
        for name, value in state["movement"].items():
            local(sums[name]).copy_(local_block(value, self._weights[name], self._store.shards.get(name)))
        self._collect_inputs()

    def _read_state(self, *_: object) -> None:
        self._guard.note("optimizer")
        if self._store.read_state() and self.schedule:
            self._guard.note("masks")
        self._set_lr_factors()

    def _set_lr_factors(self) -> None:
        """Let learning rates follow the densities as the masks have them now."""
        if self.rate and self._lr_factors:
            self._lr_factors.set({name: self.rate(density) for name, density in self._store.densities.items()})

    def _after_step(self, *_: object) -> None:
        if is_skipped(self.optimizer) or is_initialising(self.optimizer):
            return
        if is_capturing():
            self._masking.check_captured(masks_change=self.schedule is not None)
            return  # a captured step is recorded, not run
        self.step += 1
        if self.step == 1:
            validation.check_parameters(self.model, self._weights)
            check_state(self._weights, self.optimizer)
            if self.schedule:
                check_moments(self._eligible.weights, self.optimizer, self.score)
            if self.regrow:
                self.regrow.check_moments(self.optimizer)
            odd = without_gradient(self._eligible.weights, self.optimizer, self._reads)
            if self.schedule and self.no_gradient == "raise" and odd:
                warnings.warn(f"no gradient has reached {_listed(odd)} in the first step; {LATER}", stacklevel=2)
        self._store.write_state()
        if self.schedule and self.schedule.is_event(self.step, self.every):
            self._progress.is_due = True
        waits = getattr(self.optimizer, "is_holding", False) and not self._reads.isdisjoint(MOMENTS)  # SPAM reset them
        try:
            if self._progress.is_due and not waits:
                self.update()
        finally:
            self._collect_inputs()

    def _leave_dense(self) -> None:
        """Prune no weight that no gradient has reached, on any rank."""
        names = {weight.name for weight in without_gradient(self._eligible.weights, self.optimizer, self._reads)}
        if self._ranks:
            missing = self._ranks.total(torch.tensor([name in names for name in self._weights], dtype=torch.int64))
            names = {name for name, num in zip(self._weights, missing.tolist(), strict=True) if num == self._ranks.size}
        odd = [weight for weight in self._eligible.weights if weight.name in names]
        if not odd or len(odd) == len(self._weights):  # which the score refuses
            return
        for weight in odd:
            self._eligible.weights.remove(weight)
            self._eligible.dense[weight.name] = "no gradient has reached it"
            del self._weights[weight.name]
            self._bits.pop(weight.name, None)
            self.optimizer.state.get(weight.parameter, {}).pop("mask", None)
        self._store.count()
        warnings.warn(f"no gradient has reached {_listed(odd)}: left dense", stacklevel=2)

    def _scores(self, input_norms: Mapping[str, Tensor]) -> list[Lazy]:
        check_state(self._weights, self.optimizer)
        self._guard.check_event()
        collected = {"movement": self._movement.sums if self._movement else {}, "input_norm": input_norms}
        how = {"dtype": self.score_dtype, "more": collected, "shards": self._shards}
        return sources(self._eligible.weights, self.optimizer, self.score, self.score_options, **how)

    def _falls_short(self) -> bool:
        """Whether the selector would prune more than the masks do, and no event of the schedule is left for it."""
        if self.schedule is None or self.step < self.schedule.end:
            return False
        weights, row = self._eligible.weights, SCORES["random"]  # how many are dropped depends on no score
        scores = sources(weights, self.optimizer, row, {}, more={}, shards=self._shards)
        return self.select.prunes_more(scores, self.schedule(self.step), self._bits, self._store.num_kept)

    def _collect_inputs(self) -> None:
        """Listen to the modules' inputs during the step that an event follows."""
        if self._inputs and self.schedule:
            self._inputs.listen(self._progress.is_due or self.schedule.is_event(self.step + 1, self.every))


def _listed(weights: Sequence[Weight], most: int = 4) -> str:
    names = ", ".join(weight.name for weight in weights[:most])
    return names + (f" and {len(weights) - most} more" if len(weights) > most else "")
