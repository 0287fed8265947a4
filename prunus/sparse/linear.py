"""Linear layers that keep their weight sparse in memory, and a model's layers turned into them and back."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch.compiler import is_compiling

from ..eligible import is_conv1d
from ..grids import OnGrid, grid_of, put_on_grid_, take_off_grid_
from ..ops.grid import Grid
from .choose import forms_of, groups_of
from .coded_gaps import coded_gaps_of_dense
from .coded_tiles import BITS, coded_tiles_of_dense
from .gaps import gaps_of_dense, joined_gaps
from .model_layers import check_values, chosen, linear_weight, why_not
from .product import DTYPES, CodedForm, Form, check_device, dense, form_of, operator, product
from .tiles import DTYPES as TILE_DTYPES
from .tiles import ROWS as TILE_ROWS
from .tiles import TileForm, Tiles, joined_tiles, stage_of, tiles_of_dense
from .times import CODED_FORMS, WeightKind, kind_of, scales_of_codes

MOST_MISSES = 2  # fused products that some layer had no use for, before they are given up
NOTHING: tuple[Tensor | None, int | None, Any, dict[int, Tensor]] = (None, None, None, {})


class SparseLinear(nn.Module):
    """``x W^T + bias`` with a sparse W, for inference, alone or as one of ``FusedLinears``; gradients reach x alone."""

    like: Tensor
    bias: Tensor | None
    fused: "FusedLinears | None"
    origin: "tuple[nn.Module, _Parameters] | None" = None  # the layer that it replaced, and its parameters
    is_packed = True  # its state has no weight that another layer could load

    def __init__(self, form: Form, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = form.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"the bias must have the shape ({self.out_features},), got {tuple(bias.shape)}")
        for name in form.PARTS:
            self.register_buffer(name, getattr(form, name))
        kind = torch.empty(0, dtype=form.dtype, device=form.device)
        self.register_buffer("like", kind, persistent=False)  # whose type follows a change of the model's
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_state_dict_pre_hook(_refuse_save_pretrained)
        self.register_load_state_dict_pre_hook(_resize_buffers)
        self.register_load_state_dict_post_hook(_take_buffers)
        self._set(form)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        check_values("the layer's weight", linear.weight)
        if reason := why_not(linear.weight):
            shape = tuple(linear.weight.shape)
            raise ValueError(f"the layer has a weight of {shape}, {linear.weight.dtype}: {reason}; keep it dense")
        return cls(gaps_of_dense(linear.weight), linear.bias)

    def _set(self, form: Form) -> None:
        """Take a form whose tensors are the buffers, or will be; the layer is fused no more."""
        for name in {*self._buffers} - {*form.PARTS, "like", "bias"}:  # of a form of another kind
            del self._buffers[name]
        for name in form.PARTS:
            self._buffers[name] = getattr(form, name)
        self.form = form
        self.fast = (form, self.bias)  # plain attributes: a buffer is found by nn.Module, slowly
        self.fused, self.place = None, 0

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseLinear":
        super()._apply(fn, recurse)
        self._follow()
        return self

    def _follow(self) -> None:
        """Compute with the buffers that are there now."""
        form, parts = self.form, [self.get_buffer(name) for name in self.form.PARTS]
        same = all(part is getattr(form, name) for part, name in zip(parts, form.PARTS, strict=True))
        if same and self.like.dtype == form.dtype and self.bias is self.fast[1]:
            return
        fused, is_coded = self.fused, isinstance(form, CodedForm)  # codes have values of any type
        dtype = self.like.dtype if is_coded else form.dtype
        self._set(form_of(parts, form.shape, dtype, getattr(form, "stage", 0)))
        if isinstance(form, Tiles) and self.like.dtype != form.dtype:
            weight = dense(self.form).to(self.like.dtype)
            self._set(tiles_of_dense(weight) if weight.dtype in TILE_DTYPES else gaps_of_dense(weight))
        if fused is not None:
            fused.moved()

    @property
    def weight(self) -> Tensor:
        """A dense copy of the weight, made anew each time."""
        return dense(self.form)

    def forward(self, x: Tensor) -> Tensor:
        run = operator if is_compiling() else product
        is_trained = run is product and self.training and torch.is_grad_enabled()
        if is_trained and self.origin is not None and self.origin[1].takes_gradients:
            warn_of_training()
        if (run is operator or is_any_autocast_enabled()) and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type)) if x.dtype in DTYPES else x  # as torch does
        if x.requires_grad and torch.is_grad_enabled():
            run = operator
        elif self.fused is not None and (y := self.fused.product(self.place, x, run)) is not None:
            return y
        form, bias = self.fast
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return run(x, form, bias)

    def extra_repr(self) -> str:
        size = self.form.nbytes / max(1, self.in_features * self.out_features * self.form.dtype.itemsize)
        is_coded = isinstance(self.form, CodedForm)
        kind = f"codes of {BITS} bits" if is_coded else type(self.form).__name__.lower()
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}, {size:.1%} of the bytes"


@cache  # once in a process
def warn_of_training() -> None:
    problem = "sparse layers do not train: to train the model, call unsparsify_(model), then make the optimizer"
    warnings.warn(f"{problem}; to run it, call model.eval()", stacklevel=3)


def _refuse_save_pretrained(layer: SparseLinear, prefix: str, keep_vars: bool) -> None:
    """ValueError if ``save_pretrained`` asks for the state: what it writes loads with random weights, and no error."""
    caller = sys._getframe(1)
    while caller.f_globals.get("__name__") == nn.Module.__module__ and caller.f_back is not None:
        caller = caller.f_back
    if caller.f_code.co_name == "save_pretrained":
        refuse_saving()


def refuse_saving(*_: Any, **__: Any) -> None:
    """Stands in the place of ``save_pretrained`` in models with sparse layers, since trainers give it the state."""
    problem = "the model has sparse layers, which would load with random weights: call prunus.sparse.unsparsify_(model)"
    raise ValueError(f"{problem} first, then save_pretrained or prunus.save_model")


def guard_saving_(model: nn.Module) -> None:
    """Models of transformers refuse to be saved while they have sparse layers."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            vars(module).pop("save_pretrained", None)
            if any(isinstance(layer, SparseLinear) for layer in module.modules()):
                vars(module)["save_pretrained"] = refuse_saving


@torch.inference_mode(False)  # whose tensors would pass no gradients
def _resize_buffers(layer: SparseLinear, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Resize the buffers to the saved ones before loading; refuse indices that are out of range."""
    form, device = layer.form, layer.like.device
    parts = {name: state_dict[prefix + name] for name in form.PARTS if prefix + name in state_dict}
    if len(parts) < len(form.PARTS):
        return
    starts = parts["starts"].diff() if isinstance(form, TileForm) else ()
    stage = stage_of(int(max(starts))) if len(starts) else 0
    new = form_of([*parts.values()], form.shape, form.dtype, stage)
    if type(new) is not type(form):
        wanted, got = (type(each).__name__ for each in (form, new))
        problem = f"{prefix.rstrip('.')} is stored as {wanted}, but the state has {got}"
        raise ValueError(f"{problem}; load it into a model that was sparsified in the same way")
    new.check()
    empty = [torch.empty_like(part, dtype=getattr(form, name).dtype, device=device) for name, part in parts.items()]
    layer._set(form_of(empty, form.shape, form.dtype, stage))


def _take_buffers(layer: SparseLinear, *_: Any) -> None:
    """Compute with the tensors that ``load_state_dict(..., assign=True)`` has put in place of the buffers."""
    first = layer.get_buffer(layer.form.PARTS[0])
    dtype = layer.form.dtype if isinstance(layer.form, TileForm) else first.dtype
    layer.like = torch.empty(0, dtype=dtype, device=first.device)
    layer._follow()


class FusedLinears:
    """Layers that read the same input: the first one that is called computes the product of all.

    The others take their part of it if they are called with the very same tensor, unchanged (in inference mode torch
    does not count changes). ``join`` puts the layers' forms into one, of which their own buffers become views. Layers
    that turn out to be called with different inputs run alone from then on.
    """

    def __init__(self, layers: Sequence[SparseLinear]) -> None:
        self.layers = list(layers)
        self.sizes = [layer.out_features for layer in self.layers]
        self.misses = 0
        self.join()

    def join(self) -> None:
        forms: list[Any] = [layer.form for layer in self.layers]
        self.form, views = (joined_tiles if isinstance(forms[0], TileForm) else joined_gaps)(forms)
        first = next((layer.bias for layer in self.layers if layer.bias is not None), None)
        self.bias = None
        if first is not None:
            biases = [
                first.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in self.layers
            ]
            self.bias = torch.cat(biases)
        self.waiting = NOTHING  # the latest input, its version, what ran, and outputs that layers have not taken
        for place, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            layer._set(view)
            layer.fused, layer.place = self, place

    def product(self, place: int, x: Tensor, run: Callable[..., Tensor]) -> Tensor | None:
        """The outputs of the layer at ``place``; None if it should compute them itself. torch.compile traces it."""
        known, version, its_run, outputs = self.waiting
        if known is x and its_run is run and (version is None or version == x._version) and place in outputs:
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
        outputs = dict(enumerate(run(x, self.form, bias).unsafe_split_with_sizes(self.sizes, -1)))
        y = outputs.pop(place)
        self.waiting = (x, None if run is operator or x.is_inference() else x._version, run, outputs)
        return y

    def moved(self) -> None:
        """Join again when all layers are where they went; until then those that went run alone."""
        if all(layer.fused is None for layer in self.layers) and can_join(self.layers):
            self.join()


@torch.inference_mode(False)  # layers that are made in it would pass no gradients after it
@torch.no_grad()
def sparsify_(
    model: nn.Module,
    *,
    vectors: int = 1,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    least: float | None = None,
) -> list[str]:
    """Replace linear layers by sparse ones in place, and return their names; ``unsparsify_`` undoes it.

    It replaces the layers that run faster sparse on their device with ``vectors`` vectors at a time, which is the batch
    size of decoding; each kind of layer is measured once per machine. With ``least`` nothing is measured: layers with
    at least that share of zeros are replaced. A weight must have a supported dtype and not be tied to another. One on a
    4-bit grid keeps its codes on GPUs of compute capability 9.0 or newer, if that is fastest or ``least`` is given; the
    others keep their values. Globs over names: ``only`` restricts the layers, and ``exclude`` leaves some out. Layers
    that read the same input, such as q, k and v of attention, compute as one.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"sparsify_ takes a model, got {type(model).__name__}; load_model reads one from a folder")
    if not isinstance(vectors, int) or vectors < 1:
        raise ValueError(f"vectors, the batch size of decoding, must be a whole number of at least 1, got {vectors!r}")
    if least is not None and not 0 <= least <= 1:
        raise ValueError(f"least must be a share of zeros in [0, 1], such as 0.5, got {least}")
    weights = {name: linear_weight(layer) for name, layer in chosen(model, only, exclude).items()}
    for name, weight in weights.items():
        check_values(f"{name}.weight", weight)
    scales = {name: scales_of_codes(weight, grid_of(model.get_submodule(name))) for name, weight in weights.items()}
    kinds = {name: kind_of(weight, scales[name]) for name, weight in weights.items() if why_not(weight) is None}
    forms: dict[str, str] = {}
    for device in dict.fromkeys(weights[name].device for name in kinds):
        check_device(device)
        here = {name: kind for name, kind in kinds.items() if weights[name].device == device}
        forms |= forms_of(here, vectors, device, least)
    if "" in forms:
        raise ValueError("the model is itself a linear layer: use SparseLinear.from_linear(model)")
    names = [name for name in kinds if name in forms]
    for name in names:
        replace_(model, name, form_in(forms[name], weights.pop(name), scales[name]))
    group_(model, {name: kinds[name] for name in names})
    return names


def form_in(way: str, weight: Tensor, scales: Tensor | None = None) -> Form:
    """A weight (out, in) in the form of this name; one of codes needs its scales."""
    if way in CODED_FORMS:
        assert scales is not None
        return (coded_tiles_of_dense if way == "coded" else coded_gaps_of_dense)(weight, scales)
    return tiles_of_dense(weight) if way == "tiles" else gaps_of_dense(weight)


def replace_(model: nn.Module, name: str, form: Form) -> None:
    """Put a sparse layer in the place of a linear one, whose weight is let go, and its scales if the form has them."""
    linear = model.get_submodule(name)
    layer = SparseLinear(form, getattr(linear, "bias", None)).train(linear.training)
    layer.origin = (linear, _Parameters(linear))  # in a tuple, it is no part of the model
    linear._parameters.update(weight=None, bias=None)
    if isinstance(form, CodedForm):
        take_off_grid_(linear, "weight")
    model.set_submodule(name, layer)


class _Parameters:
    """A linear layer's parameters, not kept alive: who else holds one, as an optimizer, finds it in the model again."""

    def __init__(self, linear: nn.Module) -> None:
        weight = linear._parameters["weight"]
        self.takes_gradients = weight is None or weight.requires_grad  # one that was never loaded dense is None
        self.held = {name: ref(value) for name, value in linear._parameters.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layer, as by pickle, has parameters of its own."""
        return {"takes_gradients": self.takes_gradients, "held": {}}

    @torch.no_grad()
    def again(self, name: str, value: Tensor) -> nn.Parameter:
        """A parameter of this value: the old one where it is still held and of this type and place."""
        held = self.held[name]() if name in self.held else None
        if held is None or (held.shape, held.dtype, held.device) != (value.shape, value.dtype, value.device):
            return nn.Parameter(value, self.takes_gradients)
        held.data = value
        return held


def group_(model: nn.Module, kinds: Mapping[str, WeightKind]) -> None:
    """Join sparse layers that read the same input; the model is saved no more as one of dense layers."""
    for names in groups_of(kinds):
        layers = [layer for name in names if isinstance(layer := model.get_submodule(name), SparseLinear)]
        if len(layers) > 1 and can_join(layers):
            FusedLinears(layers)
    guard_saving_(model)


def can_join(layers: Sequence[SparseLinear]) -> bool:
    """Whether the layers have one form, type and place, and tiles end where a layer does."""
    same = {(type(layer.form), layer.form.dtype, layer.like.device) for layer in layers}
    is_tiled = isinstance(layers[0].form, TileForm)
    return len(same) == 1 and not (is_tiled and any(layer.out_features % TILE_ROWS for layer in layers))


@torch.inference_mode(False)  # parameters that are made in it could not be trained
@torch.no_grad()
def unsparsify_(model: nn.Module) -> list[str]:
    """Put back the linear layers that ``sparsify_`` replaced, with their zeros and grids, and return their names."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SparseLinear) and layer.origin}
    for name, layer in layers.items():
        assert layer.origin is not None
        linear, parameters = layer.origin
        linear.weight = parameters.again("weight", layer.weight.t().contiguous() if is_conv1d(linear) else layer.weight)
        on_grid = grid_of(linear)
        if isinstance(layer.form, CodedForm):
            on_grid = OnGrid(Grid(BITS, outputs=(1,) if is_conv1d(linear) else (0,)), layer.form.scales())
        if on_grid is not None:
            put_on_grid_(linear, "weight", on_grid)
        linear._parameters["bias"] = None if layer.bias is None else parameters.again("bias", layer.bias)
        model.set_submodule(name, linear.train(layer.training))
    guard_saving_(model)
    return list(layers)
