"""Launches of the exact cut: what ``prunus.cut`` calls for tensors on a GPU."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .. import bits
from ..source import Lazy
from .bracket import CLUSTER, bracket_kernel, coarse_kernel, fine_kernel, sample_kernel
from .descent import count_kernel, pick_kernel, tally_kernel, write_kernel
from .launch import At, launch, launch_as
from .layout import (
    BASE,
    BUCKET,
    COUNTERS_AT,
    CROWDED,
    DIGIT,
    DIGITS,
    FOUND,
    HI,
    LO,
    NOT_FINITE,
    NUM_LISTED,
    SHIFT,
    SPAN,
    STATE,
)
from .lowered import Lowered, lowered
from .plan import TILE, Plan
from .settle import decide_kernel, finish_kernel, settle_kernel, spread_kernel
from .sweep import sweep_kernel

__all__ = ["launch_cut", "launch_each", "lowered", "wait_all"]

SIGMAS = 4.5  # half width of the bracket in standard errors of independent samples; a miss costs time, not exactness
BLOCK = 1024  # elements of a tile in registers at a time
SAMPLED = 256  # samples a program
BYTES = 256  # entries of a list that a program expands at a time
ALIGN = 128  # bytes; masks are written in words
LEAST_OWN, MOST_OWN = 1 << 12, 1 << 18  # elements of the cut's own bucket that are ranked
LOWEST, HIGHEST = -0x7F800001, 0x7F800000  # keys of the infinities


def num_samples(num_live: int) -> int:
    """Scores drawn to bracket the threshold: as many as the bracket will hold, so that both cost the same."""
    return min(1 << 23, round(4 * num_live ** (2 / 3)))


@dataclass(frozen=True)
class Cut:
    """What is to be cut, and where its masks are written."""

    low: Lowered
    num_drop: int  # of the live
    num_live: int
    plan: Plan
    out: Tensor  # all masks side by side
    offsets: Sequence[int]
    tile: int

    def masks(self) -> dict[str, Tensor]:
        parts = zip(self.low.sources, self.offsets, strict=False)
        return {source.name: self.out[at : at + bits.num_bytes(source.numel)] for source, at in parts}


def launch_cut(low: Lowered, num_drop: int, num_live: int, live: Mapping[str, Tensor], tile: int = TILE) -> "Pending":
    """Start the cut of ``num_drop`` of ``num_live`` elements; the host does not wait."""
    offsets = offsets_of(low.sources)
    p = low.planned(live, offsets, tile)
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=p.table.device)
    return by_one_pass(Cut(low, num_drop, num_live, p, out, offsets, tile))


def launch_each(
    low: Lowered, num_drop: Sequence[int], num_live: Sequence[int], live: Mapping[str, Tensor], tile: int = TILE
) -> "list[Pending]":
    """Start the cut of each source by itself."""
    offsets = offsets_of(low.sources)
    plans = low.planned_each(live, offsets, tile)
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=plans[0].table.device)
    return [
        by_one_pass(Cut(low.only(i), num_drop[i], num_live[i], p, out, offsets[i:], tile)) for i, p in enumerate(plans)
    ]


def offsets_of(sources: Sequence[Lazy]) -> list[int]:
    """Where the mask of each source begins if all stand side by side, and where the last one ends."""
    return [0, *accumulate(-(-source.weight.numel() // (8 * ALIGN)) * ALIGN for source in sources)]


def by_one_pass(cut: Cut) -> "Pending":
    """Sample, bracket, pass, finish."""
    p, low, tile, num_live = cut.plan, cut.low, cut.tile, cut.num_live
    wanted = num_samples(num_live) * (p.num_tiles * tile) // num_live
    lanes = max(CLUSTER.value, min(256, tile, 1 << max(1, wanted // p.num_tiles).bit_length() - 1))
    share = cut.num_drop / num_live
    num = p.num_tiles * lanes
    num_sampled = max(1.0, num * num_live / (p.num_tiles * tile))
    expected = num_live * 2 * (SIGMAS * math.sqrt(share * (1 - share) / num_sampled) + 1 / num_sampled)
    all_bytes = -(-p.num_tiles // p.num_programs) * tile // 8
    capacity = min((int(1.1 * min(expected, num_live) / p.num_programs) + 128) // 4 * 4, all_bytes)
    size = p.num_programs * capacity
    w = workspace(p, size, max(num, 2 * size))

    kind = (low.kind, p.kind, tile, num_live >= 1 << 31)
    read = {**low.read, "DEPTH": p.depth, "TILE": tile}
    tensors, at_once = (p.table, p.constants, len(p.table)), max(1, SAMPLED // lanes)
    drawn, tiles = {**read, "LANES": lanes, "TILES": at_once}, (*tensors, p.num_tiles)
    grid = (-(-p.num_tiles // at_once),)
    launch_as((kind, lanes), sample_kernel, grid, (*tiles, w.scratch, w.counts), drawn)
    launch_as(kind, coarse_kernel, (2,), (w.counts, w.state, share, SIGMAS), {"num_warps": 32})
    launch_as(kind, fine_kernel, (-(-num // BLOCK),), (w.scratch, num, w.state, w.counts), {"BLOCK": BLOCK})
    room = size if capacity < all_bytes else num_live
    launch_as(kind, bracket_kernel, (1,), (w.state, w.counts, num_live, room), {})
    launch_pass(low, p, tile, cut.out, w, capacity)
    inside = (w.scratch, w.keys, w.state, w.counts, capacity, p.num_programs)
    last = (w.own, w.room, (p.num_tiles * tile).bit_length())
    grid, listed = (p.num_programs, 4), {**read, "BYTES": BYTES}
    launch_as(kind, spread_kernel, grid, (*tensors, *inside), listed)
    numbers = (w.counts, p.num_programs, capacity, w.state, num_live, cut.num_drop)
    launch_as(kind, decide_kernel, (1,), numbers, {"CHUNK": 2048, "num_warps": 8})
    launch_as(kind, settle_kernel, grid, (*tensors, cut.out, *last, *inside), listed)
    shape = {"DEPTH": p.depth, "TILE": tile, "num_warps": 8}
    launch_as(kind, finish_kernel, (1,), (p.table, len(p.table), cut.out, *last, w.state), shape)
    return Pending(cut, cut.masks(), w.state.view()[:STATE], w.room)


def launch_pass(low: Lowered, p: Plan, tile: int, out: Tensor, w: "Workspace", capacity: int) -> None:
    """One read of everything: bits of what lies above the bracket in ``w.state``, lists of what lies in it."""
    fast = {"FAST": low.formulas[0].has_fast_roots, "ALIGN": p.align, "BLOCK": min(BLOCK, tile)}
    arguments = (p.table, p.constants, len(p.table), p.num_tiles, out, w.scratch, w.counts, w.state, capacity)
    how = {**low.read, "DEPTH": p.depth, "TILE": tile, **fast}
    launch_as((low.kind, p.kind, tile), sweep_kernel, (p.num_programs,), arguments, how)


@dataclass(frozen=True)
class Workspace:
    """Parts of two buffers: state and counts begin as zeros; the sample, then lists and their keys, need not."""

    state: At
    counts: At
    own: At
    room: int  # of own
    scratch: At
    keys: At


def workspace(p: Plan, size: int, num_scratch: int) -> Workspace:
    """Room for lists of ``size`` entries in all, and for the sample."""
    device, room = p.table.device, min(MOST_OWN, max(LEAST_OWN, size // 16)) // 2 * 2
    zeros = torch.zeros(2 * STATE + COUNTERS_AT.value + p.num_programs, dtype=torch.int32, device=device)
    work = torch.empty(2 * room + num_scratch, dtype=torch.int32, device=device)
    first, own = zeros.data_ptr(), work.data_ptr()
    scratch = own + 8 * room
    return Workspace(
        At(first, zeros, torch.int64),
        At(first + 8 * STATE, zeros, torch.int32),
        At(own, work, torch.int64),
        room,
        At(scratch, work, torch.int32),
        At(scratch + 4 * size, work, torch.int32),
    )


def by_descent(cut: Cut, lo: int, hi: int) -> "Pending":
    """The cut of which it is said that its key lies from ``lo`` to ``hi``: digits, ties by tile, masks."""
    p, device = cut.plan, cut.plan.table.device
    lo, hi = max(lo, LOWEST), min(hi, HIGHEST)
    width = (hi - lo).bit_length()
    passes = max(1, -(-width // DIGIT.value))
    start = [0] * STATE
    start[BASE.value], start[SPAN.value], start[SHIFT.value] = lo, hi - lo, max(0, width - DIGIT.value)
    state = torch.tensor(start, dtype=torch.int64).to(device)
    counts = torch.zeros(passes, DIGITS.value, dtype=torch.int64, device=device)
    tallies = torch.empty(p.num_tiles, dtype=torch.int32, device=device)
    grid, tensors = (p.num_programs,), (p.table, p.constants, len(p.table), p.num_tiles)
    shape = {"ALIGN": p.align, "FULL": p.is_full, "DEPTH": p.depth, "BLOCK": min(BLOCK, cut.tile), "TILE": cut.tile}
    how = {**cut.low.read, **shape}
    for i in range(passes):
        launch(count_kernel, grid, (*tensors, state, counts[i]), how)
        launch(pick_kernel, (1,), (state, counts[i], cut.num_live, cut.num_drop), {"IS_FIRST": i == 0})
    launch(tally_kernel, grid, (*tensors, state, tallies), how)
    launch(write_kernel, grid, (*tensors, cut.out, state, tallies, tallies.cumsum(0)), how)
    return Pending(cut, cut.masks(), state, 0)


@dataclass(frozen=True)
class Pending:
    """A cut under way on the device."""

    cut: Cut  # its plan is kept until the kernels have read it
    masks: dict[str, Tensor]
    state: Tensor
    room: int  # for the elements of the cut's own bucket

    def wait(self) -> dict[str, Tensor]:
        """The masks, after the one word from the device."""
        return self.settled(self.state.tolist())

    def settled(self, state: Sequence[int]) -> dict[str, Tensor]:
        """The masks; where ``state`` says that they were not found, they are by another way."""
        check_finite(self.cut.low.sources, state[NOT_FINITE.value])
        if state[FOUND.value] and state[NUM_LISTED.value] <= self.room:
            return self.masks
        if state[FOUND.value]:  # too many in the cut's own bucket
            first = state[BASE.value] + (state[BUCKET.value] << state[SHIFT.value])
            return by_descent(self.cut, first, first + (1 << state[SHIFT.value]) - 1).wait()
        if state[CROWDED.value]:
            return by_descent(self.cut, state[LO.value], state[HI.value]).wait()
        return by_descent(self.cut, LOWEST, HIGHEST).wait()


def check_finite(sources: Sequence[Lazy], bad: int) -> None:
    """ValueError for the source of number ``bad``, from 1, that a pass has told of."""
    if bad:
        name = sources[bad - 1].name
        raise ValueError(f"scores must be finite, but {name} has some that are not; look for NaN in weight and moments")


def wait_all(pending: Sequence[Pending]) -> list[dict[str, Tensor]]:
    """Masks of many cuts, after one word from the device."""
    states = torch.stack([part.state for part in pending]).tolist()
    return [part.settled(state) for part, state in zip(pending, states, strict=True)]
