"""The largest per-sample gradient of a linear layer, from its inputs and the gradients of its outputs."""

import torch
from torch import Tensor


def outer(left: Tensor, right: Tensor) -> Tensor:
    """``sum over t of left_t right_t^T`` of each sample: (sample, left features, right features), float32 or better."""
    left = left.transpose(1, 2)
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def largest_outer_reference_(record: Tensor, left: Tensor, right: Tensor) -> None:
    """``record = max(record, |outer(left, right)|)`` over all samples; NaN counts as the largest."""
    for i in range(len(left)):
        torch.maximum(record, outer(left[i : i + 1], right[i : i + 1])[0].abs(), out=record)


def fuses(left: Tensor) -> bool:
    """Whether ``largest_outer_`` has a kernel for such tensors: others lose precision or gain nothing by it."""
    return left.is_cuda and left.dtype in (torch.bfloat16, torch.float16) and left.shape[1] > 0


def largest_outer_(record: Tensor, left: Tensor, right: Tensor) -> None:
    """``largest_outer_reference_``, whose products never reach memory where a kernel does it."""
    if fuses(left) and record.dtype == torch.float32 and record.is_contiguous():
        from ._triton.outer import largest_outer_ as kernel

        kernel(record, left.contiguous(), right.contiguous())
    else:
        largest_outer_reference_(record, left, right)
