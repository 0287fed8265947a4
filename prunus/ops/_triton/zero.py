"""Zeroing a tensor by its mask."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

BLOCK = 1024


@triton.jit
def zero_kernel(words, mask, numel, BLOCK: tl.constexpr):
    """Write zero where the bit is not set; what stays is not touched."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(mask + at // 8, mask=at < numel, other=255).to(tl.int32)
    dropped = ((bits >> (at % 8).to(tl.int32)) & 1) == 0
    tl.store(words + at, tl.zeros((BLOCK,), words.dtype.element_ty), mask=(at < numel) & dropped)


def zero_(words: Tensor, packed: Tensor) -> None:
    """Zero integers that lie side by side where their packed mask is not set."""
    if words.numel():
        launch(zero_kernel, (triton.cdiv(words.numel(), BLOCK),), (words, packed, words.numel()), {"BLOCK": BLOCK})
