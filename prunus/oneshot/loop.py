"""The one loop after training: block after block, a step changes the layers of one group after another.

Two streams of activations travel along: those of the dense model and those of the compressed one. The loop brings the
inputs and takes the changes: into the model, into the journal to resume from, and into the originals to undo them.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..grids import OnGrid
from ..ops import bits
from ..ops.grid import Grid
from ..ops.lazy import as_rows, from_rows
from .batch_norms import renew_batch_norms
from .calibration import Calibration
from .groups import Group
from .journal import Journal
from .layers import matrix_layout
from .level import Level, num_zeros
from .options import BlockTuning
from .resources import fits, release
from .shared_work import agreed, of_first
from .step import Change, LayerRepair, Layers, Step
from .streams import BIAS, Streams
from .tune import Tuned, WholeLoss, block_loss, tunable, tune

Finished = Callable[[Sequence[str]], None]  # called with the weights of a group that is done
DIVIDED = 1 << 25  # multiplications of an iteration from which ranks are faster together than one


class Loop:
    """Changes the weights of a level in place, group after group; at the end ``mask`` prunes what no step changed.

    ``masks`` are packed masks that are known before; without them the steps choose within what is live in the level.
    Weights that the level does not name stay as they are. While ``dense()`` is open, the model has the layers of the
    dense one, for a teacher's passes.
    """

    def __init__(
        self,
        calibration: Calibration,
        level: Level,
        mask: Callable[[Layers], dict[str, Change]],
        *,
        masks: Mapping[str, Tensor] | None = None,
        journal: Journal | None = None,
        dense: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.calibration, self.level, self.mask, self.journal, self.dense = calibration, level, mask, journal, dense
        self.weights, self.masks = level.weights, masks
        self.streams: Streams | None = None
        self._skipped: set[str] = set()  # reached, and not changed by the step
        self._before: Callable[[str], Tensor] | None = None  # reads parameters on disk as they were

    def run(self, step: Step | None, finished: Finished, tuning: BlockTuning | None = None) -> None:
        """Go through all weights; without a step no input is read, and every weight is pruned by its mask alone."""
        disk, offload = self.calibration.disk, self.calibration.offload
        self._before = disk.now() if disk else None
        with torch.no_grad(), disk.reading(self._before) if disk and self._before else nullcontext():
            if step is not None:
                self.calibration.meter.show("order of the layers")
                reads_dense = step.targets == "dense"
                has_dense = reads_dense or tuning is not None
                self.streams = Streams(self.calibration, has_dense=has_dense, reads_dense=reads_dense)
                with offload.keeping() if offload else nullcontext():
                    self._through_blocks(self.streams, step, finished, tuning)
            is_read = disk.names if disk else {}
            for number, name in enumerate(self.weights):
                if name not in self.level.packed:
                    if step is None and self.masks and self._before and name in is_read:
                        self._mask_on_disk(name, self.masks[name], self._before)
                    else:
                        with self.calibration.holding([name]):
                            self._mask_alone(name, f"weight_{number:05}")
                    finished([name])
            if self.streams is not None:
                self.streams.forget()

    def _mask_on_disk(self, name: str, packed: Tensor, before: Callable[[str], Tensor]) -> None:
        """Prune a weight on disk by a mask that is known, which is applied wherever the weight is read."""
        disk, level, parameter = self.calibration.disk, self.level, self.weights[name].parameter
        assert disk is not None
        level.packed[name] = packed
        level.num_zeros[name] = parameter.numel() - int(bits.count(packed))

        def read(name: str) -> Tensor:
            value = before(name).clone()
            bits.zero_(value, packed | ~level.live[name])  # zeros that were there keep their sign, as in memory
            return value

        disk.stored[name] = read

    def _mask_alone(self, name: str, file: str) -> None:
        """Prune a weight that no step changes; of one on disk the mask is stored, or was before."""
        if self.calibration.disk and self._was_changed(file, [name]):
            return
        change = self.mask(self._layers([name]))[name]
        if self.streams is not None:
            reason = "no sample reached it"
            if name in self._skipped:
                reason = "the step left it out"
            elif name not in self.streams.readers:
                reason = "it is no plain linear layer or convolution"
            change = replace(change, repair=LayerRepair(not_repaired=reason))
        self._write(name, change)
        if self.calibration.disk:
            self._store(file, [name], [name], are_masks=change.weight is None)

    def _through_blocks(self, streams: Streams, step: Step, finished: Finished, tuning: BlockTuning | None) -> None:
        num_blocks, skipped = len(streams.blocks), Counter[str]()
        groups = [group for group in streams.groups if not self.weights.keys().isdisjoint(group.names)]
        last = num_blocks if tuning else max((group.start for group in groups), default=0)
        numbers = {group: number for number, group in enumerate(groups)}
        for position in range(last + 1):
            here = [group for group in groups if group.start == position]
            with self.calibration.holding([name for group in here for name in group.names]):
                for group in here:
                    self._change(streams, group, step, f"group_{numbers[group]:05}")
                    finished(group.names)
                if position < last:
                    self.calibration.meter.show(f"passes through block {position + 1} of {num_blocks}")
                    agreed(self.calibration.ranks, streams.advance_dense)
                    if tuning is not None:
                        self._tune_block(streams, tuning, skipped)
                        streams.changed()
                    agreed(self.calibration.ranks, streams.advance)
        if tuning is not None:
            self.level.not_tuned += [
                f"Blocks that were not tuned: {n} of {num_blocks}, as {why}." for why, n in skipped.items()
            ]
            if not num_blocks and tuning.epochs:
                self.level.not_tuned.append(
                    "No block was tuned by itself: the model does not run as a chain of blocks."
                )

    def _change(self, streams: Streams, group: Group, step: Step, file: str) -> None:
        """Have the step change the layers of a group, or load what it did before the call was interrupted."""
        self.calibration.meter.show(f"repair of {group.names[0]}")
        if self._was_changed(file, group.names):
            return
        layers = self._layers([name for name in group.names if name in self.weights], self.calibration.device)
        experts = group.names[0] in streams.stacked
        self._release()
        layers = replace(layers, moments=streams.moments(group), are_experts=experts, is_routed=group.is_routed)
        self._release()
        changes = self._changes(step, layers)
        self._skipped |= {name for name in group.names if any(layers.moments) and name not in changes}
        for name, change in changes.items():
            self._write(name, change)
        self._store(file, group.names, changes)
        self._release()

    def _release(self) -> None:
        """Of a model on disk, which may fill main memory: give back what passes and solves no longer need."""
        if self.calibration.disk:
            release(torch.device("cpu"))

    def _was_changed(self, file: str, names: Sequence[str]) -> bool:
        """Change weights as they were before the call was interrupted, if they were."""
        if self.journal is None or (before := self.journal.load(file, names)) is None:
            return False
        for name, saved in before.items():
            value = saved["weight"]
            if value is None:
                parameter = self.weights[name].parameter
                value = parameter.detach() * bits.unpack(saved["mask"].to(parameter.device), parameter.shape)
            self._replace(name, value, saved["mask"], LayerRepair(**saved["repair"]))
            self._take_units(name, saved["units"], saved["bias"])
            if saved["scales"] is not None:
                self._put_on_grid(name, OnGrid(Grid(**saved["grid"]), saved["scales"]))
        self._note_stored(file, names, before)
        return True

    def _store(self, file: str, names: Sequence[str], changed: Iterable[str], *, are_masks: bool = False) -> None:
        """Write what became of some weights of a group into the journal; of masks alone no values."""
        if self.journal is None:
            return
        self.journal.save(file, names, {name: self._entry(name, are_masks=are_masks) for name in changed})
        self._note_stored(file, names, changed)

    def _note_stored(self, file: str, names: Sequence[str], changed: Iterable[str]) -> None:
        """Of weights on disk: say where their new values are, and how many are zero."""
        disk, journal, before = self.calibration.disk, self.journal, self._before
        if disk is None or journal is None or before is None:
            return

        def read(name: str) -> Tensor:
            saved = journal.stored(file, names)[name]
            if saved["weight"] is not None:
                return saved["weight"]
            value = before(name)
            return value * bits.unpack(saved["mask"], value.shape) + 0.0

        for name in changed:
            self.level.num_zeros[name], disk.stored[name] = num_zeros(self.weights[name].parameter), read
            if name in self.level.units and self._bias(name) is not None:
                bias = f"{name.rpartition('.')[0]}.bias"
                disk.stored[bias] = lambda _, name=name: journal.stored(file, names)[name]["bias"]

    def _changes(self, step: Step, layers: Layers) -> dict[str, Change]:
        """What the step does; of several ranks the first one alone takes a small step, and tells the others."""
        ranks, sizes = self.calibration.ranks, [w.numel() * w.shape[1] for w in layers.weights.values()]
        if ranks is None or len(layers.moments) > 1 or sum(sizes) >= DIVIDED:
            return step(layers)
        return of_first(ranks, lambda: _alone(step)(layers), self.calibration.device)

    def _entry(self, name: str, *, are_masks: bool) -> dict[str, Any]:
        level, on_grid = self.level, self.level.grids.get(name)
        bias = self._bias(name) if name in level.units else None
        return {
            "weight": None if are_masks else self.weights[name].parameter.detach().cpu(),
            "mask": level.packed[name].cpu(),
            "repair": asdict(level.repairs.get(name, LayerRepair())),
            "units": level.units.get(name),
            "bias": None if bias is None else bias.detach().cpu(),
            "scales": on_grid and on_grid.scales.cpu(),
            "grid": on_grid and asdict(on_grid.grid),
        }

    def _layers(self, names: Sequence[str], device: torch.device | None = None) -> Layers:
        """Weights and masks as matrices (out, in)."""

        def matrix(name: str, tensor: Tensor) -> Tensor:
            shape, outputs = matrix_layout(self.weights[name])
            rows = as_rows(tensor.reshape(shape), outputs)
            return rows if device is None else rows.to(device)

        def unpacked(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shapes = {name: self.weights[name].parameter.shape for name in names if name in packed}
            return {name: matrix(name, bits.unpack(packed[name], shape)) for name, shape in shapes.items()}

        weights = {name: matrix(name, self.weights[name].parameter.detach()) for name in names}
        if self.masks is not None:
            return Layers(weights, masks=unpacked(self.masks))
        return Layers(weights, live=unpacked(self.level.live))

    def _write(self, name: str, change: Change) -> None:
        """Bring a change into the shape of its weight, and apply it."""
        weight = self.weights[name]
        shape, outputs = matrix_layout(weight)

        def shaped(matrix: Tensor) -> Tensor:
            return from_rows(matrix, outputs, shape).reshape(weight.parameter.shape)

        mask, value = shaped(change.mask), weight.parameter.detach()
        packed = bits.pack(mask)
        if change.weight is None and self.streams is None:  # only what zeros replace is remembered
            self.level.originals.prune_(weight.parameter, bits.unpack(self.level.live[name] & ~packed, value.shape))
            self.level.packed[name] = packed
        else:
            self._replace(name, value * mask if change.weight is None else shaped(change.weight), packed, change.repair)
            bias = self._bias(name)
            if change.bias is not None and bias is not None:
                bias = (bias.detach() + change.bias.to(bias.device)).to(bias.dtype)
            self._take_units(name, change.units, bias)
        if change.on_grid is not None:
            self._put_on_grid(name, change.on_grid)

    def _replace(self, name: str, value: Tensor, packed: Tensor, repair: LayerRepair) -> None:
        """Change a weight in place, and remember its dense values."""
        parameter, level = self.weights[name].parameter, self.level
        level.packed[name], level.repairs[name] = packed.to(parameter.device), repair
        positive = value + 0.0  # zeros without a sign: a small file keeps -0.0 as a value
        dense = level.originals.save_all(parameter)
        if self.streams is None:
            parameter.detach().copy_(positive)
        else:
            self.streams.replace_(name, parameter, positive, dense)

    def _put_on_grid(self, name: str, on_grid: OnGrid) -> None:
        """Note the grid of a weight, whose scales count its rows."""
        grid = replace(on_grid.grid, outputs=tuple(self.weights[name].outputs or ()))
        self.level.put_on_grid_(name, OnGrid(grid, on_grid.scales))

    def _bias(self, name: str) -> nn.Parameter | None:
        bias = getattr(self.weights[name].module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    def _take_units(self, name: str, units: Tensor | None, bias: Tensor | None) -> None:
        """Note which units of a consumer stay, and give its layer another bias."""
        if units is None:
            return
        self.level.units[name], parameter = units.cpu(), self._bias(name)
        if parameter is not None and bias is not None:
            assert self.streams is not None
            self.streams.replace_(name + BIAS, parameter, bias, self.level.originals.save_all(parameter))

    def _tune_block(self, streams: Streams, tuning: BlockTuning, skipped: Counter[str]) -> None:
        k, offload = streams.position, self.calibration.offload
        block = streams.blocks[k]
        parameters = tunable(self.calibration, block)
        loss = block_loss(self.calibration, k, streams.pruned, streams.dense)
        how = {"epochs": tuning.epochs, "lr": tuning.lr, "batch": tuning.batch, "size": streams.size}

        def run() -> Tuned:
            with nullcontext() if offload is None else offload.staying(block):
                return tune(self.calibration, parameters, loss, **how)

        if not tuning.epochs:
            return
        if streams.is_same or not parameters:
            why = "nothing was pruned in them or before" if streams.is_same else "they share all their weights"
            skipped[why] += 1
            return
        with self.calibration.meter.part(f"tuning of block {k + 1} of {len(streams.blocks)}", tuning.epochs):
            self.level.tuned[k] = self._tuned(f"block_{k:05}", parameters, run)

    @torch.no_grad()
    def finish(self, batch_norm: bool, tuning: BlockTuning | None) -> None:
        """Renew the statistics of batch norms, and tune the whole model if there is enough memory."""
        calibration, level, streams = self.calibration, self.level, self.streams
        assert streams is not None
        if batch_norm:
            calibration.meter.show("statistics of batch norms")
            with calibration.clock.part("batch norms"):
                renew_batch_norms(calibration, streams.blocks, streams.size, level.originals)
        if tuning is None or not tuning.whole_epochs:
            return
        parameters = tunable(calibration, calibration.model)
        how = {"epochs": tuning.whole_epochs, "lr": tuning.whole_lr, "batch": tuning.batch, "size": streams.size}

        def run() -> Tuned:
            loss = WholeLoss(calibration, level.originals.whole, self.dense)
            return replace(
                tune(calibration, parameters, loss, offload=calibration.offload, **how), loss=str(loss.distance)
            )

        def tune_whole() -> None:
            with calibration.meter.part("tuning of the whole model", tuning.whole_epochs):
                level.tuned_whole = self._tuned("whole", parameters, run)

        if not fits(tune_whole, calibration.device):
            level.not_tuned.append("The model was not tuned as a whole: there is too little memory.")
            warnings.warn("too little memory to tune the model as a whole; this was skipped", stacklevel=2)

    def _tuned(self, file: str, parameters: Sequence[nn.Parameter], run: Callable[[], Tuned]) -> Tuned:
        """Tune the parameters by ``run``, or load what it did before the call was interrupted."""
        by_parameter = {parameter: name for name, parameter in self.calibration.model.named_parameters()}
        names = [by_parameter[parameter] for parameter in parameters]
        for parameter in parameters:
            self.level.originals.save_all(parameter)
        with self.calibration.clock.part("tune"):
            if self.journal and (before := self.journal.load(file, names)):
                for parameter, value in zip(parameters, before["parameters"], strict=True):
                    parameter.detach().copy_(value)
                self._note_tuned(file, names)
                return Tuned(*before["tuned"])
            tuned = run()
        if self.journal:
            values = [parameter.detach().cpu() for parameter in parameters]
            self.journal.save(file, names, {"parameters": values, "tuned": [tuned.before, tuned.after, tuned.loss]})
            self._note_tuned(file, names)
        return tuned

    def _note_tuned(self, file: str, names: Sequence[str]) -> None:
        """Of parameters on disk: say where their tuned values are, and how many are zero."""
        disk, journal = self.calibration.disk, self.journal
        if disk is None or journal is None:
            return
        for number, name in enumerate(names):
            disk.stored[name] = lambda name, number=number: journal.stored(file, names)["parameters"][number]
            if name in self.weights:
                self.level.num_zeros[name] = num_zeros(self.weights[name].parameter)


def _alone(step: Any) -> Step:
    """The same step for one rank."""
    first = {"first": _alone(step.first)} if getattr(step, "first", None) else {}
    return replace(step, ranks=None, **first)
