"""Products of 16-bit numbers in float32, for CPUs that have no instructions for them.

There torch takes some hundred times as long as in float32, and may turn oneDNN off for the rest of the process.
"""

import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.scaled_dot_product_attention, torch.einsum, torch.matmul, torch.mm, torch.mv, torch.bmm, torch.addmm,
    torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.mv, Tensor.bmm,
    Tensor.addmm, Tensor.baddbmm,
}  # fmt: skip


def wide_products(device: torch.device | str, of: nn.Module | Tensor) -> AbstractContextManager[Any]:
    """Products of 16-bit numbers on a CPU without instructions for them are computed in float32 and rounded once.

    It goes by what the CPU has, not by a measurement, so that a machine always rounds the same way. ``of`` is a model
    or a factor; where nothing in it is of such a type it does nothing, since it costs each call of torch some time.
    """
    if torch.device(device).type != "cpu":
        return nullcontext()
    used = {of.dtype} if isinstance(of, Tensor) else {part.dtype for part in (*of.parameters(), *of.buffers())}
    types = used.intersection(slow_types())
    return WideProducts(*types) if types else nullcontext()


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """A product of batches whose result is in float32, or wider."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left^T right``. Products of half-precision numbers are exact in float32, where CUDA sums them."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.is_cuda and torch.__version__ >= "2.13":  # earlier ones want a total of the factors' type
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda:
        total += torch.mm(left.T, right, out_dtype=total.dtype)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


@cache
def slow_types() -> list[torch.dtype]:
    """The 16-bit types that this CPU multiplies one by one."""
    if not torch.backends.mkldnn.is_available():
        return [torch.bfloat16, torch.float16]
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # on ARM oneDNN says that it has float16, and takes a hundred times as long as for float32
    has_float16 = platform.machine() == "x86_64" and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return [torch.bfloat16] * (not has_bfloat16) + [torch.float16] * (not has_float16)


class WideProducts(TorchFunctionMode):
    """Products of CPU tensors of some types take float32 copies of them; gradients go the same way."""

    def __init__(self, *types: torch.dtype) -> None:
        super().__init__()
        self.types = types

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        narrow = self._narrow((*args, *kwargs.values())) if func in PRODUCTS else None
        if narrow is None:
            return func(*args, **kwargs)
        wide = func(*map(self._wide, args), **{name: self._wide(value) for name, value in kwargs.items()})
        return wide.to(narrow)

    def _narrow(self, value: object) -> torch.dtype | None:
        """The type of the first tensor that is to be widened."""
        if isinstance(value, (list, tuple)):  # all arguments, or the operands of einsum
            return next((dtype for each in value if (dtype := self._narrow(each))), None)
        return value.dtype if isinstance(value, Tensor) and value.is_cpu and value.dtype in self.types else None

    def _wide(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            return type(value)(map(self._wide, value))
        return value.float() if self._narrow(value) else value
