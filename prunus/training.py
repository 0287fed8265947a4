"""Pruning while training: the optimizer's own step drives score, select, mask and apply."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .allocate import allocate
from .eligible import eligible
from .gradients import MaskedGradients, Movement, check_captured, is_skipped, unwrapped
from .mask import Masks, digest, packed_masks, saved_bits
from .ops import bits
from .optim import AdamWPrune
from .regrow import Regrow, keep_warm, selected
from .schedule import Ramp, Schedule
from .select import Global, NofM, PerLayer, Selector
from .stats import MOMENTS, InputNorms, check_eps, check_moments, score_of, sources
from .summary import Event, Report, report


class Pruner:
    """Holds the masks of a model in training; the optimizer's own step drives it.

    At an event: score -> select -> mask -> apply. Between events nothing is done here but to mask
    gradients, which keeps what is zero at zero through decay, momentum and clipping; with
    ``AdamWPrune`` the step itself does that.

    ``score`` is a name of SCORES or a function of what its arguments name (``weight``, ``grad``,
    ``exp_avg``, ``exp_avg_sq``, ``step``, ...). ``masks`` are boolean masks by name to begin with, or
    ``"zeros"`` for the zeros that the weights have; without ``schedule`` they are only held. ``regrow`` lets
    pruned weights come back until the ramp ends.
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
    ) -> None:
        if schedule is None and masks is None:
            raise ValueError("say how sparse: pass schedule=Ramp(...), OneShot(...) or Constant(...), or masks to hold")
        if every < 1:
            raise ValueError(f"every is a number of steps, at least 1, got {every}")
        optimizer = unwrapped(optimizer)
        schedule = schedule and schedule.over(None)  # fractions are for those who know the length of the run
        if isinstance(select, NofM) and (isinstance(schedule, Ramp) or (schedule and not select.fits(schedule.final))):
            fitting = f"OneShot({select.sparsity:g}, at=...) or Constant({select.sparsity:g})"
            raise ValueError(f"{select} has one sparsity and goes with {fitting}, got {schedule}")
        if regrow:
            regrow.check(schedule, select)
        self.model, self.optimizer, self.regrow = model, optimizer, regrow
        self.select, self.schedule, self.every = select, schedule, every
        self.score_options = dict(score_options or {})
        self.score = score_of(score, self.score_options)
        self.score_dtype, self.on_event = score_dtype, on_event
        self.step = 0
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._eligible = eligible(model, include, exclude, held)
        self._weights = {weight.name: weight.parameter for weight in self._eligible.weights}
        if isinstance(select, PerLayer) and schedule:
            allocate({name: p.shape for name, p in self._weights.items()}, schedule.final, select.allocate)
        check_eps(self._weights, optimizer)
        self._bits: dict[str, Tensor] = {}
        self._num_kept = self._count_kept()
        self._due = False
        self._movement = Movement(self._weights) if "movement" in self.score.reads else None
        self._inputs = InputNorms(self._eligible.weights) if "input_norm" in self.score.reads else None
        me = weakref.ref(self)  # what hangs on the parameters must not keep the model alive
        self._gradients = MaskedGradients(self._weights, self._bits, lambda: (it := me()) is not None and it._regrowing)
        self._adopt(masks)
        self._handles = self._attach()
        self._collect_inputs()

    @property
    def masks(self) -> Masks:
        """Boolean masks by name, True where the weight stays; all True before the first event."""
        return Masks(self._weights, self._bits)

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights, counted."""
        return self.report().sparsity

    def report(self) -> Report:
        """Sparsity of every weight matrix, from its zeros, and the reason where it stays dense."""
        return report(self.model, self._eligible)

    def digest(self) -> str:
        """Hex string over all masks, the same for the same masks however they are stored."""
        return digest(self.masks)

    @torch.no_grad()
    def update(self) -> None:
        """One event: find the masks anew at the schedule's sparsity for this step, and apply them.

        The optimizer's own step calls it. Who replays a CUDA graph of the step counts ``pruner.step`` and calls
        it when ``pruner.schedule.is_event(pruner.step, pruner.every)``; the graph stays valid.
        """
        self._due = False
        sparsity = self.schedule(self.step) if self.schedule else 0.0
        if self._inputs:
            self._inputs.__exit__()
        if sparsity == 0:
            return
        started = time.perf_counter()
        more = {
            "movement": self._movement.sums if self._movement else {},
            "input_norm": self._inputs.norms() if self._inputs else {},
        }
        weights = self._eligible.weights
        scores = sources(weights, self.optimizer, self.score, self.score_options, dtype=self.score_dtype, more=more)
        before = self._num_kept
        swap = self.regrow.swap(self.schedule, self.step, weights, self.optimizer) if self.regrow else None
        masks, regrown = selected(self.select, scores, sparsity, (self._bits, before), swap)
        self._hold(masks)
        if isinstance(self.select, Global):  # which is exact: no need to count
            total = sum(p.numel() for p in self._weights.values())
            self._num_kept = min(before, total - round(sparsity * total))
        else:
            self._num_kept = self._count_kept()
        newly_pruned = before - self._num_kept + regrown
        if self.on_event:
            self.on_event(Event(self.step, sparsity, time.perf_counter() - started, newly_pruned, regrown))

    def remove(self) -> None:
        """Take the hooks off; the weights keep their zeros, and nothing holds them any more."""
        for handle in self._handles:
            handle.remove()
        if isinstance(self.optimizer, AdamWPrune):
            self.optimizer.watch = None
        if self._inputs:
            self._inputs.__exit__()
        for parameter in self._weights.values():
            self.optimizer.state.get(parameter, {}).pop("mask", None)

    def state_dict(self) -> dict[str, Any]:
        """Step, masks as packed bits, and movement sums: plain tensors and numbers."""
        return {
            "step": self.step,
            "due": self._due,
            "masks": {name: packed.clone() for name, packed in self._bits.items()},
            "movement": {name: s.clone() for name, s in self._movement.sums.items()} if self._movement else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; what its masks prune is zeroed in weights and optimizer state."""
        masks = self._checked(state)
        self.step, self._due = int(state["step"]), bool(state["due"])
        everything = {name: bits.full(p.numel(), p.device) for name, p in self._weights.items() if name in self._bits}
        self._hold(everything | masks)
        self._num_kept = self._count_kept()
        if self._movement:
            self._movement.load(state["movement"])
        self._collect_inputs()

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Packed masks of a state that fits this model and score; else one line and nothing changed."""
        kinds = {"step": int, "due": bool, "masks": dict, "movement": dict}
        if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
            raise ValueError(f"this is not a Pruner's state: it lacks {', '.join(wrong)}")
        for kind in ("masks", "movement"):
            if unknown := set(state[kind]) - set(self._weights):
                raise ValueError(f"the state has {kind} of {min(unknown)}, which is no prunable weight of this model")
        if set(state["movement"]) != set(self._movement.sums if self._movement else ()):
            raise ValueError("the state was saved with another score: one of the two is movement, which keeps sums")
        for name, sums in state["movement"].items():
            if not isinstance(sums, Tensor) or sums.shape != self._weights[name].shape:
                raise ValueError(f"the state's movement of {name} does not fit its shape {self._weights[name].shape}")
        return {name: saved_bits(name, packed, self._weights[name]) for name, packed in state["masks"].items()}

    def _attach(self) -> list[RemovableHandle]:
        optimizer, regrowing = self.optimizer, lambda: self._regrowing
        handles = [
            *(keep_warm(optimizer, self._weights, self._bits, regrowing) if self.regrow else ()),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        if isinstance(optimizer, AdamWPrune):
            optimizer.watch = self._movement.add if self._movement else None
            return handles
        return handles + self._gradients.attach(optimizer, self._movement)

    def _after_step(self, *_: object) -> None:
        if is_skipped(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            check_captured(self._weights if self.schedule else (), self._bits, self._regrowing)
            return  # nothing is counted, since nothing is run
        self.step += 1
        if self.step == 1 and self.schedule:
            check_moments(self._eligible.weights, self.optimizer, self.score)
            if self.regrow:
                self.regrow.check_moments(self.optimizer)
        for name in self._bits:
            self._store(name, stepped=self._weights[name].grad is not None)
        if self.schedule and self.schedule.is_event(self.step, self.every):
            self._due = True
        if self._due and not self._waits_for_moments():
            self.update()
        self._collect_inputs()

    @property
    def _regrowing(self) -> bool:
        """Whether weights may still come back, so that the moments of pruned ones are kept."""
        return self.regrow is not None and self.schedule is not None and (self._due or self.step < self.schedule.end)

    def _after_load(self, _: Optimizer) -> None:
        """Take over the masks that came with an optimizer's state; loading cast them to the weights' dtype."""
        for name, parameter in self._weights.items():
            saved = self.optimizer.state.get(parameter, {}).get("mask")
            if saved is not None:
                self._set_bits(name, saved_bits(name, saved, parameter))
            elif name in self._bits:
                self._store(name)
        self._num_kept = self._count_kept()

    def _waits_for_moments(self) -> bool:
        """Whether SPAM reset the moments too recently for what reads them."""
        reads = {*self.score.reads, *(self.regrow.reads if self.regrow else ())}
        return isinstance(self.optimizer, AdamWPrune) and self.optimizer.is_holding and not reads.isdisjoint(MOMENTS)

    def _collect_inputs(self) -> None:
        """Listen to the modules' inputs during the step that an event follows."""
        if self._inputs:
            self._inputs.__exit__()
            if self.schedule and (self._due or self.schedule.is_event(self.step + 1, self.every)):
                self._inputs.__enter__()

    def _adopt(self, masks: Mapping[str, Tensor] | Literal["zeros"] | None) -> None:
        """Begin with the masks given, with the zeros there are, or with those in the optimizer's state."""
        if isinstance(masks, str):
            if masks != "zeros":
                raise ValueError(f'masks must be boolean tensors by name or "zeros", got {masks!r}')
            self._hold({name: bits.pack(p != 0) for name, p in self._weights.items()})
        elif masks is not None:
            self._hold(packed_masks(masks, self._weights))
        else:
            self._after_load(self.optimizer)
        if isinstance(self.optimizer, AdamWPrune):  # whose step reads masks at no cost: a graph of it must find them
            for name, p in self._weights.items():
                if p.is_cuda and name not in self._bits:
                    self._set_bits(name, bits.full(p.numel(), p.device))
        self._num_kept = self._count_kept()

    def _count_kept(self) -> int:
        """How many prunable weights the masks keep."""
        return sum(int(bits.count(self._bits[n])) if n in self._bits else p.numel() for n, p in self._weights.items())

    def _hold(self, packed: Mapping[str, Tensor]) -> None:
        """Make these the masks and zero what they prune, in weights and, unless it may come back, optimizer state."""
        warm = self._regrowing
        for name, new in packed.items():
            parameter = self._weights[name]
            self._set_bits(name, new)
            bits.zero_(parameter.detach(), new)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "mask" and isinstance(value, Tensor) and value.shape == parameter.shape and not warm:
                    bits.zero_(value, new)

    def _set_bits(self, name: str, packed: Tensor) -> None:
        """Write in place where bits exist, so that a captured graph of the step sees the new mask."""
        if name in self._bits:
            self._bits[name].copy_(packed)
        else:
            self._bits[name] = packed.clone()
        self._gradients.forget(name)
        self._store(name)

    def _store(self, name: str, stepped: bool = False) -> None:
        """Keep the mask in the optimizer's state, so that whoever saves the one saves the other.

        Torch's optimizers take a parameter without state for a new one, so theirs comes first.
        """
        parameter = self._weights[name]
        if self.optimizer.state.get(parameter) or stepped or isinstance(self.optimizer, AdamWPrune):
            self.optimizer.state[parameter]["mask"] = self._bits[name]
