"""What scores read, as one launch reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..formula import Formula, start_of
from ..lazy import Lazy
from .address_table import TYPES, Table, made_table


@dataclass(frozen=True)
class Readable:
    """Sources that one launch can read: one formula, one dtype a register."""

    sources: Sequence[Lazy]
    formulas: Sequence[Formula]
    types: dict[str, tl.dtype | None]

    @property
    def kind(self) -> tuple:
        """What compiled forms depend on."""
        return self.formulas[0].name, *self.types.values()

    @property
    def read(self) -> dict[str, Any]:
        """The constants of kernels that say how scores are computed."""
        return {"NAME": self.formulas[0].name, "WT": self.types["w"], "MT": self.types["m"], "VT": self.types["v"]}

    def some(self, which: slice) -> "Readable":
        """Some of the sources."""
        return Readable(self.sources[which], self.formulas[which], self.types)

    def table(self, live: Mapping[str, Tensor], offsets: Sequence[int], tile: int | Sequence[int]) -> Table:
        """Table for masks at ``offsets``, in tiles of one size or of a size for each source."""
        sources, first = self.sources, self.formulas[0]
        w, m, v = (first.registers.get(register) for register in "wmv")
        nothing = [0] * len(sources)
        columns = [[s.reads[n].data_ptr() for s in sources] if n else nothing for n in (w, m, v)]
        masks = [live[s.name].data_ptr() if s.name in live else 0 for s in sources] if live else nothing
        numels = [s.weight.numel() for s in sources]
        has_extra = first.name in ("random", "wanda")
        extras = [_extra(s, f) for s, f in zip(sources, self.formulas, strict=True)] if has_extra else nothing
        constants = tuple(
            (f.a, f.b, s.scales.get(m, 1.0), s.scales.get(v, 1.0)) if s.scales else (f.a, f.b, 1.0, 1.0)
            for s, f in zip(sources, self.formulas, strict=True)
        )
        rows = tuple(zip(*columns, masks, offsets, numels, extras, strict=False))
        return made_table(rows, constants, sources[0].device, tile if isinstance(tile, int) else tuple(tile))


def readable(sources: Sequence[Lazy]) -> Readable | None:
    """The sources as kernels read them, or None where only their definition can be evaluated.

    An event runs through here, so it is written by columns, which is fast.
    """
    formula, constants = sources[0].formula, sources[0].constants
    first = formula(constants) if formula else None
    if formula is None or first is None or any(s.formula != formula or s.dtype != torch.float32 for s in sources):
        return None
    formulas: list[Formula] = [first] * len(sources)
    if any(s.constants != constants for s in sources):
        own = [formula(s.constants) for s in sources]
        formulas = [f for f in own if f is not None and f.name == first.name]
        if len(formulas) < len(sources):
            return None
    types: dict[str, tl.dtype | None] = {"w": None, "m": None, "v": None}
    for register, name in first.registers.items():
        read = [s.reads[name] for s in sources]
        dtype = read[0].dtype
        if dtype not in TYPES or any(t.dtype != dtype for t in read) or not all(map(Tensor.is_contiguous, read)):
            return None
        odd = [(t, s.weight) for t, s in zip(read, sources, strict=True) if t is not s.weight]
        if any(t.shape != weight.shape and not _repeats(t, weight, name) for t, weight in odd):
            return None
        types[register] = TYPES[dtype]
    return Readable(sources, formulas, types)


def _repeats(tensor: Tensor, weight: Tensor, name: str) -> bool:
    """Whether a statistic repeats along the leading dimensions of the weight."""
    return name == "input_norm" and tensor.shape == weight.shape[weight.ndim - tensor.ndim :]


def _extra(source: Lazy, formula: Formula) -> int:
    """What random adds to positions, and after how many elements wanda's norms repeat."""
    if formula.name == "random":
        return start_of(source.constants.get("name", ""), source.constants.get("seed", 0))
    return source.reads["input_norm"].numel()
