"""Launches of the exact cut: what ``prunus.cut`` calls for tensors on a GPU."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import bits
from ..source import Lazy
from . import cut as kernels
from .formula import Formula, lower
from .plan import TILE, TYPES, Plan, plan

SAMPLE = 1 << 21  # scores drawn at the most to bracket the threshold
SIGMAS = 4.0  # half width of the bracket in standard errors; a miss costs time, never exactness
BLOCK = 1024
ALIGN = 128  # bytes; masks are written in words


@dataclass(frozen=True)
class Lowered:
    """Sources that one launch can read: one formula, one dtype a register."""

    sources: Sequence[Lazy]
    formulas: Sequence[Formula]
    types: dict[str, tl.dtype | None]


def lowered(sources: Sequence[Lazy]) -> Lowered | None:
    """The sources as kernels read them, or None where only their definition can be evaluated."""
    formulas = [lower(s.formula, s.constants) if s.formula and s.dtype == torch.float32 else None for s in sources]
    if any(f is None or f.name != formulas[0].name for f in formulas):
        return None
    types: dict[str, tl.dtype | None] = {"w": None, "m": None, "v": None}
    for register, name in formulas[0].registers.items():
        dtypes = {source.reads[name].dtype for source in sources}
        if len(dtypes) > 1 or not dtypes <= set(TYPES):
            return None
        types[register] = TYPES[dtypes.pop()]
        for source in sources:
            if not source.reads[name].is_contiguous() or not _is_readable(source, name):
                return None
    return Lowered(sources, formulas, types)


def _is_readable(source: Lazy, name: str) -> bool:
    """Whether a statistic has an element for each of the weight's, or repeats along its leading dimensions."""
    shape = source.reads[name].shape
    return shape == source.shape or (name == "input_norm" and shape == source.shape[len(source.shape) - len(shape) :])


def planned(low: Lowered, live: Mapping[str, Tensor], out: Mapping[str, Tensor], tile: int) -> Plan:
    """The table of addresses of all sources, their live masks and the masks to write."""
    rows, constants = [], []
    for source, formula in zip(low.sources, low.formulas, strict=True):
        reads = {register: source.reads[name] for register, name in formula.registers.items()}
        mask = live.get(source.name)
        rows.append(
            [
                *(reads[register].data_ptr() if register in reads else 0 for register in "wmv"),
                0 if mask is None else mask.data_ptr(),
                out[source.name].data_ptr() if source.name in out else 0,
                source.numel,
                _extra(source, formula),
            ]
        )
        scales = [source.scales.get(formula.registers.get(register, ""), 1.0) for register in "mv"]
        constants.append([formula.a, formula.b, *scales])
    return plan(rows, constants, low.sources[0].device, tile)


def _extra(source: Lazy, formula: Formula) -> int:
    """What random adds to positions, and after how many elements wanda's norms repeat."""
    if formula.name == "random":
        name, seed = source.constants.get("name", ""), source.constants.get("seed", 0)
        return zlib.crc32(name.encode()) << 31 ^ (seed * 0x9E3779B1 & 0x7FFFFFFF)
    return source.reads["input_norm"].numel() if formula.name == "wanda" else 0


def empty_masks(sources: Sequence[Lazy]) -> dict[str, Tensor]:
    """Uninitialised packed masks, side by side in one allocation."""
    sizes = [-(-bits.num_bytes(source.numel) // ALIGN) * ALIGN for source in sources]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=sources[0].device)
    parts = zip(sources, flat.split(sizes), strict=True)
    return {source.name: part[: bits.num_bytes(source.numel)] for source, part in parts}


def launch_cut(low: Lowered, num_drop: int, num_live: int, live: Mapping[str, Tensor], tile: int = TILE) -> "Pending":
    """Start the cut of ``num_drop`` of ``num_live`` elements; the host does not wait."""
    device = low.sources[0].device
    out = empty_masks(low.sources)
    p = planned(low, live, out, tile)
    lanes = max(1, min(256, tile, 1 << (SAMPLE // p.num_tiles).bit_length() - 1 if p.num_tiles <= SAMPLE else 1))
    share = num_drop / num_live
    num_sampled = p.num_tiles * lanes * num_live / sum(source.numel for source in low.sources)
    expected = num_live * 2 * (SIGMAS * math.sqrt(share * (1 - share) / max(1.0, num_sampled)) + 1 / max(1.0, num_sampled))
    per_program = -(-min(expected, num_live) // p.num_programs)
    capacity = min(int(1.15 * per_program) + 256, -(-p.num_tiles // p.num_programs) * tile)

    space = max(p.num_tiles * lanes, 2 * p.num_programs * capacity)
    scratch = torch.empty(space, dtype=torch.int32, device=device)  # the sample, then what lies inside the bracket
    keys, places = scratch[: p.num_programs * capacity], scratch[p.num_programs * capacity :]
    bins, fine, buckets = (kernels.BINS.value, 2 * kernels.FINE.value, kernels.BUCKETS.value)
    zeros = torch.zeros(bins + fine + buckets + p.num_programs, dtype=torch.int32, device=device)
    histogram, fine_counts, bucket_counts, counters = zeros.split([bins, fine, buckets, p.num_programs])
    state = torch.zeros(kernels.STATE + 4 + 2 * kernels.LIST.value, dtype=torch.int64, device=device)
    coarse = state[kernels.STATE : kernels.STATE + 4]
    listed_keys, listed_orders = state[kernels.STATE + 4 :].chunk(2)

    read = {"NAME": low.formulas[0].name, "WT": low.types["w"], "MT": low.types["m"], "VT": low.types["v"]}
    tensors, num = (p.table, p.constants, len(p.table), p.num_tiles), p.num_tiles * lanes
    kernels.sample_kernel[(p.num_programs,)](
        *tensors, scratch, histogram, state, **read, DEPTH=p.depth, LANES=lanes, TILE=tile, num_warps=max(1, min(4, lanes // 32))
    )
    kernels.coarse_kernel[(2,)](histogram, state, coarse, share, SIGMAS, CHUNK=4096, num_warps=8)
    kernels.fine_kernel[(triton.cdiv(num, BLOCK),)](scratch, num, coarse, fine_counts, BLOCK=BLOCK)
    kernels.bracket_kernel[(1,)](coarse, fine_counts, state, num_warps=8)
    kernels.sweep_kernel[(p.num_programs,)](
        *tensors, bucket_counts, keys, places, counters, state, capacity, **read, DEPTH=p.depth, BLOCK=min(BLOCK, tile), TILE=tile
    )
    kernels.decide_kernel[(1,)](
        bucket_counts, counters, p.num_programs, capacity, state, num_live, num_drop, CHUNK=4096, num_warps=8
    )
    kernels.settle_kernel[(p.num_programs, 2)](
        p.table, len(p.table), keys, places, counters, state, listed_keys, listed_orders, capacity, p.num_programs,
        DEPTH=p.depth, BLOCK=BLOCK, TILE=tile,
    )
    kernels.finish_kernel[(1,)](
        p.table, len(p.table), listed_keys, listed_orders, state, DEPTH=p.depth, TILE=tile, num_warps=8
    )
    return Pending(low, out, state[: kernels.STATE], p)


@dataclass(frozen=True)
class Pending:
    """A cut under way on the device."""

    low: Lowered
    masks: dict[str, Tensor]
    state: Tensor
    plan: Plan  # kept until the kernels have read it

    def wait(self) -> dict[str, Tensor] | None:
        """The masks, or None where the bracket missed or ties overfilled it: the one word from the device."""
        state = self.state.tolist()
        if state[kernels.NOT_FINITE.value]:
            name = self.low.sources[state[kernels.NOT_FINITE.value] - 1].name
            raise ValueError(f"scores must be finite, but {name} has some that are not; look for NaN in weight and moments")
        if not state[kernels.FOUND.value] or state[kernels.OVERFLOW.value]:
            return None
        return self.masks
