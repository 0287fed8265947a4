"""Gradient records: for each weight a statistic of its per-sample gradients, many samples a pass.

Decisions are those of one sample at a time. Layers whose gradients cannot be rebuilt from a batch are found by
comparing a pass over two samples with two passes over one, and get theirs from autograd, one sample at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from ..eligible import Weight
from .chain import Prefix, blocks_of
from .inspection import Findings, holders, inspect
from .kinds import add_largest_
from .memory import batch_size, is_out_of_memory, release
from .objective import Objective
from .offload import gradients, saving
from .recompute import recomputed
from .samples import Chunk, Samples, Tree, moved
from .session import replaced, swapped
from .taps import NotRows, Reached, Taps, Variant, per_sample

Statistic = Literal["largest", "mean square"]
Records = dict[str, Tensor]


SCALE = 2.0**12  # of the loss of float16 models, whose gradients would vanish; what overflows keeps its weight


class _TooLarge(Exception):
    """Memory does not hold one sample seen by several weights, or what the blocks return."""


class Engine:
    """Records of a model's gradients over the calibration samples."""

    def __init__(
        self,
        objective: Objective,
        weights: Sequence[Weight],
        samples: Samples,
        size: int | None,
        checkpointing: bool = False,
    ) -> None:
        self.objective = objective
        self.checkpointing = checkpointing  # blocks are run again for the backward; also where nothing else fits
        self.weights = {weight.name: weight for weight in weights}
        self.samples = samples
        self.device = objective.offload.device if objective.offload else weights[0].parameter.device
        self.blocks = blocks_of(objective.model, weights)
        half = any(parameter.dtype == torch.float16 for parameter in objective.model.parameters())
        self.scale = SCALE if half else 1.0
        self.passes = 0  # forward and backward passes of one sample
        self.forwards = 0  # forward passes of one sample alone
        self.modules = holders(objective.model, weights)
        self.findings: Findings = inspect(objective, self.modules, self.blocks, samples, self.device)
        self.passes += 4
        self.prefix = Prefix(self.blocks if self.findings.chained else [], samples)
        self.halved = 0  # how often memory ran out
        self.together = True  # all variants of a sample fit into one pass
        self.size = size or batch_size(self.findings.saved_bytes, self.device)  # rows a pass

    def start(self, name: str) -> int:
        """How many blocks a pass for this weight may skip: those that have ended when its layer is first called."""
        return self.findings.starts.get(name, 0) if self.findings.chained else 0

    def changed(self, names: Sequence[str]) -> None:
        """Say that these weights have other values now."""
        self.prefix.drop_after(min(map(self.start, names)))

    def records(
        self, names: Sequence[str], variants: Sequence[Variant], statistic: Statistic = "largest"
    ) -> list[Records]:
        """The statistic over samples of ``|dLoss / dW|`` for each variant and weight, in float32 or float64."""
        if len(variants) > 1 and not (self.together and self._all_tapped(variants)):
            return [self.records(names, [variant], statistic)[0] for variant in variants]
        while True:
            try:
                return self._recorded(names, variants, statistic)
            except NotRows as what:
                self.findings.quick.discard(str(what))
            except _TooLarge:
                self.together = False
                self.halved += 1
                return self.records(names, variants, statistic)

    def _recorded(self, names: Sequence[str], variants: Sequence[Variant], statistic: Statistic) -> list[Records]:
        quick = [name for name in names if name in self.findings.quick]
        slow = [name for name in names if name not in quick]
        found = self._batched(quick, variants, statistic) if quick else [{} for _ in variants]
        if slow:
            for record, more in zip(found, self._one_by_one(slow, variants, statistic), strict=True):
                record.update(more)
        return found

    def _all_tapped(self, variants: Sequence[Variant]) -> bool:
        """Whether a pass can show each part of its batch another variant: all that differs is seen by a tap."""
        return all(name in self.findings.quick for variant in variants for name in variant)

    def _batched(self, names: Sequence[str], variants: Sequence[Variant], statistic: Statistic) -> list[Records]:
        found = [{name: self._zeros(name) for name in names} for _ in variants]
        start = min(map(self.start, names))
        self._have(start)
        pending = list(self.samples.chunks(self._rows(len(variants))))
        while pending:
            chunk = pending.pop(0)
            if not self._tried(found, start, chunk, variants, statistic):
                self._shrink()
                pending[:0] = chunk.halves()
        return [self._finished(record, statistic) for record in found]

    def _tried(
        self, found: list[Records], start: int, chunk: Chunk, variants: Sequence[Variant], statistic: Statistic
    ) -> bool:
        """Whether memory was enough for a chunk; where it was not, the records are as before."""
        before = None if statistic == "largest" else [{n: r.clone() for n, r in record.items()} for record in found]
        try:
            self._add_chunk(found, start, chunk, variants, statistic)
        except Exception as error:
            if not is_out_of_memory(error) or (chunk.size == len(variants) == 1 and not self._may_checkpoint()):
                raise
            if chunk.size == 1 < len(variants):
                raise _TooLarge from error
            found[:] = found if before is None else before  # a maximum does not mind what it has seen already
            if chunk.size > 1:
                return False
            self._checkpoint()
            return self._tried(found, start, chunk, variants, statistic)
        return True

    def _may_checkpoint(self) -> bool:
        """Whether checkpointing is left as a way to need less memory."""
        return bool(self.blocks) and not self.checkpointing

    def _checkpoint(self) -> None:
        self.checkpointing = True
        self.halved += 1
        release(self.device)

    def _add_chunk(
        self, found: list[Records], start: int, chunk: Chunk, variants: Sequence[Variant], statistic: Statistic
    ) -> None:
        modules = {name: self.modules[name] for name in found[0]}
        times = len(variants)
        taps = Taps(modules, chunk.size * times, variants)
        tree = moved(self.samples.tree(chunk, times), self.device)
        others = {n: value for variant in variants for n, value in variant.items() if n not in modules}
        with torch.enable_grad(), self.prefix.skipping(start, chunk, times), taps.open(), self._running(others, start):
            total = self.objective.summed(tree, chunk.size * times, self.findings.form)
            gradients = taps.gradients(total * self.scale) if total.requires_grad else [None] * len(taps.calls)
        with torch.no_grad():
            for name, number, reached in taps.layers(gradients):
                if not self._added_at_once(found[number][name], reached, statistic):
                    for each in per_sample(reached):
                        _add(found[number][name], each, statistic, self.scale)
        self.passes += chunk.size * times

    def _added_at_once(self, record: Tensor, reached: Sequence[Reached], statistic: Statistic) -> bool:
        """Whether a kernel has taken all samples of a weight, whose gradients then were never in memory."""
        plain = statistic == "largest" and self.scale == 1.0 and len(reached) == 1
        return plain and add_largest_(record, *reached[0])

    def _one_by_one(self, names: Sequence[str], variants: Sequence[Variant], statistic: Statistic) -> list[Records]:
        found = [{name: self._zeros(name) for name in names} for _ in variants]
        parameters = [self.weights[name].parameter for name in names]
        start = min(map(self.start, names))
        self._have(start)
        for chunk in self.samples.chunks(1):
            tree = moved(self.samples.tree(chunk), self.device)
            for record, variant in zip(found, variants, strict=True):
                for name, each in zip(names, self._one(tree, chunk, start, parameters, variant), strict=True):
                    if each is not None:
                        _add(record[name], each.unsqueeze(0), statistic, self.scale)
        return [self._finished(record, statistic) for record in found]

    def _one(
        self, tree: Tree, chunk: Chunk, start: int, parameters: list[nn.Parameter], variant: Variant
    ) -> Sequence[Tensor | None]:
        """Gradients of one sample's loss, with checkpointing where memory is not enough without."""
        try:
            return self._alone(tree, chunk, start, parameters, variant)
        except Exception as error:
            if not (is_out_of_memory(error) and self._may_checkpoint()):
                raise
        self._checkpoint()
        return self._alone(tree, chunk, start, parameters, variant)

    def _alone(
        self, tree: Tree, chunk: Chunk, start: int, parameters: list[nn.Parameter], variant: Variant
    ) -> Sequence[Tensor | None]:
        """Gradients of one sample's loss by autograd."""
        self.passes += 1
        with torch.enable_grad(), self.prefix.skipping(start, chunk), self._running(variant, start):
            for parameter in parameters:
                parameter.requires_grad_(True)
            try:
                loss = self.objective.alone(tree)
                if not loss.requires_grad:  # none of these weights has a part in it
                    return [None] * len(parameters)
                return gradients(self.objective.offload, loss * self.scale, parameters)
            finally:
                for parameter in parameters:
                    parameter.requires_grad_(False)

    @contextmanager
    def _running(self, variant: Variant, start: int) -> Iterator[None]:
        """The model with these weights from block ``start`` on, whose graph holds no more than it must."""
        values = {self.weights[name].parameter: value for name, value in variant.items()}
        again = recomputed(self.blocks[start:], self.objective.offload) if self.checkpointing else {}
        with swapped(values), saving(self.objective.offload), replaced(again):
            yield

    def _have(self, start: int) -> None:
        """Have the outputs of the blocks before ``start``."""

        def forward(chunk: Chunk) -> None:
            self._forward(moved(self.samples.tree(chunk), self.device), chunk.size)

        while True:
            try:
                self.forwards += self.prefix.ensure(start, forward, self._rows(1))
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.size == 1:  # there is no room to keep what blocks return, so that passes must be whole
                    self.findings.chained = False
                    self.prefix.want(())
                    raise _TooLarge from error
            self._shrink()

    def _forward(self, tree: Tree, size: int) -> None:
        if self.findings.batched:
            self.objective.summed(tree, size, self.findings.form)
        else:
            self.objective.alone(tree)

    def _rows(self, times: int) -> int:
        return max(1, self.size // times) if self.findings.batched else 1

    def _shrink(self) -> None:
        self.size = max(1, self.size // 2)
        self.halved += 1
        release(self.device)

    def _finished(self, record: Records, statistic: Statistic) -> Records:
        """The record where its weights are."""
        num = 1 if statistic == "largest" else len(self.samples)
        homes = {name: self.weights[name].parameter.device for name in record}
        return {name: (value if num == 1 else value / num).to(homes[name]) for name, value in record.items()}

    def _zeros(self, name: str) -> Tensor:
        weight = self.weights[name].parameter
        return torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=self.device)


def _add(record: Tensor, each: Tensor, statistic: Statistic, scale: float) -> None:
    """Take the gradients (samples, *shape), which are ``scale`` times too large, into a running record."""
    each = each.to(record.dtype)
    each = each if scale == 1.0 else each / scale
    if statistic == "largest":
        largest = each[0].abs() if len(each) == 1 else torch.linalg.vector_norm(each, torch.inf, dim=0)
        torch.maximum(record, largest, out=record)
    else:
        for one in each:  # one after the other, so that the size of a batch does not change the sum
            record.addcmul_(one, one)
