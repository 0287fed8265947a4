"""A model pruned to one sparsity: its masks, how they were found, and how to undo them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..eligible import Weight
from ..grids import OnGrid, grid_of, put_on_grid_, take_off_grid_
from ..ops import bits
from .disk_offload import DiskOffload
from .originals import Originals
from .probe.prober import Ratios, Tau, check_tau, is_allowed, taus
from .resources import Cost
from .step import LayerRepair
from .tune import Tuned


@dataclass
class Level:
    """Masks are packed bits, by weight."""

    weights: Mapping[str, Weight]
    live: Mapping[str, Tensor]  # what was not zero before
    packed: dict[str, Tensor] = field(default_factory=dict)  # what stays
    candidates: dict[str, Tensor] = field(default_factory=dict)  # what the score proposed to a probe
    ratios: dict[str, Ratios] = field(default_factory=dict)
    taus: dict[str, float] = field(default_factory=dict)
    repairs: dict[str, LayerRepair] = field(default_factory=dict)
    units: dict[str, Tensor] = field(default_factory=dict)  # by consumer: True where a unit stays
    tuned: dict[int, Tuned] = field(default_factory=dict)  # by block
    tuned_whole: Tuned | None = None
    not_tuned: list[str] = field(default_factory=list)  # sentences: what was to be tuned and was not, and why
    grids: dict[str, OnGrid] = field(default_factory=dict)  # of weights in few bits
    num_zeros: dict[str, int] = field(default_factory=dict)  # of weights that are not in memory
    before: Callable[[str], Tensor] | None = None  # reads a parameter on disk as it was
    originals: Originals = field(default_factory=Originals)
    cost: Cost = field(default_factory=Cost)
    repair_again: Callable[[], None] | None = None  # repairs the dense model by the masks of the probe
    _undone: dict[Tensor, Tensor] = field(default_factory=dict)  # repaired values that ``undo_`` took back
    _left: list[tuple[nn.Module, str, OnGrid]] = field(default_factory=list)  # grids that weights had before

    def proposed(self, name: str) -> Tensor:
        """Packed bits of what the score or the solver would prune."""
        return self.candidates[name] if name in self.candidates else self.live[name] & ~self.packed[name]

    def tuning_notes(self) -> list[str]:
        notes = []
        if self.tuned:
            helped = sum(one.helped for one in self.tuned.values())
            notes.append(f"Tuning brought {helped} of {len(self.tuned)} blocks nearer to the dense ones.")
        if (whole := self.tuned_whole) is not None:
            took = f"from {whole.before:.4g} to {whole.after:.4g} on held-out samples"
            notes.append(f"Tuning the whole model took its {whole.loss} {took}.")
        return notes

    def undo_(self) -> None:
        """Give every changed weight its old value, bit for bit, and its old grid."""
        self._undone = self.originals.restore_() or self._undone
        self._grids_undo_()

    @property
    def bits_a_weight(self) -> float:
        """Of the weights on grids: one bit for the mask where there are zeros, codes, and scales of 16 bits."""
        total = num = 0
        for name, on_grid in self.grids.items():
            size, num_kept = self.weights[name].parameter.numel(), int(bits.count(self.packed[name]))
            total += (size if num_kept < size else 0) + num_kept * on_grid.grid.bits + 16 * on_grid.scales.numel()
            num += size
        return total / max(1, num)

    def leave_grids_(self, model: nn.Module) -> None:
        """Forget the grids of the weights of this level, as they will change; ``undo_`` brings them back."""
        own = {weight.parameter for weight in self.weights.values()}
        held = ((module, key) for module in model.modules() for key, p in module._parameters.items() if p in own)
        self._left = [(*each, on_grid) for each in held if (on_grid := grid_of(*each)) is not None]
        self._grids_apply_()

    def put_on_grid_(self, name: str, on_grid: OnGrid) -> None:
        self.grids[name] = on_grid
        put_on_grid_(self.weights[name].module, name.rpartition(".")[2], on_grid)

    @contextmanager
    def grids_before(self) -> Iterator[None]:
        """While this is open, weights have the grids that they had before, and none that they got since."""
        self._grids_undo_()
        try:
            yield
        finally:
            self._grids_apply_()

    def _grids_undo_(self) -> None:
        for name in self.grids:
            take_off_grid_(self.weights[name].module, name.rpartition(".")[2])
        for module, key, on_grid in self._left:
            put_on_grid_(module, key, on_grid)

    def _grids_apply_(self) -> None:
        for module, key, _ in self._left:
            take_off_grid_(module, key)
        for name, on_grid in self.grids.items():
            self.put_on_grid_(name, on_grid)

    def follow_(self, moved: Mapping[Tensor, Tensor]) -> None:
        """Undo and apply what was done to some tensors to those that took their places."""
        self.originals.follow_(moved)
        self._undone = {moved.get(tensor, tensor): values for tensor, values in self._undone.items()}

    @torch.no_grad()
    def apply_(self) -> None:
        """Prune again what ``undo_`` restored."""
        self.undo_()
        self._grids_apply_()
        while self._undone:  # of each weight one value beside the model: the dense or the repaired one
            tensor, values = self._undone.popitem()
            self.originals.save_all(tensor)
            tensor.detach().copy_(values)
        for name, weight in self.weights.items():
            if weight.parameter not in self.originals.whole and weight.parameter not in self.originals.on_disk:
                where = bits.unpack(self.live[name] & ~self.packed[name], weight.parameter.shape)
                self.originals.prune_(weight.parameter, where)

    def masked(self, name: str) -> Tensor:
        """What a parameter on disk was, under its mask."""
        assert self.before is not None
        value = self.before(name)
        return value * bits.unpack(self.packed[name], value.shape) + 0.0 if name in self.packed else value

    @contextmanager
    def masks_alone(self) -> Iterator[None]:
        """While this is open, the model has the dense weights under the masks, without their repair."""
        self.undo_()
        masks = Originals()
        try:
            for name, weight in self.weights.items():
                if weight.parameter in self.originals.on_disk:
                    continue
                masks.prune_(weight.parameter, ~bits.unpack(self.packed[name], weight.parameter.shape))
            yield
        finally:
            masks.restore_()
            self.apply_()

    def packed_at(self, tau: Tau, base: float = 1.0) -> dict[str, Tensor]:
        """Packed masks of another tau, from the stored ratios, without a new pass."""
        if tau == "target":
            raise ValueError("'target' applies only to a whole probe; give a number, a mapping, a list or 'adaptive'")
        check_tau(tau)
        if not self.ratios:
            raise ValueError("there are no ratios: the model was pruned without a probe")
        packed = {}
        for name, value in self._taus(tau, base).items():
            where = bits.unpack(self.candidates[name], self.weights[name].parameter.shape)
            where[where.clone()] = is_allowed(self.ratios[name].q, value)
            packed[name] = self.live[name] & ~bits.pack(where)
        return packed

    def retake_(self, tau: Tau, base: float = 1.0) -> None:
        """Make masks, model and ``taus`` those of another tau, and repair again if it was."""
        self.packed = self.packed_at(tau, base)
        if self.repair_again is None:
            self.apply_()
        else:
            self.undo_()
            self.repair_again()
        self.taus = self._taus(tau, base)

    def _taus(self, tau: Tau, base: float) -> dict[str, float]:
        return taus(tau, {name: weight.parameter.numel() for name, weight in self.weights.items()}, base)


def level_of(weights: Mapping[str, Weight], live: Mapping[str, Tensor], disk: DiskOffload | None) -> Level:
    """The level of a call that begins; of parameters on disk it knows what reads them as they are now."""
    if disk is None:
        return Level(weights, live)
    return Level(weights, live, before=disk.now(), originals=Originals(disk.parameters))


def num_zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.detach().count_nonzero())
