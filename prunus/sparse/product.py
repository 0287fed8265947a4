"""Products with a sparse matrix, as functions and as an operator of torch.

On CUDA up to ``MOST`` vectors, as in decoding, read the gap form itself; more, as in a prompt, read a dense copy that
lives for the one product. On a CPU up to ``MOST_CPU`` vectors are multiplied one by one in torch's CSR form, which is
made at the first product. Elsewhere every product makes the dense copy.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .gaps import Gaps, row_blocks, slots_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = 16  # vectors that the kernel takes at a time; with more, the dense product is faster
MOST_CPU = 4  # vectors that a CPU multiplies one by one; with more, making a dense copy pays


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
    """``dense_reference``, bit for bit."""
    if gaps.values.is_cuda:
        from ._triton import dense as kernel

        return kernel(gaps)
    return dense_reference(gaps)


def product(x: Tensor, gaps: Gaps, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` for x of shape (..., in), of the type of x; sums are in float32.

    Vectors must be finite: a zero that bridges a gap times infinity is NaN, as in the dense product.
    """
    num_rows, width = gaps.shape
    num = x.numel() // width if width else 0
    if x.is_cuda and 0 < num <= MOST and x.dtype != torch.float64:
        y = _kernel()(x.reshape(num, width), gaps, bias)
        return y.view(*x.shape[:-1], num_rows)
    if x.is_cpu and 0 < num <= MOST_CPU and num_rows and x.dtype in DTYPES:
        matrix, vectors = csr_of(gaps), x.reshape(num, width).to(torch.float32)
        y = torch.mv(matrix, vectors[0]) if num == 1 else torch.stack([torch.mv(matrix, vector) for vector in vectors])
        return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], num_rows)
    return nn.functional.linear(x, dense(gaps).to(x.dtype), bias)


_KERNEL: list[Any] = []
_CSR = WeakIdKeyDictionary()  # of the values of a gap form, whose type and zeros it has


def _kernel() -> Any:
    """The product of the GPU, imported at its first use."""
    if not _KERNEL:
        try:
            from ._triton import product as kernel
        except ImportError as error:
            raise ValueError(f"sparse products on a GPU are Triton kernels: pip install triton ({error})") from None
        _KERNEL.append(kernel)
    return _KERNEL[0]


def check_device(device: torch.device) -> None:
    """ValueError unless products with sparse matrices run there."""
    if device.type == "cuda":
        _kernel()
    elif device.type != "cpu":
        raise ValueError(f"sparse products run on CUDA devices and CPUs, but the model is on {device}; move it there")


def csr_of(gaps: Gaps) -> Tensor:
    """The matrix in torch's CSR form with 32-bit indices and float32 values, kept as long as its gap form."""
    version = None if gaps.values.is_inference() else gaps.values._version
    known = _CSR.get(gaps.values)
    if known is None or known[0] != version:
        rows, columns, values = [], [], []
        for first, last in row_blocks(*gaps.shape):
            slots = slots_of(gaps, first, last)
            kept = slots.is_entry & (slots.value != 0)
            rows.append(torch.zeros(last - first, dtype=torch.int32).index_add_(
                0, slots.row - first, kept.sum((1, 2, 3), dtype=torch.int32)
            ))  # fmt: skip
            columns.append(slots.column[kept].int())
            values.append(slots.value[kept].float())
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), torch.cat(rows).cumsum(0, dtype=torch.int32)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the form is in beta
            parts = (ends, torch.cat(columns), torch.cat(values))
            matrix = torch.sparse_csr_tensor(*parts, gaps.shape, check_invariants=False)
        known = _CSR[gaps.values] = version, matrix
    return known[1]


def operator(x: Tensor, gaps: Gaps, bias: Tensor | None) -> Tensor:
    """``product`` as an operator of torch, which torch.compile and gradients go through."""
    return torch.ops.prunus.sparse_linear(x, gaps.values, gaps.codes, gaps.heads, gaps.rows, bias)


def _outputs(x: Tensor, values: Tensor, codes: Tensor, heads: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, Gaps(values, codes, heads, rows, (len(rows) - 1, x.shape[-1])), bias)


def _input_gradient(y: Tensor, values: Tensor, codes: Tensor, heads: Tensor, rows: Tensor, width: int) -> Tensor:
    return y @ dense(Gaps(values, codes, heads, rows, (len(rows) - 1, width))).to(y.dtype)


def _register() -> torch.library.Library:
    """``torch.ops.prunus.sparse_linear``, which torch.compile takes as one operator whatever the number of vectors."""
    library = torch.library.Library("prunus", "FRAGMENT")
    parts = "Tensor values, Tensor codes, Tensor heads, Tensor rows"
    library.define(f"sparse_linear(Tensor x, {parts}, Tensor? bias) -> Tensor")
    library.define(f"sparse_linear_backward(Tensor y, {parts}, int width) -> Tensor")
    library.impl("sparse_linear", _outputs, "CompositeExplicitAutograd")
    library.impl("sparse_linear_backward", _input_gradient, "CompositeExplicitAutograd")

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *kept, _ = inputs
        ctx.width = x.shape[-1]
        ctx.save_for_backward(*kept)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.ops.prunus.sparse_linear_backward(grad, *ctx.saved_tensors, ctx.width)
        return gradient, None, None, None, None, None

    def shape_of(x: Tensor, values: Tensor, codes: Tensor, heads: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], rows.shape[0] - 1))

    def backward_shape(y: Tensor, values: Tensor, codes: Tensor, heads: Tensor, rows: Tensor, width: int) -> Tensor:
        return y.new_empty((*y.shape[:-1], width))

    torch.library.register_fake("prunus::sparse_linear", shape_of, lib=library)
    torch.library.register_fake("prunus::sparse_linear_backward", backward_shape, lib=library)
    torch.library.register_autograd("prunus::sparse_linear", backward, setup_context=keep, lib=library)
    return library


_LIBRARY = _register()  # its operators go when it does
