"""Pruning while training: the optimizer's own step drives score, select, mask and apply."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .asked import check_options, check_order, check_together
from .eligible import eligible
from .gradients import MaskedGradients, Movement, check_captured, is_initialising, is_skipped, unwrapped
from .held import HeldMasks
from .inputs import InputNorms
from .mask import Masks, check_copies, digest, full_masks
from .ops.part import together
from .optim import AdamWPrune
from .regrow import Regrow, keep_warm, selected
from .saved import checked_masks, reshard_masks, saved_masks, taken_sums
from .schedule import Schedule
from .score import SCORES
from .select import Global, Selector, Shape
from .shard import is_dtensor, local, parts_of, ranks_of
from .stats import MOMENTS, check_eps, check_moments, check_parameters, score_of, sources
from .summary import Event, Report, report


class Pruner:
    """Holds the masks of a model in training; the optimizer's own step drives it.

    At an event: score -> select -> mask -> apply. Between events nothing is done here but to mask
    gradients, which keeps what is zero at zero through decay, momentum and clipping; with
    ``AdamWPrune`` the step itself does that. Behind an optimizer that mixes the elements of a weight, as Muon and
    LBFGS do, and behind any that torch does not bring, the pruned are zeroed again after each step.

    ``score`` is a name of SCORES or a function of what its arguments name (``weight``, ``grad``,
    ``exp_avg``, ``exp_avg_sq``, ``step``, ...). ``masks`` are boolean masks by name to begin with, or
    ``"zeros"`` for the zeros that the weights have; without ``schedule`` they are only held. ``regrow`` lets
    pruned weights come back until the ramp ends.

    Over ranks masks are those of one process. Make it after DDP or ``fully_shard``, on every rank; events are
    collective then, and for DTensors ``sparsity``, ``report``, ``digest``, ``full_masks``, ``state_dict`` and loading
    too. ``group`` are the ranks that train this model together, if not all do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        score: str | Callable[..., Tensor] = "bitter7",
        select: Selector = Global(),
        schedule: Schedule | None = None,
        every: int = 50,
        regrow: Regrow | None = None,
        masks: Mapping[str, Tensor] | Literal["zeros"] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        score_options: Mapping[str, Any] | None = None,
        score_dtype: torch.dtype = torch.float32,
        on_event: Callable[[Event], None] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        check_options(
            {"schedule": schedule, "select": select, "every": every, "regrow": regrow, "masks": masks}
            | {"score": score, "score_options": score_options, "score_dtype": score_dtype, "on_event": on_event}
        )
        optimizer = unwrapped(optimizer)
        check_order(model, optimizer)
        schedule = schedule and schedule.over(None)  # fractions are for those who know the length of the run
        self.model, self.optimizer, self.regrow = model, optimizer, regrow
        self.select, self.schedule, self.every = select, schedule, every
        self.score_options = dict(score_options or {})
        self.score = score_of(score, self.score_options)
        self._score_name = score if isinstance(score, str) else getattr(score, "__name__", type(score).__name__)
        self.score_dtype, self.on_event = score_dtype, on_event
        self.step = 0
        trained = [p for of_group in optimizer.param_groups for p in of_group["params"]]
        self._eligible = eligible(model, include, exclude, trained)
        self._weights = {weight.name: weight.parameter for weight in self._eligible.weights}
        self._num_weights = sum(p.numel() for p in self._weights.values())
        self._ranks = ranks_of(self._weights, group)
        self._parts = parts_of(self._weights, self._ranks)
        shapes = [Shape(w.name, tuple(w.parameter.shape), w.outputs) for w in self._eligible.weights]
        check_together(select, schedule, regrow, shapes, self._parts is not None)
        check_eps(self._weights, optimizer)
        self._held = HeldMasks(self._weights, optimizer, self._ranks, self._parts)
        self._held.check_free()
        self._bits, self._holders = self._held.bits, self._held.holders
        self._due = False
        self._movement = Movement(self._weights) if "movement" in self.score.reads else None
        self._inputs = InputNorms(self._eligible.weights, self._ranks) if "input_norm" in self.score.reads else None
        me = weakref.ref(self)  # what hangs on the parameters must not keep the model alive
        self._gradients = MaskedGradients(self._weights, self._bits, lambda: (it := me()) is not None and it._regrowing)
        self._held.forget = self._gradients.forget
        self._held.adopt(masks, self._regrowing)
        self._handles = self._attach()
        self._collect_inputs()

    def __repr__(self) -> str:
        """What it was asked for and how far it is, from counts that are kept: nothing is counted or summed for it."""
        if "_handles" not in self.__dict__:  # it was refused
            return object.__repr__(self)
        return (
            f"Pruner(score={self._score_name}, schedule={self.schedule}, step={self.step}, "
            f"sparsity={1 - self._held.num_kept / max(self._num_weights, 1):.4f} of {self._num_weights:,} "
            f"in {len(self._weights)} weights)"
        )

    def __reduce__(self) -> str:
        """Refuse copies and pickles: they would hang on no optimizer and hold nothing."""
        what = "save its state_dict(), or make one for copies of the model and of the optimizer, which has the masks"
        raise TypeError(f"a Pruner cannot be copied or pickled, since it hangs on its optimizer; {what}")

    @property
    def masks(self) -> Masks:
        """Boolean masks by name, True where the weight stays; all True before the first event.

        Of a DTensor the mask of what this rank holds.
        """
        return Masks({name: local(weight) for name, weight in self._weights.items()}, self._bits)

    def full_masks(self) -> dict[str, Tensor]:
        """Boolean masks of the whole weights; collective if ranks hold parts of them."""
        return full_masks(self.masks, self._parts)

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights, counted."""
        return self.report().sparsity

    def report(self) -> Report:
        """Sparsity of every weight matrix, from its zeros, and the reason where it stays dense."""
        check_parameters(self.model, self._weights)
        return report(self.model, self._eligible, self._holders)

    def digest(self) -> str:
        """Hex string over all masks, the same for the same masks, by however many ranks they are held."""
        return digest(self.masks, self._parts)

    def mask_gradients(self) -> None:
        """Mask all gradients now: for clipping under FSDP2's CPU offload, where only the step masks them else."""
        self._gradients.mask_all()

    @torch.no_grad()
    def update(self) -> None:
        """One event: find the masks anew at the schedule's sparsity for this step, and apply them.

        The optimizer's own step calls it. Who replays a CUDA graph of the step counts ``pruner.step`` and calls
        it when ``pruner.schedule.is_event(pruner.step, pruner.every)``; the graph stays valid.
        """
        sparsity = self.schedule(self.step) if self.schedule else 0.0
        if self._inputs:
            self._inputs.__exit__()
        if sparsity == 0:
            self._due = False
            return
        started = time.perf_counter()
        if self._ranks:
            self._ranks.num_bytes = 0
        more = {
            "movement": self._movement.sums if self._movement else {},
            "input_norm": self._inputs.norms() if self._inputs else {},
        }
        weights, how = self._eligible.weights, {"dtype": self.score_dtype, "more": more, "parts": self._parts}
        scores = together(self._ranks, lambda: sources(weights, self.optimizer, self.score, self.score_options, **how))
        before = self._held.num_kept
        live, swap = (self._bits, before), None
        if self.regrow:
            back = partial(self.regrow.sources, weights, self.optimizer, self._parts)
            swap = self.regrow.swap(self.schedule, self.step, back)
        masks, regrown = together(self._ranks, lambda: selected(self.select, scores, sparsity, live, swap))
        check_copies(self._ranks, self._weights, masks)
        self._due = False  # not before: an event that failed is tried again after the next step
        self._held.hold(masks, self._regrowing)
        if self.select.group == "all":  # no need to count
            [quota] = self.select.quota_of(scores, sparsity)
            self._held.num_kept = min(before, quota.size - quota.num_drop)
        else:
            self._held.count()
        newly_pruned = before - self._held.num_kept + regrown
        if self.on_event:
            num_bytes = self._ranks.num_bytes if self._ranks else 0
            self.on_event(Event(self.step, sparsity, time.perf_counter() - started, newly_pruned, regrown, num_bytes))

    def remove(self) -> None:
        """Take the hooks off; the weights keep their zeros, and nothing holds them any more."""
        for handle in self._handles:
            handle.remove()
        if isinstance(self.optimizer, AdamWPrune) and self._movement:
            self.optimizer.watch = tuple(watch for watch in self.optimizer.watch if watch != self._movement.add)
        if self._inputs:
            self._inputs.__exit__()
        self._held.release()

    def state_dict(self, *, unpacked: bool | None = None) -> dict[str, Any]:
        """Step, masks and movement sums: tensors and numbers.

        Masks are packed bits. With ``unpacked``, which is the default for DTensors, there is one for every weight,
        zeros and ones in its shape and placement: what ``torch.distributed.checkpoint`` loads at any world size.
        """
        if unpacked is False and self._parts:
            raise ValueError(
                "packed bits of DTensors would not say which part of a weight is theirs; unpacked=True does"
            )
        whole = any(map(is_dtensor, self._weights.values())) if unpacked is None else unpacked
        return {
            "step": self.step,
            "due": self._due,
            "masks": saved_masks(self._weights, self._bits, whole),
            "movement": {name: s.clone() for name, s in self._movement.sums.items()} if self._movement else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; what its masks prune is zeroed in weights and optimizer state.

        Where the schedule is over and asks for more than they prune, in all or in a layer, row or group of the
        selector, the next step makes an event.
        """
        masks = together(self._holders, lambda: checked_masks(state, self._weights, self._movement, self._parts))
        self.step, self._due = int(state["step"]), bool(state["due"])
        self._held.load(masks, self._regrowing)
        self._due = self._due or self._falls_short()
        if self._movement:
            self._movement.load(taken_sums(state["movement"], self._weights, self._parts))
        self._collect_inputs()

    def _attach(self) -> list[RemovableHandle]:
        optimizer, regrowing = self.optimizer, lambda: self._regrowing
        handles = [
            *(keep_warm(optimizer, self._weights.values(), self._held.zero_weights, regrowing) if self.regrow else ()),
            *([optimizer.register_step_post_hook(self._held.zero_weights)] if self._held.needs_zeroing else ()),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),
            optimizer.register_load_state_dict_post_hook(self._held.take_over),
            optimizer.register_state_dict_pre_hook(self._held.before_save),
            optimizer.register_state_dict_post_hook(reshard_masks),
        ]
        if isinstance(optimizer, AdamWPrune):
            optimizer.watch += (self._movement.add,) if self._movement else ()
            return handles
        return handles + self._gradients.attach(optimizer, self._movement)

    def _after_step(self, *_: object) -> None:
        if is_skipped(self.optimizer) or is_initialising(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            check_captured(self._weights if self.schedule else (), self._bits, self._regrowing)
            return  # nothing is counted, since nothing is run
        self.step += 1
        if self.step == 1:
            check_parameters(self.model, self._weights)
            if self.schedule:
                check_moments(self._eligible.weights, self.optimizer, self.score)
            if self.regrow:
                self.regrow.check_moments(self.optimizer)
        self._held.store()
        if self.schedule and self.schedule.is_event(self.step, self.every):
            self._due = True
        try:
            if self._due and not self._waits_for_moments():
                self.update()
        finally:
            self._collect_inputs()

    @property
    def _regrowing(self) -> bool:
        """Whether weights may still come back, so that the moments of pruned ones are kept."""
        return self.regrow is not None and self.schedule is not None and (self._due or self.step < self.schedule.end)

    def _falls_short(self) -> bool:
        """Whether the selector would prune more than the masks do, and no event of the schedule is left for it."""
        if self.schedule is None or self.step < self.schedule.end:
            return False
        weights, row = self._eligible.weights, SCORES["random"]  # how many are dropped depends on no score
        scores = sources(weights, self.optimizer, row, {}, more={}, parts=self._parts)
        return self.select.prunes_more(scores, self.schedule(self.step), self._bits, self._held.num_kept)

    def _waits_for_moments(self) -> bool:
        """Whether SPAM reset the moments too recently for what reads them."""
        reads = {*self.score.reads, *(self.regrow.reads if self.regrow else ())}
        return isinstance(self.optimizer, AdamWPrune) and self.optimizer.is_holding and not reads.isdisjoint(MOMENTS)

    def _collect_inputs(self) -> None:
        """Listen to the modules' inputs during the step that an event follows."""
        if self._inputs and self.schedule:
            self._inputs.listen(self._due or self.schedule.is_event(self.step + 1, self.every))
