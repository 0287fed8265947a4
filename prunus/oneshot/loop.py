"""The one loop after training: block after block, a step changes the layers of one group after another.

Two streams of activations travel along: those of the dense model and those of the compressed one. The loop brings the
inputs and takes the changes: into the model, into the journal to resume from, and into the originals to undo them.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from .level import Level
from .options import BlockTuning
from .resources import is_out_of_memory, release
from .step import Change, LayerRepair, Layers, Step
from .streams import BIAS, Streams
from .tune import Tuned, WholeLoss, block_loss, tunable, tune

Finished = Callable[[Sequence[str]], None]  # called with the weights of a group that is done


class Loop:
    """Changes the weights of a level in place, group after group; at the end ``mask`` prunes what no step changed.

    ``masks`` are packed masks that are known before; without them the steps choose within ``live``, also packed.
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
        live: Mapping[str, Tensor] | None = None,
        journal: Journal | None = None,
        dense: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.calibration, self.level, self.mask, self.journal, self.dense = calibration, level, mask, journal, dense
        self.weights, self.masks, self.live = level.weights, masks, live or {}
        self.streams: Streams | None = None
        self._skipped: set[str] = set()  # reached, and not changed by the step

    @torch.no_grad()
    def run(self, step: Step | None, finished: Finished, tuning: BlockTuning | None = None) -> None:
        """Go through all weights; without a step no input is read, and every weight is pruned by its mask alone."""
        if step is not None:
            self.calibration.meter.show("order of the layers")
            reads_dense = step.targets == "dense"
            self.streams = Streams(
                self.calibration, has_dense=reads_dense or tuning is not None, reads_dense=reads_dense
            )
            offload = self.calibration.offload
            with nullcontext() if offload is None else offload.keeping():
                self._through_blocks(self.streams, step, finished, tuning)
        for name in self.weights:
            if name not in self.level.packed:
                change = self.mask(self._layers([name]))[name]
                if self.streams is not None:
                    reason = "no sample reached it"
                    if name in self._skipped:
                        reason = "the step left it out"
                    elif name not in self.streams.readers:
                        reason = "it is no plain linear layer or convolution"
                    change = replace(change, repair=LayerRepair(not_repaired=reason))
                self._write(name, change)
                finished([name])
        if self.streams is not None:
            self.streams.forget()

    def _through_blocks(self, streams: Streams, step: Step, finished: Finished, tuning: BlockTuning | None) -> None:
        num_blocks, skipped = len(streams.blocks), Counter[str]()
        groups = [group for group in streams.groups if not self.weights.keys().isdisjoint(group.names)]
        last = num_blocks if tuning else max((group.start for group in groups), default=0)
        numbers = {group: number for number, group in enumerate(groups)}
        for position in range(last + 1):
            for group in [group for group in groups if group.start == position]:
                self._change(streams, group, step, f"group_{numbers[group]:05}")
                finished(group.names)
            if position < last:
                self.calibration.meter.show(f"passes through block {position + 1} of {num_blocks}")
                streams.advance_dense()
                if tuning is not None:
                    self._tune_block(streams, tuning, skipped)
                    streams.changed()
                streams.advance()
        if tuning is not None:
            self.level.not_tuned += [
                f"Blocks that were not tuned: {n} of {num_blocks}, {why}." for why, n in skipped.items()
            ]
            if not num_blocks and tuning.epochs:
                self.level.not_tuned.append(
                    "No block was tuned by itself: the model does not run as a chain of blocks."
                )

    def _change(self, streams: Streams, group: Group, step: Step, file: str) -> None:
        """Have the step change the layers of a group, or load what it did before the call was interrupted."""
        self.calibration.meter.show(f"repair of {group.names[0]}")
        if self.journal and (before := self.journal.load(file, group.names)):
            for name, saved in before.items():
                self._replace(name, saved["weight"], saved["mask"], LayerRepair(**saved["repair"]))
                self._take_units(name, saved["units"], saved["bias"])
                if saved["scales"] is not None:
                    self._put_on_grid(name, OnGrid(Grid(**saved["grid"]), saved["scales"]))
            return
        layers = self._layers([name for name in group.names if name in self.weights], self.calibration.device)
        experts = group.names[0] in streams.stacked
        layers = replace(layers, moments=streams.moments(group), are_experts=experts, is_routed=group.is_routed)
        changes = step(layers)
        self._skipped |= {name for name in group.names if any(layers.moments) and name not in changes}
        for name, change in changes.items():
            self._write(name, change)
        if self.journal:
            self.journal.save(file, group.names, {name: self._entry(name) for name in changes})

    def _entry(self, name: str) -> dict[str, Any]:
        weight, level = self.weights[name].parameter.detach(), self.level
        units, bias = level.units.get(name), self._bias(name) if name in level.units else None
        more: dict[str, Any] = {"units": units, "bias": None if bias is None else bias.detach().cpu()}
        on_grid = level.grids.get(name)
        more["scales"], more["grid"] = (on_grid.scales.cpu(), asdict(on_grid.grid)) if on_grid else (None, None)
        return {"weight": weight.cpu(), "mask": level.packed[name].cpu(), "repair": asdict(level.repairs[name])} | more

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
        return Layers(weights, masks=None if self.masks is None else unpacked(self.masks), live=unpacked(self.live))

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
            skipped[
                "as nothing was pruned in them or before" if streams.is_same else "as they share all their weights"
            ] += 1
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

        try:
            with calibration.meter.part("tuning of the whole model", tuning.whole_epochs):
                level.tuned_whole = self._tuned("whole", parameters, run)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release(calibration.device)
        level.not_tuned.append("The model was not tuned as a whole: there is too little memory.")
        warnings.warn("there is too little memory to tune the model as a whole: that was left out", stacklevel=2)

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
                return Tuned(*before["tuned"])
            tuned = run()
        if self.journal:
            values = [parameter.detach().cpu() for parameter in parameters]
            self.journal.save(file, names, {"parameters": values, "tuned": [tuned.before, tuned.after, tuned.loss]})
        return tuned
