"""The masked AdamW step over all tensors: norm, numbers of the step, update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .address_table import PROGRAMS_PER_SM, TILE, TYPES, alignment, load, locate, num_multiprocessors, typed
from .launch import launch

BLOCK = 1024
UPDATED = 512  # elements a program updates: one block of 128 threads, so that many loads are under way
W, G, M, V, MASK, NUMEL, STEP, FIRST = (tl.constexpr(i) for i in range(8))
LR, BETA1, BETA2, EPS, DECAY, LR_AT, RATE_AT = (tl.constexpr(i) for i in range(7))
SHRINK, SIZE, SCALE = (tl.constexpr(i) for i in range(3))
Rows = list[tuple[int, ...]]


@triton.jit
def kept_only(g, mask_at, start, left, BLOCK: tl.constexpr):
    """Gradients with zeros where the bit is not set; an address of 0 stands for no mask."""
    if mask_at.to(tl.int64) != 0:
        byte = tl.arange(0, BLOCK // 8)
        bits = tl.load(mask_at + start // 8 + byte, mask=start + byte * 8 < left, other=0)
        kept = (bits.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
        g = tl.where(tl.reshape(kept, (BLOCK,)) != 0, g, 0.0)
    return g


@triton.jit
def squares_of(g_at, mask_at, start, left, FULL: tl.constexpr, BLOCK: tl.constexpr):
    lane = start + tl.arange(0, BLOCK)
    g = kept_only(load(g_at + lane, lane < left, FULL), mask_at, start, left, BLOCK)
    return g * g


@triton.jit
def norm_kernel(
    table, num_tensors, num_tiles, partial,
    GT: tl.constexpr, ALIGN: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum of squares of the kept gradients, one partial sum a program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = table + locate(table, num_tensors, tile, DEPTH) * 8
        first = (tile - tl.load(row + FIRST)) * TILE
        left, mask = tl.load(row + NUMEL) - first, tl.load(row + MASK)
        g_at = typed(tl.load(row + G), GT, ALIGN) + first
        mask_at = tl.where(mask != 0, mask + first // 8, 0).to(tl.pointer_type(tl.uint8))
        if left >= TILE:
            for start in range(0, TILE, BLOCK):
                total += squares_of(g_at, mask_at, start, left, True, BLOCK)
        else:
            for start in range(0, TILE, BLOCK):
                total += squares_of(g_at, mask_at, start, left, False, BLOCK)
    tl.store(partial + tl.program_id(0), tl.sum(total))


@triton.jit
def prepare_kernel(
    table, given, derived, partial, norm, grad_scale, found_inf, max_norm, num_partial,
    CLIPS: tl.constexpr, SCALES: tl.constexpr, SKIPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Advance a tensor's step; derive 1 - lr decay, rate lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), factor on g."""
    tensor = tl.program_id(0)
    numbers = given + tensor * 8
    step_at = tl.load(table + tensor * 8 + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at)
    if SKIPS:
        step += tl.where(tl.load(found_inf) != 0, 0.0, 1.0)
    else:
        step += 1.0
    tl.store(step_at, step)
    lr_at = tl.load(numbers + LR_AT).to(tl.int64)
    lr = tl.load(numbers + LR)
    if lr_at != 0:
        lr = tl.load(lr_at.to(tl.pointer_type(tl.float32))).to(tl.float64)
    size = lr
    rate_at = tl.load(numbers + RATE_AT).to(tl.int64)
    if rate_at != 0:
        size = lr * tl.load(rate_at.to(tl.pointer_type(tl.float64)))
    t = step.to(tl.float64)
    factor = 1.0
    if SCALES:
        factor = 1.0 / tl.load(grad_scale).to(tl.float32)
    if CLIPS:
        total = 0.0
        for start in range(0, num_partial, CHUNK):
            at = start + tl.arange(0, CHUNK)
            total += tl.sum(tl.load(partial + at, mask=at < num_partial, other=0.0))
        length = tl.sqrt(total) * factor
        tl.store(norm, length)
        factor *= tl.minimum(1.0, max_norm / (length + 1e-6))
    out = derived + tensor * 4
    tl.store(out + SHRINK, (1 - lr * tl.load(numbers + DECAY)).to(tl.float32))
    tl.store(out + SIZE, (size / (1 - tl.exp(t * tl.log(tl.load(numbers + BETA1))))).to(tl.float32))
    tl.store(out + SCALE, (1 / tl.sqrt(1 - tl.exp(t * tl.log(tl.load(numbers + BETA2))))).to(tl.float32))
    tl.store(out + 3, factor)


@triton.jit
def update_block(
    w_at, g_at, m_at, v_at, mask_at, out, start, left, keep1, beta2, keep2, eps, shrink, size, scale, theta,
    FULL: tl.constexpr, SPAM: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a tile of ``update_kernel``."""
    lane = start + tl.arange(0, BLOCK)
    valid = lane < left
    g, m = load(g_at + lane, valid, FULL), load(m_at + lane, valid, FULL)
    v, w = load(v_at + lane, valid, FULL), load(w_at + lane, valid, FULL)
    g = kept_only(g, mask_at, start, left, BLOCK)
    if SCALED:
        g = g * tl.load(out + 3)
    if SPAM:
        limit = tl.sqrt_rn(v * theta)
        g = tl.where((tl.abs(g) > limit) & (v > 0), tl.where(g > 0, limit, -limit), g)
    m = m + keep1 * (g - m)
    v = v * beta2 + keep2 * g * g
    w = w * shrink - size * (m / (tl.sqrt(v) * scale + eps))
    if FULL:
        tl.store(m_at + lane, m.to(m_at.dtype.element_ty))
        tl.store(v_at + lane, v.to(v_at.dtype.element_ty))
        tl.store(w_at + lane, w.to(w_at.dtype.element_ty))
    else:
        tl.store(m_at + lane, m.to(m_at.dtype.element_ty), mask=valid)
        tl.store(v_at + lane, v.to(v_at.dtype.element_ty), mask=valid)
        tl.store(w_at + lane, w.to(w_at.dtype.element_ty), mask=valid)


@triton.jit
def update_kernel(
    table, num_tensors, num_tiles, given, derived, found_inf, theta,
    WT: tl.constexpr, GT: tl.constexpr, MT: tl.constexpr, ALIGN: tl.constexpr, SPAM: tl.constexpr,
    SCALED: tl.constexpr, SKIPS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``w <- shrink w - size m / (scale sqrt(v) + eps)`` with the gradient of pruned elements zero."""
    last = num_tiles
    if SKIPS:
        last = tl.where(tl.load(found_inf) != 0, 0, num_tiles)
    for tile in range(tl.program_id(0), last, tl.num_programs(0)):
        tensor = locate(table, num_tensors, tile, DEPTH)
        row, numbers, out = table + tensor * 8, given + tensor * 8, derived + tensor * 4
        first = (tile - tl.load(row + FIRST)) * TILE
        left, mask = tl.load(row + NUMEL) - first, tl.load(row + MASK)
        w_at, g_at = typed(tl.load(row + W), WT, ALIGN) + first, typed(tl.load(row + G), GT, ALIGN) + first
        m_at, v_at = typed(tl.load(row + M), MT, ALIGN) + first, typed(tl.load(row + V), MT, ALIGN) + first
        mask_at = tl.where(mask != 0, mask + first // 8, 0).to(tl.pointer_type(tl.uint8))
        beta1, beta2 = tl.load(numbers + BETA1), tl.load(numbers + BETA2)
        keep1, keep2 = (1 - beta1).to(tl.float32), (1 - beta2).to(tl.float32)
        beta2, eps = beta2.to(tl.float32), tl.load(numbers + EPS).to(tl.float32)
        shrink, size, scale = tl.load(out + SHRINK), tl.load(out + SIZE), tl.load(out + SCALE)
        if left >= TILE:
            for start in range(0, TILE, BLOCK):
                update_block(
                    w_at, g_at, m_at, v_at, mask_at, out, start, left, keep1, beta2, keep2, eps, shrink, size, scale,
                    theta, True, SPAM, SCALED, BLOCK,
                )  # fmt: skip
        else:
            for start in range(0, TILE, BLOCK):
                update_block(
                    w_at, g_at, m_at, v_at, mask_at, out, start, left, keep1, beta2, keep2, eps, shrink, size, scale,
                    theta, False, SPAM, SCALED, BLOCK,
                )  # fmt: skip


# not frozen: a step makes one for every weight, and a frozen one takes three times as long to make
@dataclass(slots=True, eq=False)
class Operand:
    """One weight of a step: its gradient, moments, step count on the device, mask, and its group's numbers."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    mask: Tensor | None
    numbers: tuple[float, float, float, float, float]  # lr, beta1, beta2, eps, weight decay
    lr_at: int = 0  # address of a float32 learning rate on the device
    rate_at: int = 0  # address of a float64 factor on the learning rate on the device
    is_owner: bool = True  # of several ranks that hold copies one is: it adds to the norm

    @property
    def kind(self) -> tuple[torch.device, torch.dtype, torch.dtype, torch.dtype]:
        """What the operands of one launch have in common."""
        return self.weight.device, self.weight.dtype, self.grad.dtype, self.exp_avg.dtype

    @property
    def row(self) -> tuple[int, ...]:
        """The operand's row of a table, but for its first tile."""
        mask = self.mask
        return (
            self.weight.data_ptr(),
            self.grad.data_ptr(),
            self.exp_avg.data_ptr(),
            self.exp_avg_sq.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            self.weight.numel(),
            self.step.data_ptr(),
        )


@dataclass(frozen=True)
class Extras:
    """Options of a step."""

    max_norm: float | None = None
    theta: float | None = None  # of SPAM's clipping
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    total: Callable[[Tensor], Tensor] | None = None  # sums squares over ranks


@dataclass(frozen=True)
class Tiles:
    """A table of addresses on the device, the number of tiles, and what all addresses are multiples of."""

    table: Tensor
    num: int
    align: int


class AdamWStep:
    """Launches of the step; tables stay on the device until an address or a number changes."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[Any, Any]] = {}  # what a table was made from, and the table

    def __call__(self, operands: Sequence[Operand], extras: Extras, tile: int = UPDATED) -> Tensor | None:
        """Update all weights; returns the norm of the kept gradients, on the device, if they are clipped."""
        device = operands[0].weight.device
        norm = torch.empty((), device=device)
        partial = norm
        kinds = {kind: (alike, [operand.row for operand in alike]) for kind, alike in by_kind(operands).items()}
        if extras.max_norm:
            partial = self._squares(kinds, max(tile, TILE if device.type == "cuda" else tile))
            if extras.total is not None:
                partial = extras.total(norm.new_zeros(1) if partial is None else partial.sum(0, keepdim=True))
        for kind, (alike, rows) in kinds.items():
            self._update(kind, alike, rows, extras, partial, norm, tile)
        return norm if extras.max_norm else None

    def _squares(self, kinds: Mapping[tuple, tuple[list[Operand], Rows]], tile: int) -> Tensor | None:
        """Partial sums of squares of the kept gradients of all operands that this rank owns; None if it owns none."""
        sums = []
        for kind, (operands, rows) in kinds.items():
            owned = [row for operand, row in zip(operands, rows, strict=True) if operand.is_owner]
            if owned:
                tiles = self._tiles(("norm", *kind), owned, tile, kind[0])
                num_programs = max(1, min(tiles.num, PROGRAMS_PER_SM * num_multiprocessors(kind[0])))
                sums.append(torch.empty(num_programs, device=kind[0]))
                shape = {"ALIGN": tiles.align, "DEPTH": _depth(owned), "BLOCK": min(BLOCK, tile), "TILE": tile}
                args = (tiles.table, len(owned), tiles.num, sums[-1])
                launch(norm_kernel, (num_programs,), args, {"GT": TYPES[kind[2]], **shape})
        return torch.cat(sums) if len(sums) > 1 else sums[0] if sums else None

    def _update(
        self, kind: tuple, operands: list[Operand], rows: Rows, extras: Extras, partial: Tensor, norm: Tensor, tile: int
    ) -> None:
        device, depth = kind[0], _depth(operands)
        tiles = self._tiles(("update", *kind), rows, tile, device)
        numbers = [(operand.numbers, operand.lr_at, operand.rate_at) for operand in operands]
        given = self._numbers(("numbers", *kind), numbers, device)
        derived = torch.empty(len(operands), 4, device=device)
        grad_scale = extras.grad_scale if extras.grad_scale is not None else norm
        found_inf = extras.found_inf if extras.found_inf is not None else norm
        skips = extras.found_inf is not None
        clips, scales = extras.max_norm is not None, extras.grad_scale is not None
        max_norm, theta = extras.max_norm or 0.0, extras.theta or 0.0
        sums = (partial, norm, grad_scale, found_inf, max_norm, partial.numel())
        does = {"CLIPS": clips, "SCALES": scales, "SKIPS": skips, "CHUNK": 1024}
        launch(prepare_kernel, (len(operands),), (tiles.table, given, derived, *sums), does)
        types = {"WT": TYPES[kind[1]], "GT": TYPES[kind[2]], "MT": TYPES[kind[3]], "ALIGN": tiles.align}
        does = {"SPAM": extras.theta is not None, "SCALED": clips or scales, "SKIPS": skips}
        args = (tiles.table, len(operands), tiles.num, given, derived, found_inf, theta)
        launch(update_kernel, (tiles.num,), args, {**types, **does, "DEPTH": depth, "BLOCK": tile, "TILE": tile})

    def _tiles(self, key: tuple, rows: Rows, tile: int, device: torch.device) -> Tiles:
        known = self._known.get(key)
        if known is None or known[0] != rows:
            firsts = [0, *accumulate(-(-row[5] // tile) for row in rows)]
            filled = [(*row, first) for row, first in zip(rows, firsts, strict=False)]
            align = alignment(address for row in rows for address in row[:4])
            self._known[key] = known = (rows, Tiles(_on(device, filled, torch.int64), firsts[-1], align))
        return known[1]

    def _numbers(self, key: tuple, numbers: list[tuple], device: torch.device) -> Tensor:
        known = self._known.get(key)
        if known is None or known[0] != numbers:
            filled = [(*own, float(lr_at), float(rate_at), 0.0) for own, lr_at, rate_at in numbers]
            self._known[key] = known = (numbers, _on(device, filled, torch.float64))
        return known[1]


def _on(device: torch.device, rows: Sequence[tuple], dtype: torch.dtype) -> Tensor:
    host = torch.tensor(rows, dtype=dtype)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def by_kind(operands: Sequence[Operand]) -> dict[tuple, list[Operand]]:
    """Operands by what one launch needs to be equal."""
    kinds: dict[tuple, list[Operand]] = {}
    for operand in operands:
        kinds.setdefault(operand.kind, []).append(operand)
    return kinds


def _depth(tensors: Sequence[Any]) -> int:
    return max(1, (len(tensors) - 1).bit_length())
