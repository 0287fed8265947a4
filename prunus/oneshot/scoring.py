"""Scores of the weights of a trained model: of the weights themselves, their inputs or their gradients."""

import math
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..eligible import Weight
from ..input_statistics import check_inputs
from ..ops import bits
from ..ops.lazy import Lazy
from ..score import SCORES, Score, fisher, magnitude
from ..select import Selector, Shape
from ..statistics import score_of
from .calibration import Calibration
from .journal import fingerprint
from .norms import input_norms
from .options import Method, ScoreLike
from .probe.engine import Engine
from .probe.objective import Objective
from .resources import release

Packed = Mapping[str, Tensor]
READABLE = {"weight", "input_norm", "position"}


def path(weight: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``|w| (G0 + G1)``: a trapezoid of the change of the loss while the weight shrinks."""
    return weight.abs() * (before + after)


def _row(score: ScoreLike) -> Score | None:
    """The row of a score that ``prune`` supports; None for the two that are computed from gradients here."""
    if score in ("fisher", "path"):
        return None
    takes = "magnitude, wanda, fisher, path or random, or a function of weight, input_norm or position"
    if not callable(score) and score not in SCORES:
        raise ValueError(f"score must be {takes}, got {score!r}")
    row = score_of(score, {})
    if missing := [name for name in row.reads if name not in READABLE] + [n for n in row.settings if n != "name"]:
        problem = f"{score} reads {missing[0]}, which a trained model without its optimizer does not have"
        raise ValueError(f"{problem}; take {takes}")
    return row


class Scores:
    """Scores by one method; what it reads of the model is gathered once, until it is refreshed."""

    def __init__(self, calibration: Calibration, method: Method) -> None:
        self.calibration, self.method, self.weights = calibration, method, calibration.weights
        self.score: ScoreLike = method.score or "magnitude"
        self.row = _row(self.score)
        if self.row and "input_norm" in self.row.reads:
            check_inputs(list(self.weights.values()))
        self.fingerprint: dict[str, list[int]] = {}  # of weights on disk, as they were when ``live`` read them
        self._engine: Engine | None = None

    @property
    def num_passes(self) -> int:
        """How often a choice reads the samples, for the score and for the allocation."""
        num = int(self.method.allocate == "fisher")
        if self.method.score is None:
            return num
        if self.row is not None:
            return num + ("input_norm" in self.row.reads)
        return num + (2 if self.score == "path" else 1)

    def refresh(self) -> None:
        """Gather input norms and gradients anew at the next call."""
        for name in ("_norms", "_squares"):
            vars(self).pop(name, None)

    def changed(self) -> None:
        """Drop what the engine stored: weights were changed outside it."""
        if self._engine is not None:
            self._engine.changed(list(self.weights))

    def engine(self) -> Engine:
        """The engine of the model's gradients, made when it is first asked for."""
        if self._engine is None:
            calibration = self.calibration
            objective = Objective(calibration.model, self.method.loss)
            objective.check(calibration.batch(next(calibration.samples.chunks(1))))
            calibration.meter.show("inspection of the model")
            with calibration.clock.part("inspection"):
                self._engine = Engine(calibration, objective, self.method.checkpointing)
        return self._engine

    def live(self, within: Packed) -> dict[str, Tensor]:
        """Packed bits of what is not zero, within these masks: a weight that is zero counts as pruned."""
        disk = self.calibration.disk
        live = self._room() if disk else {}
        for weight in self.calibration.each_weight():
            name, packed = weight.name, bits.pack(weight.parameter.detach() != 0)
            live[name] = live[name].copy_(packed) if name in live else packed
            if disk:  # which is read for this anyway
                self.fingerprint |= fingerprint([weight])
        if disk:
            disk.clear()
            release(torch.device("cpu"))
        return {name: here & within[name] if name in within else here for name, here in live.items()}

    def _room(self) -> dict[str, Tensor]:
        """Room for packed masks, side by side: made one by one, they would pin the heap that read weights leave."""
        sizes = [bits.num_bytes(weight.parameter.numel()) for weight in self.weights.values()]
        return dict(zip(self.weights, torch.empty(sum(sizes), dtype=torch.uint8).split(sizes), strict=True))

    def num_pruned(self, name: str, packed: Packed) -> int:
        return self.weights[name].parameter.numel() - int(bits.count(packed[name]))

    def shapes(self) -> list[Shape]:
        return [Shape(name, tuple(weight.parameter.shape), weight.outputs) for name, weight in self.weights.items()]

    def keep(self, select: Selector, sparsity: float, live: Packed) -> dict[str, Tensor]:
        if select.group in ("row", "neighbours"):  # refuses weights without such rows before any pass
            select.quota(self.shapes(), sparsity)
        return select.packed(self.sources(select, sparsity, live), sparsity, live)

    def allocating(self) -> list[Lazy]:
        """Scores by whose global order the layers share a sparsity: Fisher's, or by the moments of training."""
        if self.method.allocate == "fisher":
            return self._fisher()
        moments, row = self.method.moments, SCORES["bitter7"]
        for name, weight in self.weights.items():
            if name not in moments or moments[name].shape != weight.parameter.shape:
                problem = "allocate='moments' reads Adam's second moments (exp_avg_sq) by name"
                raise ValueError(f"{problem}, but moments= has none of {name}; pass them, or take allocate='fisher'")
        reads = [moments[w.name].to(w.parameter.device, torch.float32) for w in self.weights.values()]
        both = zip(self.weights.values(), reads, strict=True)
        return [_lazy(weight, row.of, {"exp_avg_sq": squares}, {}, row) for weight, squares in both]

    def sources(self, select: Selector, sparsity: float, live: Packed) -> list[Lazy]:
        """Scores of every weight, of which ``path`` alone depends on the sparsity."""
        if self.score == "fisher":
            return self._fisher()
        if self.score == "path":
            return self._path(select, sparsity, live)
        row, norms, disk, sources = self.row, self._norms, self.calibration.disk, []
        assert row is not None
        last: dict[str, Tensor] = {}

        def read(name: str) -> Tensor:
            if name not in last:
                last.clear()  # before the next one takes memory
                assert disk is not None
                last[name] = disk.value(name)
            return last[name]

        for name, weight in self.weights.items():
            reads = {"input_norm": norms[name]} if name in norms else {}
            source = _lazy(weight, row.of, reads, {"name": name} if "name" in row.settings else {}, row)
            if disk and name in disk.names and "weight" in source.reads:
                source = replace(source, reads=_OnDisk(name, read, reads))
            sources.append(source)
        return sources

    @cached_property
    def _norms(self) -> dict[str, Tensor]:
        """Norms by weight; none where the score does not read them."""
        if self.row is None or "input_norm" not in self.row.reads:
            return {}
        with self.calibration.reading("input norms"):
            return input_norms(self.calibration)

    @cached_property
    def _squares(self) -> dict[str, Tensor]:
        engine = self.engine()
        with self.calibration.reading("gradients"):
            return engine.records(list(self.weights), [{}], "mean square")[0]

    def _fisher(self) -> list[Lazy]:
        squares = self._squares
        return [_lazy(w, fisher, {"exp_avg_sq": squares[n]}, {"step": math.inf}) for n, w in self.weights.items()]

    def _path(self, select: Selector, sparsity: float, live: Packed) -> list[Lazy]:
        """G1 is recorded with all that magnitude would prune reduced to a tenth at once."""
        engine, names = self.engine(), list(self.weights)
        with self.calibration.reading("gradients"):
            (before,) = engine.records(names, [{}])
        plain = [_lazy(weight, magnitude, {}, {}) for weight in self.weights.values()]
        masks = select.packed(plain, sparsity, live)
        reduced = engine.reduced({name: ~mask for name, mask in masks.items()}, 0.1)
        with reduced, self.calibration.reading("gradients with weights reduced"):
            (after,) = engine.records(names, [{}])
        return [_lazy(w, path, {"before": before[n], "after": after[n]}, {}) for n, w in self.weights.items()]


class _OnDisk(UserDict[str, Any]):
    """What a score reads of a weight on disk: its values are read when they are needed."""

    def __init__(self, name: str, read: Callable[[str], Tensor], others: Mapping[str, Tensor]) -> None:
        super().__init__({"weight": name, **others})
        self.read = read

    def __getitem__(self, key: str) -> Tensor:
        return self.read(self.data[key]) if key == "weight" else self.data[key]


def _lazy(weight: Weight, of: Callable[..., Tensor], reads: dict, constants: dict, row: Score | None = None) -> Lazy:
    values, takes_position = weight.parameter.detach(), row is not None and "position" in row.reads
    if row is None or "weight" in row.reads:
        reads = {"weight": values} | reads
    formula = row.formula if row else SCORES["magnitude"].formula if of is magnitude else None
    dtype = torch.promote_types(values.dtype, torch.float32)
    return Lazy(weight.name, values, of, reads, constants, {}, takes_position, dtype, formula, weight.outputs)
