"""The largest per-sample product of a tile stays in registers while one sample after the other is multiplied."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

ROWS, COLUMNS, TOKENS = 128, 128, 64  # of a tile, and tokens multiplied at a time
WARPS, STAGES = 8, 3


@triton.jit
def largest_kernel(
    record, left, right, num_samples, num_tokens, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """record (rows, columns) = max(record, |left_s^T right_s|) over samples s; left (s, token, row), right likewise."""
    columns = tl.cdiv(num_columns, COLUMNS)
    row = (tl.program_id(0) // columns) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    largest = tl.load(record + at, mask=inside, other=0.0)
    for sample in range(num_samples):
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, num_tokens, TOKENS):
            there = (first + token < num_tokens)[:, None]
            place = (sample * num_tokens + first + token).to(tl.int64)[:, None]
            a = tl.load(left + place * num_rows + row[None, :], mask=there & (row < num_rows)[None, :], other=0.0)
            b = tl.load(
                right + place * num_columns + column[None, :], mask=there & (column < num_columns)[None, :], other=0.0
            )
            product = tl.dot(tl.trans(a), b, product)
        largest = tl.maximum(largest, tl.abs(product), propagate_nan=tl.PropagateNan.ALL)
    tl.store(record + at, largest, mask=inside)


def largest_outer_(record: Tensor, left: Tensor, right: Tensor) -> None:
    """``largest_outer_reference_`` of the probe for contiguous half-precision factors."""
    num_samples, num_tokens, num_rows = left.shape
    num_columns = right.shape[2]
    grid = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_columns, COLUMNS)
    if grid == 0:
        return
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TOKENS": TOKENS, "num_warps": WARPS, "num_stages": STAGES}
    sizes = (num_samples, num_tokens, num_rows, num_columns)
    launch(largest_kernel, (grid,), (record, left, right, *sizes), constants)
