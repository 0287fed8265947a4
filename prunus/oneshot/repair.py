"""Pruning with repair: block after block, the weights that stay are solved for, and take over from those that go.

Each group of layers that read the same input is solved when the groups before it have been replaced.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import bits
from ..ops.lazy import as_rows, from_rows
from .experts import is_stacked, shares
from .gram import Moments
from .layers import Reader, matrix_layout, readers
from .options import Repair
from .order import InputGroup
from .resources import Clock, is_out_of_memory, release
from .solver import Choose, Solution, keep_all_but, refine, solve
from .state import RepairState
from .streams import Streams
from .tune import Tuned, WholeLoss, block_loss, tunable, tune
from .walk import Originals, Walk

FEW = 0.25  # tokens an input below which an expert is not repaired


@dataclass(frozen=True)
class LayerRepair:
    """What was done to one weight; errors are ``|W' X - W X_d|^2 / |W X_d|^2``, None where they are not known."""

    mask_error: float | None = None  # of the first mask with dense weights
    error: float | None = None
    iterations: int = 0
    damping: float | None = None
    not_repaired: str | None = None  # the reason


Done = Callable[[Sequence[str]], None]  # called with the weights of a group that is finished


class RepairWalk:
    """Prunes and repairs a model in place, group after group.

    ``masks`` are packed masks to repair; without them ``choose`` finds the weights that stay, all but ``num_drop`` of
    each weight where only that number matters. ``live`` are packed masks of weights that may stay, by default all that
    are not zero.
    """

    def __init__(
        self,
        walk: Walk,
        repair: Repair,
        choose: Choose,
        originals: Originals,
        *,
        num_drop: Mapping[str, int] | None = None,
        masks: Mapping[str, Tensor] | None = None,
        live: Mapping[str, Tensor] | None = None,
        size: int | None = None,
        clock: Clock | None = None,
        state: RepairState | None = None,
    ) -> None:
        self.walk, self.repair, self.choose, self.originals = walk, repair, choose, originals
        self.num_drop, self.masks, self.live = num_drop or {}, masks, live or {}
        self.clock, self.state = clock or Clock(walk.device), state
        self.weights = {weight.name: weight for weight in walk.weights}
        self.found: dict[str, LayerRepair] = {}
        self.packed: dict[str, Tensor] = {}
        self.tuned: dict[int, Tuned] = {}  # by block
        self.not_tuned: list[str] = []  # sentences: what was to be tuned and was not, and why
        self._skipped: Counter[str] = Counter()  # blocks, by reason
        stacked = {name: weight for name, weight in self.weights.items() if is_stacked(weight)}
        reading = {name: found for name, found in readers(walk.model, walk.weights).items() if found}
        reading |= {name: [Reader(weight.module, name.rpartition(".")[2])] for name, weight in stacked.items()}
        experts = {name: weight.parameter for name, weight in stacked.items()}
        with self.clock.part("forwards"):
            has_dense = repair.targets == "dense"
            self.streams = Streams(walk, reading, experts, self.clock, has_dense=has_dense, size=size)

    @torch.no_grad()
    def run(self, done: Done) -> None:
        """Go through all weights, but those that the state knows."""
        with nullcontext() if self.walk.offload is None else self.walk.offload.keeping():
            self._run(done)

    def _run(self, done: Done) -> None:
        for number, group in enumerate(self.streams.groups):
            self._advance(group.start)
            self.walk.meter.show(f"repair of {group.names[0]}")
            file = f"group_{number:05}"
            if self.state and (before := self.state.load(file, group.names)):
                self._resume(before)
            else:
                self._repair(group)
                if self.state:
                    content = {name: self._content(name) for name in group.names if name in self.found}
                    self.state.save(file, group.names, content)
            done(group.names)
        if self.repair.distill:
            num = len(self.streams.blocks)
            self._advance(num)
            for why, skipped in self._skipped.items():
                self.not_tuned.append(f"Blocks that were not tuned: {skipped} of {num}, {why}.")
            if not num and self.repair.distill.epochs:
                self.not_tuned.append("No block was tuned by itself: the model does not run as a chain of blocks.")
        for name in self.weights:
            if name not in self.found:
                is_known = name in self.streams.readers
                reason = "no sample reached it" if is_known else "it is no plain linear layer or convolution"
                self._prune_by_magnitude(name, reason)
                done([name])
        self.streams.forget()

    def _content(self, name: str) -> dict[str, Any]:
        weight = self.weights[name].parameter.detach()
        return {"weight": weight.cpu(), "mask": self.packed[name].cpu(), "repair": asdict(self.found[name])}

    def _resume(self, content: Mapping[str, Any]) -> None:
        for name, saved in content.items():
            self._replace(name, saved["weight"], saved["mask"])
            self.found[name] = LayerRepair(**saved["repair"])

    def _advance(self, position: int) -> None:
        """Take both streams to ``position``; blocks are tuned when the dense stream has left them."""
        streams = self.streams
        while streams.position < position:
            self.walk.meter.show(f"passes through block {streams.position + 1} of {len(streams.blocks)}")
            streams.advance_dense()
            if self.repair.tune:
                self._tune_block(streams.position)
                streams.changed()
            streams.advance()

    def _tune_block(self, k: int) -> None:
        distill, streams, offload = self.repair.distill, self.streams, self.walk.offload
        assert distill is not None
        block = streams.blocks[k]
        parameters = tunable(self.walk, block)
        loss = block_loss(self.walk, k, streams.pruned, streams.dense)
        how = {"epochs": distill.epochs, "rate": distill.rate, "batch": distill.batch, "size": streams.size}

        def run() -> Tuned:
            with nullcontext() if offload is None else offload.staying(block):
                return tune(self.walk, parameters, loss, **how)

        if not distill.epochs:
            return
        if streams.is_same or not parameters:
            why = "as nothing was pruned in them or before" if streams.is_same else "as they share all their weights"
            self._skipped[why] += 1
            return
        with self.walk.meter.part(f"tuning of block {k + 1} of {len(streams.blocks)}", distill.epochs):
            self.tuned[k] = self._tuned(f"block_{k:05}", parameters, run)

    def tune_whole(self) -> Tuned | None:
        """Tune the repaired model as a whole, where that is wanted and memory suffices."""
        distill, walk = self.repair.distill, self.walk
        if distill is None or not distill.whole_epochs:
            return None
        parameters = tunable(walk, walk.model)
        how = {"epochs": distill.whole_epochs, "rate": distill.whole_rate, "batch": distill.batch}

        def run() -> Tuned:
            loss = WholeLoss(walk, self.originals.whole)
            found = tune(walk, parameters, loss, size=self.streams.size, offload=walk.offload, **how)
            return replace(found, loss=str(loss.distance))

        try:
            with walk.meter.part("tuning of the whole model", distill.whole_epochs):
                return self._tuned("whole", parameters, run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release(walk.device)
        self.not_tuned.append("The model was not tuned as a whole: there is too little memory.")
        warnings.warn("there is too little memory to tune the model as a whole: that was left out", stacklevel=2)
        return None

    def _tuned(self, file: str, parameters: Sequence[nn.Parameter], run: Callable[[], Tuned]) -> Tuned:
        """What ``run`` does to the parameters, or did before the repair was interrupted."""
        by_parameter = {parameter: name for name, parameter in self.walk.model.named_parameters()}
        names = [by_parameter[parameter] for parameter in parameters]
        for parameter in parameters:
            self.originals.save_all(parameter)
        with self.clock.part("tune"):
            if self.state and (before := self.state.load(file, names)):
                for parameter, value in zip(parameters, before["parameters"], strict=True):
                    parameter.detach().copy_(value)
                return Tuned(*before["tuned"])
            found = run()
        if self.state:
            values = [parameter.detach().cpu() for parameter in parameters]
            tuned = [found.before, found.after, found.loss]
            self.state.save(file, names, {"parameters": values, "tuned": tuned})
        return found

    def _repair(self, group: InputGroup) -> None:
        """Solve the layers of a group; one that no token reaches is pruned at the end."""
        moments = self.streams.moments(group)
        if not any(moments):
            return
        is_stack = group.names[0] in self.streams.stacked
        weights = {name: self._matrix(name, self.weights[name].parameter.detach()) for name in group.names}
        num_inputs = next(iter(weights.values())).shape[1]
        tokens = [part.num_tokens if part else 0 for part in moments]
        is_few = [(group.is_routed or is_stack) and num < FEW * num_inputs for num in tokens]
        by_score = replace(self.repair, iterations=0, refine=0, damping=1.0)
        repairs = [by_score if few else self.repair for few in is_few]
        reason = None
        if any(is_few):
            reason = f"it has {num_inputs} inputs, but only {tokens[0]} tokens reached it"
            if is_stack:
                reason = f"{sum(is_few)} of {len(is_few)} experts got too few tokens to be repaired"
        known = [part or _no_moments(next(iter(weights.values()))) for part in moments]
        for name, parts in self._solved(weights, known, repairs, is_stack).items():
            value, mask = (torch.cat(each) for each in zip(*((part.weight, part.mask) for part in parts), strict=True))
            self._replace(name, self._from_matrix(name, value), bits.pack(self._from_matrix(name, mask)))
            energy = sum(part.energy for part in parts) or 1.0
            self.found[name] = LayerRepair(
                mask_error=sum(part.mask_error * part.energy for part in parts if part.energy) / energy,
                error=sum(part.error * part.energy for part in parts if part.energy) / energy,
                iterations=parts[0].iterations,
                damping=max(part.damping for part in parts),
                not_repaired=reason,
            )

    def _solved(
        self, weights: Mapping[str, Tensor], moments: Sequence[Moments], repairs: Sequence[Repair], is_stack: bool
    ) -> dict[str, list[Solution]]:
        """Solutions of the weights (out, in), for each expert, group of a convolution, or query, key and value."""
        live = {name: self._mask(name, self.live) for name in weights if name in self.live}
        masks = None if self.masks is None else {name: self._mask(name, self.masks) for name in weights}
        num_parts = len(moments)
        if masks is None and num_parts > 1 and not is_stack:
            # which weights of a grouped convolution or an attention stay is WANDA's choice over all of it
            norms = torch.stack([part.gram.diagonal().sqrt() for part in moments])
            scores = {name: w.abs() * norms.repeat_interleave(len(w) // len(norms), 0) for name, w in weights.items()}
            masks = self.choose(scores, live or {name: w != 0 for name, w in weights.items()})
        found: dict[str, list[Solution]] = {name: [] for name in weights}
        for i, (part, repair) in enumerate(zip(moments, repairs, strict=True)):
            here = {name: weight.chunk(num_parts)[i] for name, weight in weights.items()}
            if masks is not None:
                those = {name: masks[name].chunk(num_parts)[i] for name in weights}
                solutions = refine(here, those, part, repair, self.clock)
            else:
                choose, (name, *_) = self.choose, weights
                if is_stack and name in self.num_drop:
                    choose = keep_all_but({name: shares(self.num_drop[name], num_parts)[i]})
                alive = {name: mask.chunk(num_parts)[i] for name, mask in live.items()}
                solutions = solve(here, part, choose, repair, alive, self.clock)
            for name, solution in solutions.items():
                found[name].append(solution)
        return found

    def _matrix(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of a weight's shape as (out, in)."""
        shape, outputs = matrix_layout(self.weights[name])
        return as_rows(tensor.reshape(shape), outputs).to(self.walk.device)

    def _from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        weight = self.weights[name]
        shape, outputs = matrix_layout(weight)
        return from_rows(matrix, outputs, shape).reshape(weight.parameter.shape)

    def _mask(self, name: str, packed: Mapping[str, Tensor]) -> Tensor:
        return self._matrix(name, bits.unpack(packed[name], self.weights[name].parameter.shape))

    def _prune_by_magnitude(self, name: str, reason: str) -> None:
        weight = self.weights[name]
        value = weight.parameter.detach()
        if self.masks is not None:
            mask = bits.unpack(self.masks[name], value.shape)
        else:
            live = bits.unpack(self.live[name], value.shape) if name in self.live else value != 0
            outputs = weight.outputs or ()
            found = self.choose({name: as_rows(value.abs().float(), outputs)}, {name: as_rows(live, outputs)})[name]
            mask = from_rows(found, outputs, value.shape)
        self._replace(name, value * mask, bits.pack(mask))
        self.found[name] = LayerRepair(not_repaired=reason)

    def _replace(self, name: str, value: Tensor, packed: Tensor) -> None:
        """Change a weight in place, and remember its dense values."""
        parameter = self.weights[name].parameter
        self.packed[name] = packed.to(parameter.device)
        positive = value + 0.0  # zeros without a sign: a small file keeps -0.0 as a value
        self.streams.replace_(name, parameter, positive, self.originals.save_all(parameter))


def _no_moments(weight: Tensor) -> Moments:
    """Moments of an expert that no token reached."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return Moments(weight.new_zeros(weight.shape[1], weight.shape[1], dtype=dtype), None, None, 0)
