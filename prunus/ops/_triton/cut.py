"""Launches of the exact cut of tensors on a GPU: one threshold for all of them, or one for each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .. import bits
from ..lazy import Lazy
from . import cut_state as cs
from .address_table import TILE, Table
from .bracket import CLUSTER, bracket_kernel, coarse_kernel, fine_kernel, sample_kernel
from .descent import count_kernel, pick_kernel, tally_kernel, write_kernel
from .finish import decide_kernel, finish_kernel, split_kernel, spread_kernel
from .launch import At, launch, launch_as
from .one_pass import pass_kernel
from .readable import Readable, readable

__all__ = ["launch_cut", "readable"]

SIGMAS = 4.0  # half width of the bracket in standard errors of independent samples; a miss costs time, not exactness
BLOCK = 1024  # elements of a tile in registers at a time
SAMPLED = 256  # samples a program
BYTES = 256  # entries of a list that a program expands at a time
ALIGN = 128  # bytes; masks are written in words
LEAST_OWN, MOST_OWN = 1 << 12, 1 << 18  # elements of the cut's own bucket that are ranked
LOWEST, HIGHEST = -0x7F800001, 0x7F800000  # keys of the infinities


def num_samples(num_live: int) -> int:
    """Scores drawn to bracket a threshold: about as many as the bracket will hold, so that both cost the same."""
    return min(1 << 23, round(4 * num_live ** (2 / 3)))


@dataclass(frozen=True)
class Cut:
    """What is to be cut, and where its masks are written: all tensors together, or each by itself."""

    low: Readable
    num_drop: Sequence[int]  # of the live of all tensors, or of each
    num_live: Sequence[int]
    table: Table
    out: Tensor  # all masks side by side
    offsets: Sequence[int]
    tile: int

    @property
    def is_each(self) -> bool:
        return len(self.num_live) > 1

    def masks(self) -> dict[str, Tensor]:
        sources, offsets = self.low.sources, self.offsets
        sizes = [bits.num_bytes(source.weight.numel()) for source in sources]
        gaps = (stop - start - size for start, stop, size in zip(offsets, offsets[1:], sizes, strict=False))
        spans = [size for pair in zip(sizes, gaps, strict=True) for size in pair]
        # one call, not a slice for each
        parts = self.out[offsets[0] : offsets[len(sources)]].split_with_sizes(spans)[::2]
        return dict(zip([source.name for source in sources], parts, strict=True))

    def only(self, i: int, live: Mapping[str, Tensor]) -> "Cut":
        """The cut of one group by itself, into the same masks."""
        if not self.is_each:
            return self
        low, offsets = self.low.some(slice(i, i + 1)), self.offsets[i : i + 2]
        table = low.table(live, offsets, self.tile)
        return Cut(low, self.num_drop[i : i + 1], self.num_live[i : i + 1], table, self.out, offsets, self.tile)


def launch_cut(
    low: Readable, num_drop: Sequence[int], num_live: Sequence[int], live: Mapping[str, Tensor], tile: int = TILE
) -> "Pending":
    """Start the cut of ``num_drop`` of ``num_live`` elements, of all sources or of each; the host does not wait."""
    offsets = offsets_of(low.sources)
    table = low.table(live, offsets, tile)
    out = torch.empty(offsets[-1], dtype=torch.uint8, device=table.rows.device)
    return by_one_pass(Cut(low, num_drop, num_live, table, out, offsets, tile), live)


def offsets_of(sources: Sequence[Lazy]) -> list[int]:
    """Where the mask of each source begins if all stand side by side, and where the last one ends."""
    return [0, *accumulate(-(-source.weight.numel() // (8 * ALIGN)) * ALIGN for source in sources)]


@dataclass(frozen=True)
class Sizes:
    """How much is sampled, and how much room the lists of the pass have."""

    lanes: int  # samples a tile
    capacity: int  # entries of a program's list
    rooms: Sequence[int]  # elements of each group that the lists may hold


def sizes_of(cut: Cut) -> Sizes:
    tile, num_tiles, programs = cut.tile, cut.table.num_tiles, cut.table.num_programs
    tiles = [-(-source.numel // tile) for source in cut.low.sources] if cut.is_each else [num_tiles]
    counts = list(zip(cut.num_live, cut.num_drop, tiles, strict=True))
    wanted = sum(num_samples(live) * (num * tile) // live for live, _, num in counts) // (1 + cut.is_each)
    lanes = max(CLUSTER.value, min(256, tile, 1 << max(1, wanted // num_tiles).bit_length() - 1))
    expected = [_num_inside(live, drop / live, max(1.0, lanes * live / tile)) for live, drop, _ in counts]
    turns = -(-num_tiles // programs)
    fullest = turns * expected[0] / num_tiles  # of the programs' lists
    if cut.is_each:
        by_tile = np.zeros(turns * programs)
        by_tile[:num_tiles] = np.repeat(np.divide(expected, tiles), tiles)
        fullest = by_tile.reshape(turns, programs).sum(0).max()
    capacity = min((int(1.1 * fullest) + 128) // 4 * 4, turns * tile // 8)
    rooms = [int(capacity / fullest * num) for num in expected] if capacity < turns * tile // 8 else cut.num_live
    return Sizes(lanes, capacity, rooms)


def _num_inside(num_live: int, share: float, num_sampled: float) -> float:
    """Elements that a bracket from so many samples is expected to hold."""
    return min(num_live, num_live * 2 * (SIGMAS * math.sqrt(share * (1 - share) / num_sampled) + 1 / num_sampled))


def by_one_pass(cut: Cut, live: Mapping[str, Tensor]) -> "Pending":
    """Sample, bracket, pass, finish: one launch of each kernel, whatever the number of groups."""
    t, low, tile, each, groups = cut.table, cut.low, cut.tile, cut.is_each, len(cut.num_live)
    sizes = sizes_of(cut)
    lanes, capacity, num = sizes.lanes, sizes.capacity, t.num_tiles * sizes.lanes
    size = t.num_programs * capacity
    w = workspace(t, groups, size, max(num, 2 * size))
    goals, num_live, num_drop, room = w.state, cut.num_live[0], cut.num_drop[0], sizes.rooms[0]
    if each:
        numbers = torch.tensor(list(zip(cut.num_live, cut.num_drop, sizes.rooms, strict=True)), dtype=torch.int64)
        goals, num_live, num_drop, room = numbers.to(t.rows.device), 0, 0, 0

    kind = (low.kind, t.kind, tile, each, max(cut.num_live) >= 1 << 31)
    grouped = {"EACH": each, "COPIES": cs.num_copies(groups)}
    read = {**low.read, "DEPTH": t.depth}
    tensors, at_once = (t.rows, t.constants, len(t.rows)), max(1, SAMPLED // lanes)
    drawn = {**read, **grouped, "LANES": lanes, "TILES": at_once, "TILE": tile}
    grid, tiles = (-(-t.num_tiles // at_once),), (*tensors, t.num_tiles)
    launch_as((kind, lanes), sample_kernel, grid, (*tiles, w.scratch, w.counts), drawn)
    arguments = (w.counts, w.state, goals, num_live, num_drop, SIGMAS)
    launch_as(kind, coarse_kernel, (2, groups), arguments, {**grouped, "num_warps": 32})
    arguments = (w.scratch, num, t.rows, len(t.rows), w.state, w.counts)
    how = {"DEPTH": t.depth, **grouped, "LANES": lanes, "BLOCK": BLOCK}
    launch_as((kind, lanes), fine_kernel, (-(-num // BLOCK),), arguments, how)
    launch_as(kind, bracket_kernel, (groups,), (w.state, w.counts, goals, num_live, room), grouped)
    launch_pass(low, t, tile, cut.out, w, capacity, each)
    last = (w.own, w.room, (t.num_tiles * tile).bit_length())
    grid = (t.num_programs, 4)
    arguments = (*tensors, w.scratch, w.keys, w.state, w.counts, w.counters, capacity, t.num_programs)
    launch_as(kind, spread_kernel, grid, arguments, {**read, **grouped, "BYTES": BYTES, "TILE": tile})
    arguments = (w.counts, w.counters, t.num_programs, capacity, w.state, goals, num_live, num_drop)
    launch_as(kind, decide_kernel, (groups,), arguments, {**grouped, "CHUNK": 2048, "num_warps": 8})
    arguments = (*tensors, cut.out, *last, w.scratch, w.keys, w.state, w.counters, capacity, t.num_programs)
    how = {**read, "EACH": each, "BYTES": BYTES // 4, "TILE": tile, "num_warps": 1}
    launch_as(kind, split_kernel, grid, arguments, how)
    shape = {"DEPTH": t.depth, "TILE": tile, "num_warps": 16}
    arguments = (t.rows, len(t.rows), cut.out, *last, w.state, w.counts)
    launch_as(kind, finish_kernel, (groups,), arguments, {**shape, "COPIES": cs.num_copies(groups)})
    state = w.state.view()[: groups * cs.STATE.value].view(groups, cs.STATE.value)
    return Pending(cut, live, state, w.room, low.formulas[0].has_fast_roots)


def launch_pass(
    low: Readable, t: Table, tile: int, out: Tensor, w: "Workspace", capacity: int, each: bool = False
) -> None:
    """One read of everything: bits of what lies above the bracket in ``w.state``, lists of what lies in it."""
    arguments = (t.rows, t.constants, len(t.rows), t.num_tiles, out, w.scratch, w.counters, w.state, capacity)
    how = {"FAST": low.formulas[0].has_fast_roots, **low.read, "ALIGN": t.align, "DEPTH": t.depth}
    how |= {"EACH": each, "BLOCK": min(2 * BLOCK, tile), "TILE": tile}
    launch_as((low.kind, t.kind, tile, each), pass_kernel, (t.num_programs,), arguments, how)


@dataclass(frozen=True)
class Workspace:
    """Parts of two buffers: state and counts begin as zeros; the sample, then lists and their keys, need not."""

    state: At
    counts: At
    counters: At  # of the lists: one for each program of the pass
    own: At
    room: int  # of own, for each group
    scratch: At
    keys: At


def workspace(t: Table, groups: int, size: int, num_scratch: int) -> Workspace:
    """Room for lists of ``size`` entries in all, and for the sample."""
    device, room = t.rows.device, min(MOST_OWN, max(LEAST_OWN, size // (16 * groups))) // 2 * 2
    num_state, num = cs.STATE.value * groups, cs.num_counts(groups) * groups
    zeros = torch.zeros(2 * num_state + num + t.num_programs, dtype=torch.int32, device=device)
    work = torch.empty(2 * room * groups + num_scratch, dtype=torch.int32, device=device)
    first, own = zeros.data_ptr(), work.data_ptr()
    scratch = own + 8 * room * groups
    return Workspace(
        At(first, zeros, torch.int64),
        At(first + 8 * num_state, zeros, torch.int32),
        At(first + 8 * num_state + 4 * num, zeros, torch.int32),
        At(own, work, torch.int64),
        room,
        At(scratch, work, torch.int32),
        At(scratch + 4 * size, work, torch.int32),
    )


def by_descent(cut: Cut, lo: int, hi: int) -> "Pending":
    """The cut of one group, whose key is said to lie from ``lo`` to ``hi``: digits, ties by tile, masks."""
    t, device = cut.table, cut.table.rows.device
    [num_live], [num_drop] = cut.num_live, cut.num_drop
    lo, hi = max(lo, LOWEST), min(hi, HIGHEST)
    width = (hi - lo).bit_length()
    passes = max(1, -(-width // cs.DIGIT.value))
    start = [0] * cs.STATE.value
    start[cs.BASE.value], start[cs.SPAN.value], start[cs.SHIFT.value] = lo, hi - lo, max(0, width - cs.DIGIT.value)
    state = torch.tensor(start, dtype=torch.int64).to(device)
    counts = torch.zeros(passes, cs.DIGITS.value, dtype=torch.int64, device=device)
    tallies = torch.empty(t.num_tiles, dtype=torch.int32, device=device)
    grid, tensors = (t.num_programs,), (t.rows, t.constants, len(t.rows), t.num_tiles)
    shape = {"ALIGN": t.align, "FULL": t.is_full, "DEPTH": t.depth, "BLOCK": min(BLOCK, cut.tile), "TILE": cut.tile}
    how = {**cut.low.read, **shape}
    for i in range(passes):
        launch(count_kernel, grid, (*tensors, state, counts[i]), how)
        launch(pick_kernel, (1,), (state, counts[i], num_live, num_drop), {"IS_FIRST": i == 0})
    launch(tally_kernel, grid, (*tensors, state, tallies), how)
    launch(write_kernel, grid, (*tensors, cut.out, state, tallies, tallies.cumsum(0)), how)
    return Pending(cut, {}, state.unsqueeze(0), 0)


@dataclass(frozen=True)
class Pending:
    """A cut under way on the device."""

    cut: Cut  # its table is kept until the kernels have read it
    live: Mapping[str, Tensor]
    state: Tensor  # (groups, cs.STATE)
    room: int  # for the elements of a cut's own bucket
    is_fast: bool = False  # whether roots were fast ones, of which some are not finite where correct ones are

    def wait(self) -> dict[str, Tensor]:
        """The masks, after the one word from the device; where they were not found, they are by a descent."""
        masks = self.cut.masks()  # while the device is at work
        states = self.state.tolist()
        bad = [state[cs.NOT_FINITE.value] for state in states]
        if not self.is_fast:
            check_finite(self.cut.low.sources, bad)
        for i, state in enumerate(states):
            if bad[i]:
                by_descent(self.cut.only(i, self.live), LOWEST, HIGHEST).wait()
            elif not state[cs.FOUND.value] or state[cs.NUM_LISTED.value] > self.room:
                by_descent(self.cut.only(i, self.live), *keys_around(state)).wait()
        return masks


def keys_around(state: Sequence[int]) -> tuple[int, int]:
    """Keys between which the threshold lies, as far as a pass that did not settle it can say."""
    if state[cs.FOUND.value]:  # too many in the cut's own bucket
        first = state[cs.BASE.value] + (state[cs.BUCKET.value] << state[cs.SHIFT.value])
        return first, first + (1 << state[cs.SHIFT.value]) - 1
    return (state[cs.LO.value], state[cs.HI.value]) if state[cs.CROWDED.value] else (LOWEST, HIGHEST)


def check_finite(sources: Sequence[Lazy], bad: Sequence[int]) -> None:
    """ValueError for the first source, by its number from 1, of which a pass says that its scores are not finite."""
    if any(bad):
        name = sources[min(number for number in bad if number) - 1].name
        raise ValueError(f"scores must be finite, but {name} has some that are not; look for NaN in weight and moments")
