"""Linear layers that keep their weight sparse in memory, and a model's layers turned into them and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import is_conv1d
from .choose import choose, groups_of
from .gaps import Gaps, check_gaps, gaps_of_dense
from .model_layers import chosen, linear_weight, why_not
from .product import check_device, dense, operator, product
from .times import WeightKind, kind_of

MOST_MISSES = 2  # products of a group that some layer had no use for, before it is given up
NOTHING: tuple[Tensor | None, int | None, dict[int, Tensor]] = (None, None, {})
BUFFERS = ("values", "codes", "heads", "rows")


class SparseLinear(nn.Module):
    """``x W^T + bias`` with W in gap form, for inference; gradients reach x alone.

    A layer may be one of a ``Group``, which computes the products of all its layers at once.
    """

    values: Tensor
    codes: Tensor
    heads: Tensor
    rows: Tensor
    bias: Tensor | None
    group: "Group | None"
    origin: tuple[nn.Module, bool] | None = None  # the layer that it replaced, and whether that took gradients

    def __init__(self, gaps: Gaps, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = gaps.shape
        for name in BUFFERS:
            self.register_buffer(name, getattr(gaps, name))
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_load_state_dict_pre_hook(_resize_buffers)
        self._changed()

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        """The same layer; the zeros of its weight say what is left out."""
        if reason := why_not(linear.weight):
            shape = tuple(linear.weight.shape)
            raise ValueError(f"the layer has a weight of {shape}, {linear.weight.dtype}: {reason}; keep it dense")
        return cls(gaps_of_dense(linear.weight), linear.bias)

    def _changed(self) -> None:
        """Its buffers are other tensors than before: what products read is gathered anew, and the group left."""
        parts = (self.values, self.codes, self.heads, self.rows)
        self.gaps = Gaps(*parts, shape=(self.out_features, self.in_features))
        self.fast = (self.gaps, self.bias)  # plain attributes: a buffer is found by nn.Module, slowly
        self.group, self.place = None, 0

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseLinear":
        super()._apply(fn, recurse)
        if self.values is not self.gaps.values or self.rows is not self.gaps.rows or self.bias is not self.fast[1]:
            group = self.group
            self._changed()
            if group is not None:
                group.moved()
        return self

    @property
    def weight(self) -> Tensor:
        """A dense copy of the weight, made anew each time."""
        return dense(self.gaps)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        takes_gradients = x.requires_grad and torch.is_grad_enabled()
        if self.group is not None and not takes_gradients and (y := self.group.product(self.place, x)) is not None:
            return y
        gaps, bias = self.fast
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if takes_gradients or torch.compiler.is_compiling():
            return operator(x, gaps, bias)
        return product(x, gaps, bias)

    def extra_repr(self) -> str:
        kept = int(self.rows[:, 2].sum()) / max(1, self.in_features * self.out_features)
        return f"in_features={self.in_features}, out_features={self.out_features}, entries={kept:.1%}"


def _resize_buffers(layer: SparseLinear, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Resize the buffers to the saved ones before loading; refuse indices that are out of range."""
    found = {name: state_dict[prefix + name] for name in BUFFERS if prefix + name in state_dict}
    if len(found) == len(BUFFERS):
        layer.group = None
        check_gaps(Gaps(**found, shape=(layer.out_features, layer.in_features)))
        for name, buffer in found.items():
            setattr(layer, name, torch.empty_like(buffer, dtype=getattr(layer, name).dtype, device=layer.rows.device))
        layer._changed()


class Group:
    """Layers that read the same input: the first one that is called computes the product of all.

    The others take their part of it if they are called with the very same tensor. ``join`` puts the layers' forms
    into one, of which the layers' own buffers become views. A group whose layers turn out to be called with different
    inputs computes no more, and its layers run alone.
    """

    def __init__(self, layers: Sequence[SparseLinear]) -> None:
        self.layers = list(layers)
        self.sizes = [layer.out_features for layer in self.layers]
        self.misses = 0
        self.join()

    def join(self) -> None:
        parts = [[getattr(layer.gaps, name) for layer in self.layers] for name in BUFFERS]
        values, codes, heads = (torch.cat(part) for part in parts[:3])
        tables, start = [], torch.zeros(3, dtype=torch.int32, device=values.device)
        for table in parts[3]:
            tables.append(table[:-1] + start)
            start = start + table[-1]
        shape = (sum(self.sizes), self.layers[0].in_features)
        self.gaps = Gaps(values, codes, heads, torch.cat([*tables, start[None]]), shape)
        biases = [layer.bias for layer in self.layers]
        kept = [bias for bias in biases if bias is not None]
        self.bias = None
        if kept:
            none = [torch.zeros(size, dtype=kept[0].dtype, device=values.device) for size in self.sizes]
            self.bias = torch.cat([zeros if bias is None else bias for bias, zeros in zip(biases, none, strict=True)])
        self.waiting = NOTHING  # the latest input, its version, and outputs that layers have not taken
        cuts = [
            joined.split([len(own) for own in part])
            for joined, part in zip((values, codes, heads), parts, strict=False)
        ]
        for place, (layer, *views) in enumerate(zip(self.layers, *cuts, strict=True)):
            for name, view in zip(BUFFERS, views, strict=False):
                setattr(layer, name, view)
            layer._changed()
            layer.group, layer.place = self, place

    def product(self, place: int, x: Tensor) -> Tensor | None:
        """The outputs of the layer at ``place``; None if it should compute them itself. torch.compile traces it."""
        is_traced = torch.compiler.is_compiling()
        version = None if is_traced or x.is_inference() else x._version
        known, its_version, outputs = self.waiting
        if known is x and its_version == version and place in outputs:
            y = outputs.pop(place)
            if not outputs:
                self.waiting = NOTHING
            return y
        if known is not None:  # an input that not all layers were called with
            self.waiting = NOTHING
            self.misses += 1
        if self.misses > MOST_MISSES:
            return None
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        y = operator(x, self.gaps, bias) if is_traced else product(x, self.gaps, bias)
        outputs = dict(enumerate(y.split(self.sizes, -1)))
        y = outputs.pop(place)
        self.waiting = (x, version, outputs)
        return y

    def moved(self) -> None:
        """Join again when all layers are where they went; until then those that went run alone."""
        if all(layer.group is None for layer in self.layers):
            same = {(layer.values.device, layer.values.dtype) for layer in self.layers}
            if len(same) == 1:
                self.join()


def sparsify_(
    model: nn.Module,
    *,
    vectors: int = 1,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    least: float | None = None,
) -> list[str]:
    """Replace linear layers by sparse ones, in place; names of those replaced. ``unsparsify_`` undoes it.

    A layer is taken that is faster sparse on its device in products with ``vectors`` vectors, which is the batch size
    of decoding; kinds of layers are measured once on a machine. With ``least`` nothing is measured: layers with that
    share of zeros or more are taken. A weight must be of a type that the form holds, and not tied to another. With
    ``include``, globs over names, only layers that match; those that match ``exclude`` stay. Layers that read the
    same input, as q, k and v of attention, compute as one.
    """
    if vectors < 1:
        raise ValueError(f"vectors, the batch size of decoding, must be at least 1, got {vectors}")
    weights = {name: linear_weight(layer) for name, layer in chosen(model, include, exclude).items()}
    kinds = {name: kind_of(weight) for name, weight in weights.items() if why_not(weight) is None}
    devices = {name: weights[name].device for name in kinds}
    for device in set(devices.values()):
        check_device(device)
    if least is None:
        names = [
            name
            for device in dict.fromkeys(devices.values())
            for choice in choose(
                {name: kind for name, kind in kinds.items() if devices[name] == device}, vectors, device
            )
            if choice.is_sparse
            for name in choice.names
        ]
    else:
        names = [name for name, kind in kinds.items() if kind.sparsity >= least]
    names = [name for name in kinds if name in set(names)]
    if "" in names:
        raise ValueError("the model is itself a linear layer: use SparseLinear.from_linear(model)")
    for name in names:
        replace_(model, name, gaps_of_dense(weights.pop(name)))
    group_(model, {name: kinds[name] for name in names})
    return names


def replace_(model: nn.Module, name: str, gaps: Gaps) -> None:
    """Put a sparse layer in the place of a linear one, whose weight is let go."""
    parent, _, last = name.rpartition(".")
    linear = model.get_submodule(name)
    layer = SparseLinear(gaps, getattr(linear, "bias", None)).train(linear.training)
    weight = linear.get_parameter("weight") if linear._parameters["weight"] is not None else None
    linear._parameters.update(weight=None, bias=None)
    layer.origin = (linear, weight is not None and weight.requires_grad)  # in a tuple, it is no part of the model
    setattr(model.get_submodule(parent), last, layer)


def group_(model: nn.Module, kinds: Mapping[str, WeightKind]) -> None:
    """Join sparse layers that read the same input."""
    for names in groups_of(kinds):
        layers = [layer for name in names if isinstance(layer := model.get_submodule(name), SparseLinear)]
        if len(layers) > 1 and len({layer.values.device for layer in layers}) == 1:
            Group(layers)


def unsparsify_(model: nn.Module) -> list[str]:
    """Put the linear layers back that ``sparsify_`` replaced, with their zeros, in place; their names."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SparseLinear) and layer.origin}
    for name, layer in layers.items():
        assert layer.origin is not None
        linear, requires_grad = layer.origin
        weight = layer.weight.t().contiguous() if is_conv1d(linear) else layer.weight
        linear.weight = nn.Parameter(weight, requires_grad)
        linear._parameters["bias"] = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear.train(layer.training))
    return list(layers)
