"""Products of a sparse matrix with a few vectors, as decoding a token needs them."""

import torch
from torch import Tensor

from .gaps import Gaps, row_blocks, slots_of

MOST = 8  # vectors that the kernel takes at a time; with more, the dense product is faster


def dense_reference(gaps: Gaps) -> Tensor:
    """The matrix with its zeros."""
    num_rows, width = gaps.shape
    flat = torch.zeros(num_rows * width + 1, dtype=gaps.values.dtype, device=gaps.values.device)
    for first, last in row_blocks(num_rows, width) if len(gaps.values) else ():
        slots = slots_of(gaps, first, last)
        place = slots.column + (slots.row * width)[:, None, None, None]
        place.masked_fill_(~slots.is_entry, num_rows * width)  # what is no entry goes behind the matrix
        flat.scatter_(0, place.view(-1), slots.value.reshape(-1))
    return flat[:-1].view(num_rows, width)


def dense(gaps: Gaps) -> Tensor:
    """``dense_reference``: the matrix with its zeros, bit for bit."""
    if gaps.values.is_cuda:
        from ._triton import dense as kernel

        return kernel(gaps)
    return dense_reference(gaps)


def product_reference(x: Tensor, gaps: Gaps, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` for x of shape (vectors, in), summed in float32 at least and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ dense_reference(gaps).to(wide).t()
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def product(x: Tensor, gaps: Gaps, bias: Tensor | None = None) -> Tensor:
    """``product_reference``; on CUDA, up to ``MOST`` vectors read the gap form itself, more of them a dense copy.

    Vectors must be finite: a zero that bridges a gap times infinity is NaN, as in the dense product.
    """
    if x.is_cuda and len(x) <= MOST and x.dtype != torch.float64 and x.numel():
        from ._triton import product as kernel

        num = 1 << (len(x) - 1).bit_length()
        padded = x if num == len(x) else torch.nn.functional.pad(x, (0, 0, 0, num - len(x)))
        return kernel(padded.contiguous(), gaps, bias)[: len(x)]
    return torch.nn.functional.linear(x, dense(gaps).to(x.dtype), bias)
