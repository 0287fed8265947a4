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
from .plan import TYPES, Plan, plan


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

    def planned(self, live: Mapping[str, Tensor], offsets: Iterable[int], tile: int) -> Plan:
        """The table of addresses of all sources and live masks, and of offsets of the masks to write."""
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
        return plan(tuple(rows), tuple(constants), self.sources[0].device, tile)


def lowered(sources: Sequence[Lazy]) -> Lowered | None:
    """The sources as kernels read them, or None where only their definition can be evaluated."""
    formulas: list[Formula] = []
    kind, constants = None, None
    for source in sources:
        if not formulas or source.formula != kind or source.constants != constants:
            kind, constants = source.formula, source.constants
            formula = lower(kind, constants) if kind else None
        if formula is None or source.dtype != torch.float32 or (formulas and formula.name != formulas[0].name):
            return None
        formulas.append(formula)
    types: dict[str, tl.dtype | None] = {"w": None, "m": None, "v": None}
    for register, name in formulas[0].registers.items():
        read = [source.reads[name] for source in sources]
        dtype = read[0].dtype
        if dtype not in TYPES or any(tensor.dtype != dtype for tensor in read):
            return None
        if not all(_is_readable(tensor, source.weight, name) for tensor, source in zip(read, sources, strict=True)):
            return None
        types[register] = TYPES[dtype]
    return Lowered(sources, formulas, types)


def _is_readable(tensor: Tensor, weight: Tensor, name: str) -> bool:
    """Whether a statistic has an element for each of the weight's, or repeats along its leading dimensions."""
    if not tensor.is_contiguous():
        return False
    if tensor is weight or tensor.shape == weight.shape:
        return True
    return name == "input_norm" and tensor.shape == weight.shape[weight.ndim - tensor.ndim :]


def _extra(source: Lazy, formula: Formula) -> int:
    """What random adds to positions, and after how many elements wanda's norms repeat."""
    if formula.name == "random":
        name, seed = source.constants.get("name", ""), source.constants.get("seed", 0)
        return zlib.crc32(name.encode()) << 31 ^ (seed * 0x9E3779B1 & 0x7FFFFFFF)
    return source.reads["input_norm"].numel()
