"""Sources as kernels read them: one formula, one dtype a register, a table of addresses."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..source import Lazy
from .formula import Formula, lower
from .plan import TYPES, Plan, plan, plan_each


@dataclass(frozen=True)
class Lowered:
    """Sources that one launch can read."""

    sources: Sequence[Lazy]
    formulas: Sequence[Formula]
    types: dict[str, tl.dtype | None]

    @property
    def read(self) -> dict[str, Any]:
        """What says to a kernel how to compute scores."""
        return {"NAME": self.formulas[0].name, "WT": self.types["w"], "MT": self.types["m"], "VT": self.types["v"]}

    def only(self, i: int) -> "Lowered":
        """One of the sources."""
        return Lowered(self.sources[i : i + 1], self.formulas[i : i + 1], self.types)

    def planned(self, live: Mapping[str, Tensor], offsets: Iterable[int], tile: int) -> Plan:
        return plan(*self._rows(live, offsets), self.sources[0].device, tile)

    def planned_each(self, live: Mapping[str, Tensor], offsets: Iterable[int], tile: int) -> list[Plan]:
        return plan_each(*self._rows(live, offsets), self.sources[0].device, tile)

    def _rows(self, live: Mapping[str, Tensor], offsets: Iterable[int]) -> tuple[tuple, tuple]:
        """Addresses of all sources and live masks, offsets of the masks to write, and constants."""
        w, m, v = (self.formulas[0].registers.get(register) for register in "wmv")
        has_extra = self.formulas[0].name in ("random", "wanda")
        rows, constants = [], []
        for source, formula, offset in zip(self.sources, self.formulas, offsets, strict=False):
            reads, mask = source.reads, live.get(source.name)
            rows.append((
                reads[w].data_ptr() if w else 0,
                reads[m].data_ptr() if m else 0,
                reads[v].data_ptr() if v else 0,
                0 if mask is None else mask.data_ptr(),
                offset,
                source.weight.numel(),
                _extra(source, formula) if has_extra else 0,
            ))  # fmt: skip
            scales = source.scales
            constants.append((formula.a, formula.b, scales.get(m, 1.0), scales.get(v, 1.0)))
        return tuple(rows), tuple(constants)


def lowered(sources: Sequence[Lazy]) -> Lowered | None:
    """The sources as kernels read them, or None where only their definition can be evaluated."""
    kind, constants = sources[0].formula, sources[0].constants
    formula = first = lower(kind, constants) if kind else None
    if first is None:
        return None
    names = tuple(first.registers.values())
    dtypes = [sources[0].reads[name].dtype for name in names]
    formulas, read = [], [(name, dtype) for name, dtype in zip(names, dtypes, strict=True) if dtype in TYPES]
    if len(read) < len(names):
        return None
    for source in sources:  # an event runs through here: what follows is written for speed
        if source.constants != constants:
            constants = source.constants
            formula = lower(kind, constants)
        if formula is None or source.formula != kind or source.dtype != torch.float32 or formula.name != first.name:
            return None
        formulas.append(formula)
        weight, reads = source.weight, source.reads
        for name, dtype in read:
            tensor = reads[name]
            if tensor.dtype != dtype or not tensor.is_contiguous():
                return None
            if tensor is not weight and tensor.shape != weight.shape and not _repeats(tensor, weight, name):
                return None
    types = dict.fromkeys("wmv") | {r: TYPES[dtype] for r, dtype in zip(first.registers, dtypes, strict=True)}
    return Lowered(sources, formulas, types)


def _repeats(tensor: Tensor, weight: Tensor, name: str) -> bool:
    """Whether a statistic repeats along the leading dimensions of the weight."""
    return name == "input_norm" and tensor.shape == weight.shape[weight.ndim - tensor.ndim :]


def _extra(source: Lazy, formula: Formula) -> int:
    """What random adds to positions, and after how many elements wanda's norms repeat."""
    if formula.name == "random":
        name, seed = source.constants.get("name", ""), source.constants.get("seed", 0)
        return zlib.crc32(name.encode()) << 31 ^ (seed * 0x9E3779B1 & 0x7FFFFFFF)
    return source.reads["input_norm"].numel()
