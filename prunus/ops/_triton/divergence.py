"""A program reads its row of logits twice: for the losses, then for the gradient, which overwrites the row.

Maxima and sums of exponentials are kept as the blocks of a row come, and rescaled where a maximum grows.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

BLOCK = 4096  # classes that a program works on at a time
ELEMENTS = 8  # of a block for each thread: 16 take so many registers that half as many threads run
LOWEST = tl.constexpr(-3.4028234663852886e38)  # where maxima begin: -inf less -inf would be NaN
IGNORED = tl.constexpr(-100)


@triton.jit
def read(row, first, num_classes, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row in float32; what is right of the row has no probability."""
    lane = tl.arange(0, BLOCK)
    if FULL:  # a mask would have elements read one by one
        values = tl.load(row + first + lane)
    else:
        values = tl.load(row + first + lane, mask=lane < num_classes - first, other=-float("inf"))
    return values.to(tl.float32)


@triton.jit
def add_block(
    q_max, q_sum, p_max, p_sum, gap, logits, expected, first, num_classes, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    """Maxima, sums of exponentials, and the sum of ``exp(y) (y - x)``, up to a block of logits x and expected y.

    Each is less its maximum, so that logits of 10,000 lose no digits.
    """
    x, y = read(logits, first, num_classes, FULL, BLOCK), read(expected, first, num_classes, FULL, BLOCK)
    q_new, p_new = tl.maximum(q_max, tl.max(x)), tl.maximum(p_max, tl.max(y))
    q_step, p_step = q_max - q_new, p_max - p_new
    p_keep, p = tl.exp(p_step), tl.exp(y - p_new)
    terms = tl.where(p == 0, 0.0, p * ((y - p_new) - (x - q_new)))
    gap = tl.where(p_keep == 0, 0.0, p_keep * (gap + p_sum * (p_step - q_step))) + tl.sum(terms)
    q_sum = q_sum * tl.exp(q_step) + tl.sum(tl.exp(x - q_new))
    p_sum = p_sum * p_keep + tl.sum(p)
    return q_new, q_sum, p_new, p_sum, gap


@triton.jit
def write_block(
    q_max, q_scale, p_max, p_scale, place, hard, logits, expected, first, num_classes,
    FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a block, whose class at ``place`` is the label."""
    x, y = read(logits, first, num_classes, FULL, BLOCK), read(expected, first, num_classes, FULL, BLOCK)
    lane = tl.arange(0, BLOCK)
    gradient = tl.exp(x - q_max) * q_scale - tl.exp(y - p_max) * p_scale
    gradient = tl.where(first + lane == place, gradient - hard, gradient).to(logits.dtype.element_ty)
    if FULL:
        tl.store(logits + first + lane, gradient)
    else:
        tl.store(logits + first + lane, gradient, mask=lane < num_classes - first)


@triton.jit
def work_on_row(losses, logits, expected, label, soft, hard, num_classes, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    is_labelled, is_class = label != IGNORED, (label >= 0) & (label < num_classes)
    # read before any warp overwrites them; a label that is no class makes NaN
    x_label = tl.load(logits + label, mask=is_class, other=float("nan")).to(tl.float32)
    y_label = tl.load(expected + label, mask=is_class, other=float("nan")).to(tl.float32)
    whole = num_classes // BLOCK * BLOCK
    q_max, p_max = tl.full((), LOWEST, tl.float32), tl.full((), LOWEST, tl.float32)
    q_sum, p_sum, gap = tl.zeros((), tl.float32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, whole, BLOCK):
        q_max, q_sum, p_max, p_sum, gap = add_block(
            q_max, q_sum, p_max, p_sum, gap, logits, expected, first, num_classes, True, BLOCK
        )
    if whole < num_classes:
        q_max, q_sum, p_max, p_sum, gap = add_block(
            q_max, q_sum, p_max, p_sum, gap, logits, expected, whole, num_classes, False, BLOCK
        )
    q_log, p_log = tl.log(q_sum), tl.log(p_sum)
    tl.store(losses, gap / p_sum - p_log + q_log)
    tl.store(losses + 1, tl.where(is_labelled, q_log - (x_label - q_max), 0.0))
    tl.store(losses + 2, tl.where(is_labelled, p_log - (y_label - p_max), 0.0))
    if GRADIENT:
        q_scale, p_scale = (soft + hard) / q_sum, soft / p_sum
        place = tl.where(is_class, label, -1).to(tl.int32)
        if whole < num_classes:  # what was read last is still in the cache: the second pass goes backwards
            write_block(q_max, q_scale, p_max, p_scale, place, hard, logits, expected, whole, num_classes, False, BLOCK)
        for done in range(BLOCK, whole + BLOCK, BLOCK):
            write_block(
                q_max, q_scale, p_max, p_scale, place, hard, logits, expected, whole - done, num_classes, True, BLOCK
            )


@triton.jit
def clear_row(losses, logits, num_classes, BLOCK: tl.constexpr):
    for loss in tl.static_range(3):
        tl.store(losses + loss, 0.0)
    for first in range(0, num_classes, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        tl.store(logits + lane, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=lane < num_classes)


@triton.jit
def divergence_kernel(
    losses, logits, expected, labels, soft, hard,
    num_classes, logits_stride, expected_stride, label_stride, soft_stride, hard_stride,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Divergence and both cross-entropies of a row to (row, 3); the row becomes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    losses, logits, expected = losses + row * 3, logits + row * logits_stride, expected + row * expected_stride
    label = tl.load(labels + row * label_stride)
    if GRADIENT:
        soft_weight = tl.load(soft + row * soft_stride)
        hard_weight = tl.where(label != IGNORED, tl.load(hard + row * hard_stride), 0.0)
        if (soft_weight != 0) | (hard_weight != 0):
            work_on_row(losses, logits, expected, label, soft_weight, hard_weight, num_classes, True, BLOCK)
        else:
            clear_row(losses, logits, num_classes, BLOCK)
    else:
        work_on_row(losses, logits, expected, label, 1.0, 0.0, num_classes, False, BLOCK)


def divergence_(losses: Tensor, logits: Tensor, expected: Tensor, labels: Tensor, weights: list[Tensor]) -> None:
    """Write the losses (row, 3) and, where there are weights, soft and hard, the gradient; rows are contiguous."""
    if len(logits) == 0:
        return
    soft, hard = weights or (losses[:, 0], losses[:, 0])
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    constants = {"GRADIENT": bool(weights), "BLOCK": block, "num_warps": max(1, block // (32 * ELEMENTS))}
    strides = (each.stride(0) for each in (logits, expected, labels, soft, hard))
    arguments = (losses, logits, expected, labels, soft, hard, logits.shape[1], *strides)
    launch(divergence_kernel, (len(logits),), arguments, constants)
