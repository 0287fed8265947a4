"""Pruning while training: the optimizer's own step drives score, select, mask and apply."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .allocate import allocate
from .eligible import eligible
from .gradients import MaskedGradients, Movement, check_captured, is_initialising, is_skipped
from .mask import Masks, check_copies, digest, full_masks, packed_masks, saved_bits
from .ops import bits
from .optim import AdamWPrune
from .saved import checked_masks, is_resharded, reshard_masks, saved_masks, taken_sums
from .schedule import Schedule
from .select import Global, NofM, PerLayer, Selector
from .shard import is_dtensor, local, parts_of, ranks_of, together
from .stats import MOMENTS, InputNorms, check_eps, check_moments, check_parameters, score_of, sources
from .summary import Event, Report, report


class Pruner:
    """Holds the masks of a model in training; the optimizer's own step drives it.

    At an event: score -> select -> mask -> apply. Between events nothing is done here but to mask
    gradients, which keeps what is zero at zero through decay, momentum and clipping; with
    ``AdamWPrune`` the step itself does that.

    ``score`` is a name of SCORES or a function of what its arguments name (``weight``, ``grad``,
    ``exp_avg``, ``exp_avg_sq``, ``step``, ...). ``masks`` are boolean masks by name to begin with, or
    ``"zeros"`` for the zeros that the weights have; without ``schedule`` they are only held.

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
        masks: Mapping[str, Tensor] | Literal["zeros"] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        score_options: Mapping[str, Any] | None = None,
        score_dtype: torch.dtype = torch.float32,
        on_event: Callable[[Event], None] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if schedule is None and masks is None:
            raise ValueError("say how sparse: pass schedule=Ramp(...), OneShot(...) or Constant(...), or masks to hold")
        if every < 1:
            raise ValueError(f"every is a number of steps, at least 1, got {every}")
        if isinstance(select, NofM) and schedule:
            select.check(schedule)
        self.model, self.optimizer = model, optimizer
        self.select, self.schedule, self.every = select, schedule, every
        self.score_options = dict(score_options or {})
        self.score = score_of(score, self.score_options)
        self.score_dtype, self.on_event = score_dtype, on_event
        self.step = 0
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._eligible = eligible(model, include, exclude, held)
        self._weights = {weight.name: weight.parameter for weight in self._eligible.weights}
        self._ranks = ranks_of(self._weights, group)
        self._parts = parts_of(self._weights, self._ranks)
        self._holders = self._ranks if self._parts else None  # of parts, not of copies
        if isinstance(select, PerLayer) and schedule:
            allocate({name: p.shape for name, p in self._weights.items()}, schedule.final, select.allocate)
        check_eps(self._weights, optimizer)
        self._bits: dict[str, Tensor] = {}
        self._due = False
        self._movement = Movement(self._weights) if "movement" in self.score.reads else None
        self._inputs = InputNorms(self._eligible.weights, self._ranks) if "input_norm" in self.score.reads else None
        self._gradients = MaskedGradients(self._weights, self._bits)
        self._adopt(masks)
        self._handles = self._attach()
        self._collect_inputs()

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
        self._due = False
        sparsity = self.schedule(self.step) if self.schedule else 0.0
        if self._inputs:
            self._inputs.__exit__()
        if sparsity == 0:
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
        before = self._num_kept
        masks = together(self._ranks, lambda: self.select.packed(scores, sparsity, self._bits, before))
        check_copies(self._ranks, self._weights, masks)
        self._hold(masks)
        if isinstance(self.select, Global):  # which is exact: no need to count
            total = sum(p.numel() for p in self._weights.values())
            self._num_kept = min(before, total - round(sparsity * total))
        else:
            self._num_kept = self._count_kept()
        newly_pruned = before - self._num_kept
        if self.on_event:
            num_bytes = self._ranks.num_bytes if self._ranks else 0
            self.on_event(Event(self.step, sparsity, time.perf_counter() - started, newly_pruned, num_bytes))

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

    def state_dict(self, *, unpacked: bool | None = None) -> dict[str, Any]:
        """Step, masks and movement sums: tensors and numbers.

        Masks are packed bits. With ``unpacked``, which is the default for DTensors, there is one for every weight,
        zeros and ones in its shape and placement: what ``torch.distributed.checkpoint`` loads at any world size.
        """
        whole = any(map(is_dtensor, self._weights.values())) if unpacked is None else unpacked
        return {
            "step": self.step,
            "due": self._due,
            "masks": saved_masks(self._weights, self._bits, whole),
            "movement": {name: s.clone() for name, s in self._movement.sums.items()} if self._movement else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; what its masks prune is zeroed in weights and optimizer state."""
        masks = together(self._holders, lambda: checked_masks(state, self._weights, self._movement, self._parts))
        everything = {
            n: bits.full(local(p).numel(), local(p).device) for n, p in self._weights.items() if n in self._bits
        }
        self._hold(everything | masks)
        self._num_kept = self._count_kept()
        if self._movement:
            self._movement.load(taken_sums(state["movement"], self._weights, self._parts))
        self.step, self._due = int(state["step"]), bool(state["due"])
        self._collect_inputs()

    def _attach(self) -> list[RemovableHandle]:
        optimizer = self.optimizer
        handles = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_state_dict_post_hook(reshard_masks),
        ]
        if isinstance(optimizer, AdamWPrune):
            optimizer.watch = self._movement.add if self._movement else None
            return handles
        return handles + self._gradients.attach(optimizer, self._movement)

    def _after_step(self, *_: object) -> None:
        if is_skipped(self.optimizer) or is_initialising(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            if self.schedule:
                check_captured(self._weights, self._bits)
            return
        self.step += 1
        if self.step == 1:
            check_parameters(self.model, self._weights)
            if self.schedule:
                check_moments(self._eligible.weights, self.optimizer, self.score)
        for name in self._bits:
            self._store(name, stepped=self._weights[name].grad is not None)
        if self.schedule and self.schedule.is_event(self.step, self.every):
            self._due = True
        if self._due and not self._waits_for_moments():
            self.update()
        self._collect_inputs()

    def _after_load(self, _: Optimizer) -> None:
        """Take over the masks that came with an optimizer's state; loading cast them to the weights' dtype."""
        for name, parameter in self._weights.items():
            saved = self.optimizer.state.get(parameter, {}).get("mask")
            if saved is not None:
                self._set_bits(name, saved_bits(name, saved, parameter, self._parts[name] if self._parts else None))
            elif name in self._bits:
                self._store(name)
        self._num_kept = self._count_kept()

    def _before_save(self, _: Optimizer) -> None:
        """Have a mask for every weight that is resharded: who loads a checkpoint asks for what is there already."""
        for name, p in self._weights.items():
            if name not in self._bits and is_resharded(p):
                self._set_bits(name, bits.full(local(p).numel(), local(p).device))

    def _waits_for_moments(self) -> bool:
        reads_moments = bool(set(MOMENTS) & set(self.score.reads))
        return reads_moments and isinstance(self.optimizer, AdamWPrune) and self.optimizer.is_cold

    def _collect_inputs(self) -> None:
        """Listen to the modules' inputs during the step that an event follows."""
        if self._inputs and self.schedule:
            self._inputs.listen(self._due or self.schedule.is_event(self.step + 1, self.every))

    def _adopt(self, masks: Mapping[str, Tensor] | Literal["zeros"] | None) -> None:
        """Begin with the masks given, with the zeros there are, or with those in the optimizer's state."""
        if isinstance(masks, str):
            if masks != "zeros":
                raise ValueError(f'masks must be boolean tensors by name or "zeros", got {masks!r}')
            self._hold({name: bits.pack(local(p) != 0) for name, p in self._weights.items()})
        elif masks is not None:
            self._hold(packed_masks(masks, self._weights, self._parts))
        else:
            self._after_load(self.optimizer)
        if isinstance(self.optimizer, AdamWPrune):  # whose step reads masks at no cost: a graph of it must find them
            for name, p in self._weights.items():
                if p.is_cuda and name not in self._bits:
                    self._set_bits(name, bits.full(local(p).numel(), local(p).device))
        self._num_kept = self._count_kept()

    def _count_kept(self) -> int:
        """How many prunable weights the masks keep, on all ranks."""
        counted = [(n, p) for n, p in self._weights.items() if not self._parts or self._parts[n].counts]
        here = sum(int(bits.count(self._bits[n])) if n in self._bits else local(p).numel() for n, p in counted)
        return int(self._holders.total(torch.tensor([here]))) if self._holders else here

    def _hold(self, packed: Mapping[str, Tensor]) -> None:
        """Make these the masks and zero what they prune, in weights and optimizer state."""
        for name, new in packed.items():
            parameter = self._weights[name]
            self._set_bits(name, new)
            bits.zero_(local(parameter), new)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "mask" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    bits.zero_(local(value), new)

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
