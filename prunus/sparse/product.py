"""Products with a sparse matrix, as functions and as an operator of torch.

On CUDA up to ``MOST`` vectors, as in decoding, read the sparse form itself; more, as in a prompt, a dense copy that
lives for the one product. On a CPU up to ``MOST_CPU`` vectors are multiplied one by one in torch's CSR form, which is
made at the first product. Elsewhere every product makes the dense copy.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from . import tiles
from .gaps import Gaps, row_blocks, slots_of
from .tiles import Tiles

Form = Gaps | Tiles
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = 16  # vectors that the kernel takes at a time; with more, the dense product is faster
MOST_CPU = 4  # vectors that a CPU multiplies one by one; with more, making a dense copy pays
OUTPUTS = "sparse_linear(Tensor x, Tensor[] parts, int num_rows, ScalarType dtype, int stage, Tensor? bias) -> Tensor"


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


def dense(form: Form) -> Tensor:
    """The matrix with its zeros: ``dense_reference`` of its form, bit for bit."""
    if isinstance(form, Tiles):
        if not form.data.is_cuda:
            return tiles.dense_reference(form)
        from ._cuda import tile_dense

        return tile_dense(form)
    if form.values.is_cuda:
        from ._triton import dense as kernel

        return kernel(form)
    return dense_reference(form)


def product(x: Tensor, form: Form, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` for x of shape (..., in), of the type of x; sums are in float32.

    Vectors must be finite: a zero that bridges a gap times infinity is NaN, as in the dense product.
    """
    num_rows, width = form.shape
    num = x.numel() // width if width else 0
    if x.is_cuda and 0 < num <= MOST and num_rows:
        kernel = _kernel_for(x, form, num)
        if kernel is not None:
            return kernel(x.reshape(num, width), form, bias).view(*x.shape[:-1], num_rows)
    if x.is_cpu and 0 < num <= MOST_CPU and num_rows and x.dtype in DTYPES and isinstance(form, Gaps):
        matrix, vectors = csr_of(form), x.reshape(num, width).to(torch.float32)
        y = torch.mv(matrix, vectors[0]) if num == 1 else torch.stack([torch.mv(matrix, vector) for vector in vectors])
        return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], num_rows)
    return nn.functional.linear(x, dense(form).to(x.dtype), bias)


def _kernel_for(x: Tensor, form: Form, num: int) -> Any | None:
    """What multiplies ``num`` vectors by the form itself; None if the dense copy is to be multiplied."""
    if num == 1 and isinstance(form, Gaps):
        return _kernel() if x.dtype != torch.float64 else None
    from . import _cuda, _nvrtc

    if x.dtype != form.dtype or not _nvrtc.is_there():
        return None
    if isinstance(form, Tiles):
        return _cuda.tile_product
    return _cuda.gap_product if num > 1 and _cuda.most_at_once(x) > 1 else None


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


def can_tile(device: torch.device) -> bool:
    """Whether the device multiplies tiles."""
    if device.type != "cuda":
        return False
    from ._cuda import can_tile as can

    return can(device)


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


def form_of(parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype, stage: int) -> Form:
    """The form whose tensors these are: tiles have two, the gap form has four."""
    return Tiles(*parts, shape, dtype, stage) if len(parts) == 2 else Gaps(*parts, shape)


def _sparse_linear(
    x: Tensor, parts: list[Tensor], num_rows: int, dtype: torch.dtype, stage: int, bias: Tensor | None
) -> Tensor:
    return product(x, form_of(parts, (num_rows, x.shape[-1]), dtype, stage), bias)


def _register() -> None:
    """``torch.ops.prunus.sparse_linear``, which torch.compile takes as one operator whatever the number of vectors."""
    library = torch.library.Library("prunus", "FRAGMENT")
    library.define(OUTPUTS)
    library.impl("sparse_linear", _sparse_linear, "CompositeExplicitAutograd")

    def shape_of(
        x: Tensor, parts: list[Tensor], num_rows: int, dtype: torch.dtype, stage: int, bias: Tensor | None
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], num_rows))

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, parts, num_rows, dtype, stage, _ = inputs
        ctx.matrix = (num_rows, x.shape[-1]), dtype, stage
        ctx.save_for_backward(*parts)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight = dense(form_of(ctx.saved_tensors, *ctx.matrix))
        return grad @ weight.to(grad.dtype), [None] * len(ctx.saved_tensors), None, None, None, None

    torch.library.register_fake("prunus::sparse_linear", shape_of, lib=library)
    torch.library.register_autograd("prunus::sparse_linear", backward, setup_context=keep, lib=library)
    _KEPT.append(library)


_KEPT: list[Any] = []  # a library that is freed takes its operators with it
_register()
