"""Gradient records: for each weight a statistic of its per-sample gradients, with many samples in a pass.

Decisions are those of one sample at a time. Layers whose gradients cannot be rebuilt from a batch (see inspection)
get theirs from autograd, one sample at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from ...ops import bits
from ..blocks import Stream
from ..calibration import Calibration
from ..forward import replaced, requiring_grad, swapped
from ..layers import holders
from ..offload import checkpointed, gradients, saving
from ..originals import Originals
from ..resources import batch_size, is_out_of_memory, release
from ..samples import Chunk, Tree
from .inspection import Findings, inspect
from .objective import Objective
from .taps import NotRows, Taps, Variant, add_largest_, sample_gradients

Statistic = Literal["largest", "mean square"]
Records = dict[str, Tensor]
Variants = Sequence[Variant]
T = TypeVar("T")
SCALE = 2.0**12  # of the loss of float16 models, whose gradients would vanish; a weight whose gradient overflows stays


class _TooLarge(Exception):
    """Memory does not hold one sample for several variants, or the stored outputs of blocks."""


class Engine:
    def __init__(self, calibration: Calibration, objective: Objective, checkpointing: bool = False) -> None:
        self.calibration = calibration
        self.objective = objective
        self.checkpointing = checkpointing  # blocks run again for the backward; turned on where nothing else fits
        self.weights = calibration.weights
        half = any(parameter.dtype == torch.float16 for parameter in calibration.model.parameters())
        self.scale = SCALE if half else 1.0
        self.modules = holders(calibration.model, list(calibration.weights.values()))
        self.findings: Findings = inspect(calibration, objective, self.modules)
        calibration.cost.passes += 4
        self.stream = Stream(calibration.blocks if self.findings.chained else [], calibration.samples)
        self.together = True  # all variants of a sample fit into one pass
        self.size = calibration.batch_size or batch_size(self.findings.saved_bytes, calibration.device)  # rows per pass

    def start(self, name: str) -> int:
        """How many blocks a pass for this weight may skip: those that end before its layer is first called."""
        return self.findings.starts.get(name, 0) if self.findings.chained else 0

    def changed(self, names: Sequence[str]) -> None:
        """Drop stored activations that depend on these weights, whose values have changed."""
        self.stream.drop_after(min(map(self.start, names)))

    @contextmanager
    def reduced(self, where: Mapping[str, Tensor], reduction: float) -> Iterator[None]:
        """The model with these elements, given as packed bits, multiplied by ``reduction`` in place."""
        before = Originals()
        try:
            for name, packed in where.items():
                parameter = self.weights[name].parameter
                here = bits.unpack(packed, parameter.shape)
                parameter.detach()[here] = before.save(parameter, here) * reduction
            self.changed(list(where))
            yield
        finally:
            before.restore_()
            self.changed(list(where))

    def records(self, names: Sequence[str], variants: Variants, statistic: Statistic = "largest") -> list[Records]:
        """The statistic over samples of ``|dLoss / dW|`` for each variant and weight, in float32 or float64."""
        # in one pass only weights that are tapped can differ between the parts of a batch
        tapped = all(name in self.findings.quick for variant in variants for name in variant)
        if len(variants) > 1 and not (self.together and tapped):
            return [self.records(names, [variant], statistic)[0] for variant in variants]
        while True:
            try:
                records, cost = self._recorded(names, variants, statistic), self.calibration.cost
                cost.rows, cost.checkpointing = self.size, self.checkpointing
                return records
            except NotRows as what:
                self.findings.quick.discard(str(what))
            except _TooLarge:
                self.together = False
                self.calibration.cost.halved += 1
                return self.records(names, variants, statistic)

    def _recorded(self, names: Sequence[str], variants: Variants, statistic: Statistic) -> list[Records]:
        quick = [name for name in names if name in self.findings.quick]
        slow = [name for name in names if name not in quick]
        records = self._batched(quick, variants, statistic) if quick else [{} for _ in variants]
        if slow:
            for record, more in zip(records, self._one_by_one(slow, variants, statistic), strict=True):
                record.update(more)
        return records

    def _batched(self, names: Sequence[str], variants: Variants, statistic: Statistic) -> list[Records]:
        records = [{name: self._zeros(name) for name in names} for _ in variants]
        start = min(map(self.start, names))
        self._have(start)

        def add(chunk: Chunk) -> None:
            # a maximum may see a sample twice, a sum may not
            before = [] if statistic == "largest" else [{n: r.clone() for n, r in record.items()} for record in records]
            try:
                self._add_chunk(records, start, chunk, variants, statistic)
            except Exception as error:
                records[:] = before or records
                if is_out_of_memory(error) and chunk.size == 1 < len(variants):
                    raise _TooLarge from error
                raise

        def act(chunk: Chunk) -> None:
            add(chunk) if chunk.size > 1 else self._fitted(partial(add, chunk))

        self.calibration.visit(self._rows(len(variants)), act, make_room=self._shrink)
        return [self._finished(record, statistic) for record in records]

    def _fitted(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, with checkpointing where memory is not enough for a sample without it."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error) or not self.calibration.blocks or self.checkpointing:
                raise
        self.checkpointing = True
        self.calibration.cost.halved += 1
        release(self.calibration.device)
        return work()

    def _add_chunk(
        self, found: list[Records], start: int, chunk: Chunk, variants: Variants, statistic: Statistic
    ) -> None:
        modules = {name: self.modules[name] for name in found[0]}
        times = len(variants)
        taps = Taps(modules, chunk.size * times, variants)
        batch = self.calibration.batch(chunk, times)
        others = {n: value for variant in variants for n, value in variant.items() if n not in modules}
        stream = self.stream.starting_at(start, chunk, times)
        with torch.enable_grad(), stream, taps.open(), self._running(others, start):
            total = self.objective.summed(batch, chunk.size * times, self.findings.form)
            gradients = taps.gradients(total * self.scale) if total.requires_grad else [None] * len(taps.calls)
        with torch.no_grad():
            for name, number, calls in taps.layers(gradients):
                is_plain = statistic == "largest" and self.scale == 1.0 and len(calls) == 1
                # a kernel takes all samples of a weight without writing their gradients to memory
                if not (is_plain and add_largest_(found[number][name], *calls[0])):
                    for each in sample_gradients(calls):
                        _add(found[number][name], each, statistic, self.scale)
        self.calibration.cost.passes += chunk.size * times

    def _one_by_one(self, names: Sequence[str], variants: Variants, statistic: Statistic) -> list[Records]:
        records = [{name: self._zeros(name) for name in names} for _ in variants]
        parameters = [self.weights[name].parameter for name in names]
        start = min(map(self.start, names))
        self._have(start)
        for chunk in self.calibration.samples.chunks(1):
            batch = self.calibration.batch(chunk)
            for record, variant in zip(records, variants, strict=True):
                found = self._fitted(partial(self._alone, batch, chunk, start, parameters, variant))
                for name, each in zip(names, found, strict=True):
                    if each is not None:
                        _add(record[name], each.unsqueeze(0), statistic, self.scale)
            self.calibration.meter.sampled(1)
        return [self._finished(record, statistic) for record in records]

    def _alone(
        self, batch: Tree, chunk: Chunk, start: int, parameters: list[nn.Parameter], variant: Variant
    ) -> Sequence[Tensor | None]:
        self.calibration.cost.passes += 1
        stream, running = self.stream.starting_at(start, chunk), self._running(variant, start)
        with torch.enable_grad(), stream, running, requiring_grad(parameters):
            loss = self.objective.alone(batch)
            if not loss.requires_grad:  # it depends on none of these weights
                return [None] * len(parameters)
            return gradients(self.calibration.offload, loss * self.scale, parameters)

    @contextmanager
    def _running(self, variant: Variant, start: int) -> Iterator[None]:
        """The model with these weights from block ``start`` on, whose graph holds no more than it must."""
        blocks, offload = self.calibration.blocks[start:] if self.checkpointing else [], self.calibration.offload
        again = replaced({block: checkpointed(block, offload) for block in blocks})
        with swapped({self.weights[name].parameter: value for name, value in variant.items()}), saving(offload), again:
            yield

    def _have(self, start: int) -> None:
        def forward(chunk: Chunk) -> None:
            if self.findings.batched:
                self.objective.summed(self.calibration.batch(chunk), chunk.size, self.findings.form)
            else:
                self.objective.alone(self.calibration.batch(chunk))

        while True:
            try:
                self.calibration.cost.forwards += self.stream.ensure(start, forward, self._rows(1))
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.size == 1:  # no room to store activations, so passes must be whole
                    self.findings.chained = False
                    self.stream.want(())
                    raise _TooLarge from error
            self._shrink()

    def _rows(self, times: int) -> int:
        return max(1, self.size // times) if self.findings.batched else 1

    def _shrink(self) -> None:
        self.size = max(1, self.size // 2)
        self.calibration.cost.halved += 1
        release(self.calibration.device)

    def _finished(self, record: Records, statistic: Statistic) -> Records:
        num = 1 if statistic == "largest" else len(self.calibration.samples)
        homes = {name: self.weights[name].parameter.device for name in record}
        return {name: (value if num == 1 else value / num).to(homes[name]) for name, value in record.items()}

    def _zeros(self, name: str) -> Tensor:
        weight = self.weights[name].parameter
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros(weight.shape, dtype=dtype, device=self.calibration.device)


def _add(record: Tensor, each: Tensor, statistic: Statistic, scale: float) -> None:
    """Take gradients (samples, *shape) of a loss that was multiplied by ``scale`` into a running record."""
    each = each.to(record.dtype)
    each = each if scale == 1.0 else each / scale
    if statistic == "largest":
        largest = each[0].abs() if len(each) == 1 else torch.linalg.vector_norm(each, torch.inf, dim=0)
        torch.maximum(record, largest, out=record)
    else:
        for one in each:  # one after the other, so that the batch size does not change the sum
            record.addcmul_(one, one)
