"""One launch over many tensors: a table of their addresses, and tiles that are dealt out to resident programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formula import Formula, start_of
from ..lazy import Lazy

TILE = 16384  # elements of one tensor that a program works on before it takes the next tile
COLUMNS = tl.constexpr(8)  # of the table: w, m, v, live, out, numel, extra, first tile
W, M, V, LIVE, OUT, NUMEL, EXTRA, FIRST = (tl.constexpr(i) for i in range(8))
PROGRAMS_PER_SM = 16
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Table:
    """Addresses and constants of all tensors on the device, and how many tiles they make."""

    rows: Tensor  # (num_tensors, COLUMNS) int64
    constants: Tensor  # (num_tensors, 4) float32: a, b, factor of m, factor of v
    num_tiles: int
    align: int  # bytes that all addresses of w, m and v are multiples of
    is_full: bool  # whether all tiles are

    @property
    def kind(self) -> tuple:
        """What compiled forms depend on."""
        return self.rows.device, self.align, self.depth

    @property
    def depth(self) -> int:
        """Halvings that find a tile's tensor."""
        return max(1, (len(self.rows) - 1).bit_length())

    @property
    def num_programs(self) -> int:
        return max(1, min(self.num_tiles, PROGRAMS_PER_SM * num_multiprocessors(self.rows.device)))


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


_TABLES: dict[tuple, Table] = {}  # the last few; a training asks for the same one at every event


def made_table(
    rows: tuple[tuple[int, ...], ...],
    constants: tuple[tuple[float, ...], ...],
    device: torch.device,
    tile: int | tuple[int, ...],
) -> Table:
    """Table of tensors given as rows of addresses (w, m, v, live), offset of the mask, numel and extra."""
    key = (rows, constants, device, tile)
    if key in _TABLES:
        return _TABLES[key]
    tiles = (tile,) * len(rows) if isinstance(tile, int) else tile
    filled, num_tiles = [], 0
    for row, size in zip(rows, tiles, strict=True):
        filled.append([*row, num_tiles])
        num_tiles += triton.cdiv(row[5], size)
    table = torch.tensor(filled, dtype=torch.int64).to(device)
    numbers = torch.tensor(constants, dtype=torch.float32).to(device)
    align = alignment(address for row in rows for address in row[:3])
    is_full = all(row[5] % size == 0 for row, size in zip(rows, tiles, strict=True))
    made = Table(table, numbers, num_tiles, align, is_full)
    if len(_TABLES) >= 8:
        _TABLES.pop(next(iter(_TABLES)), None)  # another thread may have done so
    _TABLES[key] = made
    return made


def alignment(addresses: Iterable[int]) -> int:
    """16 where every address allows loads of 16 bytes, else 1."""
    return 16 if all(address % 16 == 0 for address in addresses) else 1


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def locate(table, num_tensors, tile, DEPTH: tl.constexpr):
    """Which tensor ``tile`` belongs to: the last whose first tile is not behind it."""
    lo, hi = 0, num_tensors
    for _ in tl.static_range(DEPTH):
        middle = (lo + hi) // 2
        before = tl.load(table + middle * COLUMNS + FIRST, mask=middle < num_tensors, other=1 << 62) <= tile
        lo = tl.where(before, middle, lo)
        hi = tl.where(before, hi, middle)
    return lo


@triton.jit
def is_live(live, at, valid):
    """Whether the bit of each element is set; all are live where there is no mask (address 0)."""
    bits = tl.load(live.to(tl.pointer_type(tl.uint8)) + at // 8, mask=valid & (at * 0 + live != 0), other=255)
    return valid & (((bits.to(tl.int32) >> (at % 8).to(tl.int32)) & 1) != 0)


@triton.jit
def typed(address, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer from an address that is a multiple of ``ALIGN``; told of 16, the compiler loads 16 bytes at a time."""
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGN > 1:
        pointer = tl.multiple_of(pointer, ALIGN)
    return pointer


@triton.jit
def load(pointer, valid, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer).to(tl.float32)
    return tl.load(pointer, mask=valid, other=0.0).to(tl.float32)
