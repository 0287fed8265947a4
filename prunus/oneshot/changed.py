"""A model that a call has changed, and how it gets back what it was."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from .cuts import to_the_end
from .dense import copied, is_overlapping
from .disk_offload import disk_offload_of
from .level import Level
from .originals import sums_of_bits
from .resources import Cost


@dataclass(repr=False)
class ChangedModel:
    """What was done to a model. ``undo_``, ``apply_`` and ``dense`` raise if it was trained or cast; it may move."""

    level: Level
    model: nn.Module

    done: ClassVar[str] = "pruned"
    doing: ClassVar[str] = "pruning"
    call: ClassVar[str] = "prune"

    def __post_init__(self) -> None:
        self._note_bits()

    def __str__(self) -> str:
        return "\n".join([repr(self), str(self.cost), *self.notes])

    @property
    def notes(self) -> list[str]:
        return self.level.tuning_notes() + self.level.not_tuned

    @property
    def cost(self) -> Cost:
        return self.level.cost

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def errors(self) -> dict[str, float]:
        """``|W' X - W X_d|^2 / |W X_d|^2`` by layer: inputs X in the changed model, X_d in the dense one."""
        return {name: repair.error for name, repair in self.level.repairs.items() if repair.error is not None}

    def dense(self) -> nn.Module:
        """The model as it was before the call: a separate module in eval mode, without gradients or your hooks.

        Repaired weights use the memory that ``undo_`` reads, without another copy: the module is then in main
        memory, and you must not write to it while you may still undo. Everything else is cloned, and nothing is shared
        with the model. If units were removed, or two tensors overlap in memory, all of it is a copy.
        """
        self._check("dense")
        originals, is_undone = self.level.originals, self._is_undone
        device = torch.device("cpu") if originals.whole or self._is_cut else None
        if not self._is_cut and not is_overlapping(self.model):
            with nullcontext() if is_undone else self.level.grids_before():
                return copied(self.model, originals.lend(), device)
        self.undo_()
        try:
            return copied(self.model, {}, device)
        finally:
            if not is_undone:
                self.apply_()

    def undo_(self) -> None:
        """Give every changed weight its old value, bit for bit, and put removed units back."""
        with self._changing("undo_"):
            to_the_end(self._undo_)

    def apply_(self) -> None:
        """Redo what ``undo_`` undid."""
        with self._changing("apply_"):
            self._undo_()
            self._apply_()

    def _undo_(self) -> None:
        self.level.undo_()

    def _apply_(self) -> None:
        self.level.apply_()

    @property
    def _is_cut(self) -> bool:
        """Whether tensors have other shapes than before."""
        return False

    @property
    def _is_undone(self) -> bool:
        return self.level.originals.is_empty and not self._is_cut

    def _note_bits(self) -> None:
        self._buffers = dict(self.model.named_buffers())
        self._bits = {} if disk_offload_of(self.model) else sums_of_bits(self.model)

    def _check_parameters(self) -> None:
        """Refuse a model in which others have replaced parameters."""

    def _check(self, call: str) -> None:
        """Refuse a model that others have changed; where it was moved, its new buffers are known afterwards."""
        if disk_offload_of(self.model):
            raise ValueError(
                f"{call} needs both models in memory, but this one is on disk; the dense one is still in its folder"
            )
        self._check_parameters()
        buffers = dict(self.model.named_buffers())
        self.level.follow_({old: buffers[name] for name, old in self._buffers.items() if name in buffers})
        now = sums_of_bits(self.model)
        changed = [name for name in {**self._bits, **now} if now.get(name) != self._bits.get(name)]
        if not changed or (call == "undo_" and self._is_undone):
            return
        when, so = "undo_ restored it", f"is for the {self.done} model; call {self.call} again"
        if not self._is_undone:
            when, so = f"it was {self.done}", f"would bring back only what {self.doing} changed"
            so += "; load the dense model again, or take result.dense() before you train"
        raise ValueError(f"the model was trained or changed after {when} (first in {changed[0]}); {call} {so}")

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Check the model before it is changed here, and know it again afterwards."""
        self._check(call)
        try:
            yield
        finally:
            self._note_bits()
