"""Linear layers that keep their weight sparse in memory, and multiply by it as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import check_patterns, is_conv1d, matches
from .gaps import WIDEST, Gaps, check_gaps, gaps_of, gaps_of_dense
from .product import dense, product

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST = 0.5  # sparsity from which a product with one vector is faster than the dense one on an H200
BUFFERS = ("values", "codes", "heads", "rows")


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
        self.register_load_state_dict_pre_hook(_make_room)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        """The same layer; the zeros of its weight say what is left out."""
        if reason := why_not(linear.weight):
            shape = tuple(linear.weight.shape)
            raise ValueError(f"the layer has a weight of {shape}, {linear.weight.dtype}: {reason}; keep it dense")
        return cls(gaps_of_dense(linear.weight), linear.bias)

    @classmethod
    def from_packed(
        cls, packed: Tensor, values: Tensor, shape: Sequence[int], bias: Tensor | None = None
    ) -> "SparseLinear":
        """The layer of a weight (out, in) given as one bit an element and the values where it is set."""
        return cls(gaps_of(packed, values, shape), bias)

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


def _make_room(layer: SparseLinear, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Resize the buffers to the saved ones before loading; refuse indices that are out of range."""
    found = {name: state_dict[prefix + name] for name in BUFFERS if prefix + name in state_dict}
    if len(found) == len(BUFFERS):
        check_gaps(Gaps(**found, shape=(layer.out_features, layer.in_features)))
        for name, saved in found.items():
            setattr(layer, name, torch.empty_like(saved, dtype=getattr(layer, name).dtype, device=layer.rows.device))


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
            bias = getattr(module, "bias", None)
            if not name:
                raise ValueError("the model is itself a linear layer: use SparseLinear.from_linear(model)")
            parent, _, last = name.rpartition(".")
            layer = SparseLinear(gaps_of_dense(weight), bias).train(module.training)
            setattr(model.get_submodule(parent), last, layer)
            replaced.append(name)
    return replaced


def chosen(model: nn.Module, include: str | Sequence[str], exclude: str | Sequence[str]) -> dict[str, nn.Module]:
    """Linear layers by name whose weight is in no other place, and that the patterns allow."""
    include, exclude = ([p] if isinstance(p, str) else list(p) for p in (include, exclude))
    check_patterns([*include, *exclude], [name for name, _ in model.named_parameters()])
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_conv1d(module))
        and places[id(module.weight)] == 1
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
