"""The sample and the pass over what one of many ranks holds, by the kernels of a cut by one process.

Here they end with lists, and what is listed is cut by counts that travel.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import bits
from ..lazy import sortable
from .address_table import COLUMNS, FIRST, TILE, Table, locate
from .bracket import CLUSTER, sample_kernel
from .cut import ALIGN, BLOCK, SAMPLED, Workspace, check_finite, launch_pass, offsets_of, workspace
from .cut_state import HI, LO, NOT_FINITE, num_copies
from .launch import launch
from .readable import Readable
from .scores import read_by, scores_of

INFINITY = 0x7F800000  # its key; that of minus infinity is one less than the negative of it


@triton.jit(do_not_specialize=["num_tensors", "num"])
def score_kernel(
    table, constants, num_tensors, orders, scores, num,
    NAME: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scores of elements that are given by their place among all tiles."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    order = tl.load(orders + at, mask=at < num, other=0)
    tensor = locate(table, num_tensors, order // TILE, DEPTH)
    row = table + tensor * COLUMNS
    place = order - tl.load(row + FIRST) * TILE
    read = read_by(row, constants + tensor * 4)
    s = scores_of(read, place, 0, at < num, False, False, NAME, WT, MT, VT, 1)
    tl.store(scores + at, s, mask=at < num)


def sampled(low: Readable, rate: float, live: Mapping[str, Tensor]) -> Tensor:
    """Keys of about a share ``rate`` of the elements, those that are live and finite."""
    tile = TILE
    t = low.table(live, offsets_of(low.sources), tile)
    lanes = max(CLUSTER.value, min(256, tile, 1 << max(1, int(rate * tile)).bit_length() - 1))
    w = workspace(t, 1, 0, t.num_tiles * lanes)
    keys = w.scratch.view()[: t.num_tiles * lanes]
    if t.num_tiles:
        at_once = max(1, SAMPLED // lanes)
        drawn = {**low.read, "DEPTH": t.depth, "EACH": False, "COPIES": num_copies(1)}
        drawn |= {"LANES": lanes, "TILES": at_once, "TILE": tile}
        arguments = (t.rows, t.constants, len(t.rows), t.num_tiles, keys, w.counts.view())
        launch(sample_kernel, (-(-t.num_tiles // at_once),), arguments, drawn)
    return keys[(keys < INFINITY) & (keys > -INFINITY - 1)]  # the largest integer stands for the dead


Found = tuple[Tensor, list[int], list[int], Tensor, Tensor]  # the fields of ``Candidates``


def candidates(low: Readable, lo: float, hi: float, room: int, live: Mapping[str, Tensor]) -> Found | None:
    """What one read of all sources finds above and in [lo, hi]; None if in doubt, or if it needs more than ``room``."""
    tile, starts = TILE, offsets_of(low.sources)
    t = low.table(live, starts, tile)
    above = torch.zeros(starts[-1], dtype=torch.uint8, device=t.rows.device)
    capacity = min(2 * room // t.num_programs + 128, -(-t.num_tiles // t.num_programs) * tile // 8) // 4 * 4
    size = t.num_programs * capacity
    w = workspace(t, 1, size, size)
    state = w.state.view()
    edges = sortable(torch.tensor([lo, hi], dtype=torch.float32)).long()
    state[LO.value : HI.value + 1] = edges.to(state.device)
    if t.num_tiles:
        launch_pass(low, t, tile, above, w, capacity)
    counters = w.counters.view()[: t.num_programs]
    bad, most = torch.stack([state[NOT_FINITE.value], counters.max()]).tolist()
    if bad and low.formulas[0].has_fast_roots:
        return None  # fast roots of very large numbers are not finite
    check_finite(low.sources, [bad])
    if most > capacity:
        return None
    order = _listed(w, counters, capacity, tile)
    firsts = t.rows[:, FIRST.value].contiguous()
    tensor = torch.searchsorted(firsts, order // tile, right=True) - 1
    first_bits = 8 * torch.tensor(starts[:-1], device=order.device)
    positions = order + (first_bits - firsts * tile)[tensor]
    return above, starts[:-1], _ones(above, starts), _scores(low, t, tile, order), positions


def _listed(w: Workspace, counters: Tensor, capacity: int, tile: int) -> Tensor:
    """Places among all tiles of the elements that the programs of a pass have listed."""
    entries = w.scratch.view()[: len(counters) * capacity].view(len(counters), capacity)
    program, slot = (torch.arange(capacity, device=counters.device) < counters.unsqueeze(1)).nonzero(as_tuple=True)
    entry = entries[program, slot]  # where a byte of the mask stands in the program's tiles, and its bits
    which, bit = bits.unpack(entry.to(torch.uint8), (len(entry), 8)).nonzero(as_tuple=True)
    byte = entry[which] >> 8 & 0xFFFFFF
    turn, byte = byte // (tile // 8), byte % (tile // 8)
    return (program[which] + turn * len(counters)) * tile + 8 * byte + bit


def _scores(low: Readable, t: Table, tile: int, order: Tensor) -> Tensor:
    scores = torch.empty(len(order), dtype=torch.float32, device=order.device)
    if len(order):
        arguments = (t.rows, t.constants, len(t.rows), order, scores, len(order))
        how = {**low.read, "DEPTH": t.depth, "BLOCK": BLOCK, "TILE": tile}
        launch(score_kernel, (-(-len(order) // BLOCK),), arguments, how)
    return scores


def _ones(packed: Tensor, starts: Sequence[int]) -> list[int]:
    """Set bits of each mask of those that stand side by side, zeros between them; the last start is where they end."""
    up_to = torch.nn.functional.pad(bits.count(packed.view(-1, ALIGN)).cumsum(0), (1, 0))
    return up_to[torch.tensor(starts, device=packed.device) // ALIGN].diff().tolist()
