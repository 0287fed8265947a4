"""Products with a sparse matrix, as functions and as an operator of torch.

On CUDA up to ``MOST`` vectors, as in decoding, read the sparse form itself; more, as in a prompt, a dense copy that
lives for the one product. On a CPU up to ``MOST_CPU`` vectors are multiplied one by one in torch's CSR form, which is
made at the first product; more take a dense copy of it. A CPU multiplies weights in codes by that CSR form too, of the
values of the codes, at 8 bytes a kept weight. Elsewhere every product makes the dense copy.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..ops.wide_products import wide_products
from . import _cuda, _nvrtc, tiles
from .coded_gaps import CodedGaps
from .coded_tiles import CodedTiles
from .gaps import Gaps, gaps_of_dense, row_blocks, slots_of
from .tiles import TileForm, Tiles

CodedForm = CodedTiles | CodedGaps
Form = Gaps | Tiles | CodedForm
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INPUT_DTYPES = (*DTYPES, torch.float64)  # of vectors, whatever the type of the matrix
MOST = 16  # vectors that the kernel takes at a time; with more, the dense product is faster
MOST_TRITON = 4  # where there is no CUDA kernel
MOST_CPU = 4  # vectors that a CPU multiplies one by one; with more, making a dense copy pays


def dense(form: Form) -> Tensor:
    """The matrix with its zeros, by kernels on a GPU; bit for bit what the form gives."""
    is_cuda = form.device.type == "cuda"
    if is_cuda and _nvrtc.is_there() and form.dtype in _cuda.TYPES:
        matrix = _cuda.tile_dense(form) if isinstance(form, TileForm) else _cuda.gap_dense(form)
        if matrix is not None:
            return matrix
    return _kernels().dense(form) if is_cuda and isinstance(form, Gaps) else form.dense()


def product(x: Tensor, form: Form, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` for finite x (..., in), of its type; sums are in float32, and zeros times infinity are NaN."""
    num_rows, width = form.shape
    size = x.shape
    if not size or size[-1] != width:  # the rest is checked where a call takes long or is the first of its kind
        check_input(x, form.shape, form.device)
    num = x.numel() // width if width else 0
    if x.is_cuda and 0 < num <= MOST and num_rows:
        key = (num, x.dtype, x.get_device())
        run = form.launches.get(key)
        if run is None:
            run = form.launches[key] = _kernel_for(x, form, num)
        if run is not None:
            return run(x, form, bias)
    is_on_cpu = x.is_cpu and form.device == x.device
    has_csr = is_on_cpu and num > 0 and num_rows > 0 and x.dtype in DTYPES and not isinstance(form, Tiles)
    if has_csr and num <= MOST_CPU:
        return _one_by_one(x, form, bias, num)
    check_input(x, form.shape, form.device)
    weight = csr_of(form).to_dense() if has_csr else dense(form)  # the former is torch's own, and faster
    with wide_products(x.device, x):
        return nn.functional.linear(x, weight.to(x.dtype), bias)


def check_input(x: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """ValueError for what a matrix (out, in) on ``device`` cannot be multiplied by."""
    if not x.shape or x.shape[-1] != shape[1]:
        raise ValueError(f"a sparse layer of {shape[1]} inputs takes a tensor (..., {shape[1]}), got {tuple(x.shape)}")
    if x.dtype not in INPUT_DTYPES:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in INPUT_DTYPES)
        raise ValueError(f"a sparse layer takes a tensor of {legal}, got {x.dtype}; convert it, as by x.float()")
    if x.device != device:
        raise ValueError(f"a sparse layer on {device} got a tensor on {x.device}; move one of them with .to()")


def _one_by_one(x: Tensor, form: Gaps | CodedForm, bias: Tensor | None, num: int) -> Tensor:
    """The product on a CPU, vector after vector."""
    num_rows, width = form.shape
    matrix, vectors = csr_of(form), x if x.dtype == torch.float32 else x.float()
    if num == 1:
        y = torch.mv(matrix, vectors.reshape(width))
    else:
        y = torch.stack([torch.mv(matrix, vector) for vector in vectors.reshape(num, width)])
    y = y if bias is None else y + bias
    return (y if x.dtype == torch.float32 else y.to(x.dtype)).view(*x.shape[:-1], num_rows)


def _kernel_for(x: Tensor, form: Form, num: int) -> _cuda.Product | None:
    """What multiplies ``num`` vectors by the form itself; None if the dense copy is to be multiplied."""
    check_input(x, form.shape, form.device)
    if x.dtype == torch.float64:
        return None
    index = x.get_device()
    if isinstance(form, CodedGaps):
        is_taken = x.dtype == form.dtype and _nvrtc.is_there() and _cuda.most_coded_at_once(form, index) > 0
        return _cuda.coded_gap_product(form, num, index) if is_taken else None
    if isinstance(form, TileForm):
        is_taken = x.dtype == form.dtype and x.dtype in tiles.DTYPES and _cuda.can_tile(x.device)
        return _cuda.tile_product(form, num, index) if is_taken else None
    if num == 1:
        return _kernels().product_of_one
    if x.dtype == form.dtype and _nvrtc.is_there() and _cuda.most_at_once(form, index) > 1:
        return _cuda.gap_product(form, num, index)
    return _kernels().product if num <= MOST_TRITON else None


_CSR = WeakIdKeyDictionary()  # by the values or codes of a form, whose type and zeros it has


@cache
def _kernels() -> Any:
    """The kernels of the gap form, imported at their first use."""
    try:
        from . import _triton
    except ImportError as error:
        raise ValueError(f"sparse products on a GPU need Triton: pip install triton ({error})") from None
    return _triton


def check_device(device: torch.device) -> None:
    """ValueError unless products with sparse matrices run there."""
    if device.type == "cuda":
        _kernels()
    elif device.type != "cpu":
        raise ValueError(f"sparse products run on CUDA devices and CPUs, but the model is on {device}; move it there")


def csr_of(form: Gaps | CodedForm) -> Tensor:
    """The matrix in torch's CSR form with 32-bit indices and float32 values, kept as long as its form."""
    key = form.values if isinstance(form, Gaps) else form.data
    about = form.dtype, None if key.is_inference() else key._version
    known = _CSR.get(key)
    if known is None or known[0] != about:
        gaps = form if isinstance(form, Gaps) else gaps_of_dense(form.dense())
        known = _CSR[key] = about, _new_csr(gaps)
    return known[1]


@torch.inference_mode(False)  # torch's own conversions refuse its tensors outside of it
@torch.no_grad()
def _new_csr(gaps: Gaps) -> Tensor:
    rows, columns, values = [], [], []
    for first, last in row_blocks(*gaps.shape):
        slots = slots_of(gaps, first, last)
        kept = slots.is_entry & (slots.value != 0)
        num_kept = kept.sum((1, 2, 3), dtype=torch.int32)
        rows.append(torch.zeros(last - first, dtype=torch.int32).index_add_(0, slots.row - first, num_kept))
        columns.append(slots.column[kept].int())
        values.append(slots.value[kept].float())
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), torch.cat(rows).cumsum(0, dtype=torch.int32)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the form is in beta
        parts = (ends, torch.cat(columns), torch.cat(values))
        return torch.sparse_csr_tensor(*parts, gaps.shape, check_invariants=False)


def form_of(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, stage: int) -> Form:
    """The form whose tensors these are: tiles have two, whose type says what they hold, and the gap form has four."""
    num_rows, width = shape
    if len(parts) == 2:
        data, starts = parts
        kind = {torch.uint8: CodedTiles, torch.int32: CodedGaps}.get(data.dtype, Tiles)
        return kind(data, starts, (num_rows, width), dtype, stage)
    values, codes, heads, rows = parts
    return Gaps(values, codes, heads, rows, (num_rows, width))


def operator(x: Tensor, form: Form, bias: Tensor | None) -> Tensor:
    """``product`` as an operator of torch, which torch.compile and gradients go through."""
    parts = [getattr(form, name) for name in form.PARTS]
    return torch.ops.prunus.sparse_linear(x, bias, parts, form.shape, form.dtype, getattr(form, "stage", 0))


def _register() -> torch.library.Library:
    """``torch.ops.prunus.sparse_linear``, which torch.compile takes as one operator whatever the number of vectors."""
    library = torch.library.Library("prunus", "FRAGMENT")
    form = "Tensor[] parts, int[] shape, ScalarType dtype, SymInt stage"  # stages differ from layer to layer
    library.define(f"sparse_linear(Tensor x, Tensor? bias, {form}) -> Tensor")
    library.define(f"sparse_linear_backward(Tensor y, {form}) -> Tensor")

    def outputs(x: Tensor, bias: Tensor | None, *form: Any) -> Tensor:
        return product(x, form_of(*form), bias)

    def input_gradient(y: Tensor, *form: Any) -> Tensor:
        return y @ dense(form_of(*form)).to(y.dtype)

    library.impl("sparse_linear", outputs, "CompositeExplicitAutograd")
    library.impl("sparse_linear_backward", input_gradient, "CompositeExplicitAutograd")

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, _, parts, *ctx.rest = inputs
        ctx.save_for_backward(*parts)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = list(ctx.saved_tensors)
        gradient = torch.ops.prunus.sparse_linear_backward(grad, parts, *ctx.rest)
        return gradient, None, [None] * len(parts), None, None, None

    def shape_of(x: Tensor, bias: Tensor | None, parts: list[Tensor], shape: list[int], *rest: Any) -> Tensor:
        check_input(x, shape, parts[0].device)
        return x.new_empty((*x.shape[:-1], shape[0]))

    def backward_shape(y: Tensor, parts: list[Tensor], shape: list[int], *rest: Any) -> Tensor:
        return y.new_empty((*y.shape[:-1], shape[1]))

    torch.library.register_fake("prunus::sparse_linear", shape_of, lib=library)
    torch.library.register_fake("prunus::sparse_linear_backward", backward_shape, lib=library)
    torch.library.register_autograd("prunus::sparse_linear", backward, setup_context=keep, lib=library)
    return library


_LIBRARY = _register()  # its operators go when it does
