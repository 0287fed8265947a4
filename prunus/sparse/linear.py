"""Products with a sparse matrix, and linear layers that keep their weight sparse in memory and multiply by it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import check_patterns, is_conv1d, matches
from .gaps import WIDEST, Gaps, check_gaps, gaps_of_dense, row_blocks, slots_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = 8  # vectors that the kernel takes at a time; with more, the dense product is faster
LEAST = 0.5  # sparsity from which a product with one vector is faster than the dense one on an H200
BUFFERS = ("values", "codes", "heads", "rows")


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
    """``x W^T + bias`` for x of shape (vectors, in).

    On CUDA up to ``MOST`` vectors read the gap form itself, summed in float32; more of them read a dense copy.
    Vectors must be finite: a zero that bridges a gap times infinity is NaN, as in the dense product.
    """
    if x.is_cuda and len(x) <= MOST and x.dtype != torch.float64 and x.numel():
        from ._triton import product as kernel

        num = 1 << (len(x) - 1).bit_length()
        padded = x if num == len(x) else nn.functional.pad(x, (0, 0, 0, num - len(x)))
        return kernel(padded.contiguous(), gaps, bias)[: len(x)]
    return nn.functional.linear(x, dense(gaps).to(x.dtype), bias)


class SparseLinear(nn.Module):
    """``x W^T + bias`` with W in gap form, for inference; gradients reach x alone.

    On CUDA a few vectors, as in decoding, read the gap form itself; many, as in a prompt, a dense copy that
    lives for the one product. Elsewhere every product makes that copy, which is slower than a dense layer.
    """

    values: Tensor
    codes: Tensor
    heads: Tensor
    rows: Tensor
    bias: Tensor | None

    def __init__(self, gaps: Gaps, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = gaps.shape
        for name in BUFFERS:
            self.register_buffer(name, getattr(gaps, name))
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_load_state_dict_pre_hook(_resize_buffers)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        """The same layer; the zeros of its weight say what is left out."""
        if reason := why_not(linear.weight):
            shape = tuple(linear.weight.shape)
            raise ValueError(f"the layer has a weight of {shape}, {linear.weight.dtype}: {reason}; keep it dense")
        return cls(gaps_of_dense(linear.weight), linear.bias)

    @property
    def gaps(self) -> Gaps:
        return Gaps(self.values, self.codes, self.heads, self.rows, (self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:
        """A dense copy of the weight, made anew each time."""
        return dense(self.gaps)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            return nn.functional.linear(x, self.weight.to(x.dtype), bias)
        return product(x.reshape(-1, self.in_features), self.gaps, bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kept = int(self.rows[:, 2].sum()) / max(1, self.in_features * self.out_features)
        return f"in_features={self.in_features}, out_features={self.out_features}, entries={kept:.1%}"


def _resize_buffers(layer: SparseLinear, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Resize the buffers to the saved ones before loading; refuse indices that are out of range."""
    found = {name: state_dict[prefix + name] for name in BUFFERS if prefix + name in state_dict}
    if len(found) == len(BUFFERS):
        check_gaps(Gaps(**found, shape=(layer.out_features, layer.in_features)))
        for name, buffer in found.items():
            setattr(layer, name, torch.empty_like(buffer, dtype=getattr(layer, name).dtype, device=layer.rows.device))


def sparsify_(
    model: nn.Module,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    least: float = LEAST,
) -> list[str]:
    """Replace linear layers by sparse ones, in place; names of those replaced.

    A layer is taken whose weight has at least ``least`` zeros, is of a type that the form holds, and is not tied to
    another. With ``include``, globs over names, only layers that match; those that match ``exclude`` stay.
    """
    replaced = []
    for name, module in chosen(model, include, exclude).items():
        weight = linear_weight(module)
        if why_not(weight) is None and sparsity_of(weight) >= least:
            if not name:
                raise ValueError("the model is itself a linear layer: use SparseLinear.from_linear(model)")
            parent, _, last = name.rpartition(".")
            layer = SparseLinear(gaps_of_dense(weight), getattr(module, "bias", None)).train(module.training)
            setattr(model.get_submodule(parent), last, layer)
            replaced.append(name)
    return replaced


def chosen(model: nn.Module, include: str | Sequence[str], exclude: str | Sequence[str]) -> dict[str, nn.Module]:
    """Linear layers by name whose weight is in no other place, and that the patterns allow."""
    include, exclude = ([p] if isinstance(p, str) else list(p) for p in (include, exclude))
    check_patterns([*include, *exclude], [name for name, _ in model.named_parameters()])
    num_places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_conv1d(module))
        and num_places[id(module.weight)] == 1
        and (not include or matches(f"{name}.weight", include))
        and not matches(f"{name}.weight", exclude)
    }


def linear_weight(module: nn.Module) -> Tensor:
    """The weight as (out, in)."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if is_conv1d(module) else weight


def sparsity_of(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / max(1, weight.numel())


def why_not(weight: Tensor) -> str | None:
    """Why a weight cannot have the gap form; None if it can."""
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        return f"a matrix of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)} is needed"
    if weight.shape[1] > WIDEST:
        return f"a row may have at most {WIDEST} columns"
    return None
