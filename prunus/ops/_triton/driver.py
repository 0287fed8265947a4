"""Launches of the exact cut: what ``prunus.cut`` calls for tensors on a GPU."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import bits
from ..digits import from_sortable
from ..source import Lazy
from . import cut as kernels
from .formula import Formula, lower
from .plan import TILE, TYPES, Plan, plan

SAMPLE = 1 << 20  # scores drawn at the most to bracket the threshold
SIGMAS = 3.5  # half width of the bracket in standard errors; a miss costs time, never exactness
BLOCK = 1024  # elements of a tile in registers at a time
SAMPLED = 256  # samples a program
BYTES = 256  # entries of a list that a program expands at a time
ALIGN = 128  # bytes; masks are written in words


@dataclass(frozen=True)
class Lowered:
    """Sources that one launch can read: one formula, one dtype a register."""

    sources: Sequence[Lazy]
    formulas: Sequence[Formula]
    types: dict[str, tl.dtype | None]


def lowered(sources: Sequence[Lazy]) -> Lowered | None:
    """The sources as kernels read them, or None where only their definition can be evaluated."""
    formulas: list[Formula] = []
    for i, source in enumerate(sources):
        same = i > 0 and source.formula == sources[i - 1].formula and source.constants == sources[i - 1].constants
        formula = formulas[-1] if same else source.formula and lower(source.formula, source.constants)
        if not formula or source.dtype != torch.float32 or (formulas and formula.name != formulas[0].name):
            return None
        formulas.append(formula)
    types: dict[str, tl.dtype | None] = {"w": None, "m": None, "v": None}
    for register, name in formulas[0].registers.items():
        dtypes = {source.reads[name].dtype for source in sources}
        if len(dtypes) > 1 or not dtypes <= set(TYPES) or not all(_is_readable(source, name) for source in sources):
            return None
        types[register] = TYPES[dtypes.pop()]
    return Lowered(sources, formulas, types)


def _is_readable(source: Lazy, name: str) -> bool:
    """Whether a statistic has an element for each of the weight's, or repeats along its leading dimensions."""
    tensor = source.reads[name]
    if not tensor.is_contiguous():
        return False
    return tensor.shape == source.shape or (
        name == "input_norm" and tensor.shape == source.shape[len(source.shape) - tensor.ndim :]
    )


def planned(low: Lowered, live: Mapping[str, Tensor], offsets: Sequence[int], tile: int) -> Plan:
    """The table of addresses of all sources and live masks, and of offsets of the masks to write."""
    rows, constants = [], []
    names = [low.formulas[0].registers.get(register) for register in "wmv"]
    has_extra = low.formulas[0].name in ("random", "wanda")
    for source, formula, offset in zip(low.sources, low.formulas, offsets, strict=True):
        reads, mask = source.reads, live.get(source.name)
        addresses = [reads[name].data_ptr() if name else 0 for name in names]
        extra = _extra(source, formula) if has_extra else 0
        rows.append((*addresses, 0 if mask is None else mask.data_ptr(), offset, source.numel, extra))
        scales = [source.scales.get(name, 1.0) for name in names[1:]] if source.scales else (1.0, 1.0)
        constants.append((formula.a, formula.b, *scales))
    return plan(tuple(rows), tuple(constants), low.sources[0].device, tile)


def _extra(source: Lazy, formula: Formula) -> int:
    """What random adds to positions, and after how many elements wanda's norms repeat."""
    if formula.name == "random":
        name, seed = source.constants.get("name", ""), source.constants.get("seed", 0)
        return zlib.crc32(name.encode()) << 31 ^ (seed * 0x9E3779B1 & 0x7FFFFFFF)
    return source.reads["input_norm"].numel() if formula.name == "wanda" else 0


def launch_cut(low: Lowered, num_drop: int, num_live: int, live: Mapping[str, Tensor], tile: int = TILE) -> "Pending":
    """Start the cut of ``num_drop`` of ``num_live`` elements; the host does not wait."""
    device = low.sources[0].device
    sizes = [-(-bits.num_bytes(source.numel) // ALIGN) * ALIGN for source in low.sources]
    offsets = [0, *accumulate(sizes)]
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=device)  # all masks side by side
    p = planned(low, live, offsets[:-1], tile)
    lanes = max(1, min(256, tile, 1 << (SAMPLE // p.num_tiles).bit_length() - 1 if p.num_tiles <= SAMPLE else 1))
    share = num_drop / num_live
    num_sampled = max(1.0, p.num_tiles * lanes * num_live / sum(source.numel for source in low.sources))
    expected = num_live * 2 * (SIGMAS * math.sqrt(share * (1 - share) / num_sampled) + 1 / num_sampled)
    per_program = -(-min(expected, num_live) // p.num_programs)
    capacity = min(int(1.1 * per_program) + 256, -(-p.num_tiles // p.num_programs) * tile // 8)

    num, size = p.num_tiles * lanes, p.num_programs * capacity
    scratch = torch.empty(max(num, 2 * size), dtype=torch.int32, device=device)  # the sample, then lists and keys
    keys = scratch[size:]
    counts = torch.zeros(kernels.COUNTERS_AT.value + p.num_programs, dtype=torch.int32, device=device)
    state = torch.zeros(kernels.STATE, dtype=torch.int64, device=device)

    read = {"NAME": low.formulas[0].name, "WT": low.types["w"], "MT": low.types["m"], "VT": low.types["v"]}
    tensors, shape = (p.table, p.constants, len(p.table)), {"DEPTH": p.depth, "TILE": tile}
    at_once, grid = max(1, SAMPLED // lanes), (p.num_programs, 4)
    kernels.sample_kernel[(triton.cdiv(p.num_tiles, at_once),)](
        *tensors, p.num_tiles, scratch, counts, **read, **shape, LANES=lanes, TILES=at_once
    )
    kernels.coarse_kernel[(2,)](counts, state, share, SIGMAS, CHUNK=4096, num_warps=8)
    kernels.fine_kernel[(triton.cdiv(num, BLOCK),)](scratch, num, state, counts, BLOCK=BLOCK)
    kernels.bracket_kernel[(1,)](state, counts, num_warps=8)
    kernels.sweep_kernel[(p.num_programs,)](
        *tensors, p.num_tiles, out, scratch, counts, state, capacity,
        **read, **shape, FAST=low.formulas[0].has_fast_roots, ALIGN=p.align, BLOCK=min(BLOCK, tile),
    )  # fmt: skip
    inside = (scratch, keys, state, counts, capacity, p.num_programs)
    kernels.spread_kernel[grid](*tensors, *inside, **read, **shape, BYTES=BYTES)
    kernels.decide_kernel[(1,)](counts, p.num_programs, capacity, state, num_live, num_drop, CHUNK=4096, num_warps=8)
    kernels.settle_kernel[grid](*tensors, out, *inside, **read, **shape, BYTES=BYTES)
    kernels.finish_kernel[(1,)](p.table, len(p.table), out, state, **shape, num_warps=8)
    parts = zip(low.sources, offsets, strict=False)
    masks = {source.name: out[offset : offset + bits.num_bytes(source.numel)] for source, offset in parts}
    return Pending(low, masks, state[:16], p)


@dataclass(frozen=True)
class Pending:
    """A cut under way on the device."""

    low: Lowered
    masks: dict[str, Tensor]
    state: Tensor
    plan: Plan  # kept until the kernels have read it

    def wait(self) -> "dict[str, Tensor] | tuple[float, float] | None":
        """The masks, after the one word from the device.

        Where ties overfilled the last bucket: the scores that bound it. Where the bracket missed: None.
        """
        state = self.state.tolist()
        if state[kernels.NOT_FINITE.value]:
            name = self.low.sources[state[kernels.NOT_FINITE.value] - 1].name
            raise ValueError(
                f"scores must be finite, but {name} has some that are not; look for NaN in weight and moments"
            )
        if not state[kernels.FOUND.value]:
            return None
        if state[kernels.OVERFLOW.value]:
            shift, bucket = state[kernels.SHIFT.value], state[kernels.BUCKET.value]
            first = state[kernels.BASE.value] + (bucket << shift)
            return from_sortable(first, torch.float32), from_sortable(first + (1 << shift) - 1, torch.float32)
        return self.masks
