"""Layers as matrices: weights (out, in), and the inputs (..., in) that they multiply."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..eligible import CONVOLUTIONS, TRANSPOSED, Weight, is_conv1d, is_linear
from ..input_statistics import output_projections_seen_by

PLAIN = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward)
OTHER = (nn.Conv3d.forward, *(kind.forward for kind in TRANSPOSED))
OUTPUT = "out_proj.weight"
ARGUMENTS = ("query", "key", "value")
# weights of an attention, and the arguments that they multiply; the output projection has as many rows as the query
PROJECTIONS = {
    "in_proj_weight": ARGUMENTS,
    "q_proj_weight": ARGUMENTS[:1],
    "k_proj_weight": ARGUMENTS[1:2],
    "v_proj_weight": ARGUMENTS[2:],
    OUTPUT: ARGUMENTS[:1],
}
Inputs = tuple[Tensor, ...]  # of one call: one tensor, or query, key and value where these differ


def is_plain(module: nn.Module) -> bool:
    """Whether the module computes what a linear layer does, or a convolution over one or two dimensions."""
    if "forward" in vars(module):
        return False
    return type(module).forward in PLAIN or is_conv1d(module) or is_linear(module)


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def holders(model: nn.Module, weights: Sequence[Weight]) -> dict[str, list[nn.Module]]:
    """Modules that hold each weight, by name; none if one of them is not a plain layer."""
    return {
        name: [module for module, _ in held] if all(key == "weight" and is_plain(m) for m, key in held) else []
        for name, held in _held(model, weights).items()
    }


def _held(model: nn.Module, weights: Sequence[Weight]) -> dict[str, list[tuple[nn.Module, str]]]:
    names = {weight.parameter: weight.name for weight in weights}
    held: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in names:
                held[names[parameter]].append((module, key))
    return held


@dataclass(frozen=True)
class Reader:
    """A module that multiplies what it reads by its weight ``key``."""

    module: nn.Module
    key: str = "weight"

    @property
    def is_attention(self) -> bool:
        return type(self.module).forward is nn.MultiheadAttention.forward and self.key in PROJECTIONS

    @property
    def is_known(self) -> bool:
        """Whether it follows from the arguments of the module what the weight multiplies."""
        if "forward" in vars(self.module):
            return False
        is_layer = is_plain(self.module) or type(self.module).forward in OTHER
        return self.is_attention or (is_layer and self.key == "weight")

    @property
    def reads_tokens(self) -> bool:
        """Whether it multiplies the last dimension of what it is called with, whatever the others are."""
        return not (self.is_attention or isinstance(self.module, (*CONVOLUTIONS, *TRANSPOSED)))

    @property
    def num_groups(self) -> int:
        """Into how many matrices, each with inputs of its own, the weight falls."""
        return self.module.groups if isinstance(self.module, (*CONVOLUTIONS, *TRANSPOSED)) else 1

    @property
    def geometry(self) -> object:
        """What two layers must share, beside their inputs, to read the same rows of them."""
        conv = self.module
        if isinstance(conv, (*CONVOLUTIONS, *TRANSPOSED)):
            return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
        return "linear" if self.is_known else self

    @contextmanager
    def seen_by(self, see: Callable[["Reader", Inputs], None]) -> Iterator[None]:
        """Show a function what the weight multiplies, call by call."""
        num_samples = 1

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal num_samples
            inputs = self._inputs(args, kwargs)
            if self.key == OUTPUT:
                num_samples = len(inputs[0]) if inputs[0].ndim == 3 else 1
            else:
                see(self, inputs)

        def multiplied(attention: nn.Module, x: Tensor) -> None:
            if attention is self.module:  # x has tokens before samples
                see(self, (x.unflatten(0, (-1, num_samples)).transpose(0, 1),))

        with ExitStack() as stack:
            stack.enter_context(self.module.register_forward_pre_hook(before, with_kwargs=True))
            if self.key == OUTPUT:
                stack.enter_context(output_projections_seen_by(multiplied))
            yield

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        module = self.module
        if isinstance(module, TRANSPOSED):
            return (_spread(module, **dict(zip(("input", "output_size"), args, strict=False)), **kwargs),)
        if not self.is_attention:
            return (next(iter(args or kwargs.values())).detach(),)
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        inputs = [given[name] for name in PROJECTIONS[self.key]]
        different = inputs if any(x is not inputs[0] for x in inputs) else inputs[:1]
        return tuple(x.detach() if module.batch_first or x.ndim < 3 else x.detach().transpose(0, 1) for x in different)

    def rows(self, x: Tensor) -> list[Tensor]:
        """What the weight multiplies, (..., in) for each group of the module."""
        if not isinstance(self.module, (*CONVOLUTIONS, *TRANSPOSED)):
            return [x]
        if x.ndim < self.module.weight.ndim:
            x = x.unsqueeze(0)
        return [part.transpose(1, 2) for part in windows(self.module, x).chunk(self.num_groups, dim=1)]


def readers(model: nn.Module, weights: Sequence[Weight]) -> dict[str, list[Reader]]:
    """What reads each weight, by name, of weights whose readers are all of a kind that is known."""
    # attention multiplies by the weight of its output projection, whose forward it does not call
    attentions = {m.out_proj: m for m in model.modules() if type(m).forward is nn.MultiheadAttention.forward}
    by_name: dict[str, list[Reader]] = {}
    for name, held in _held(model, weights).items():
        reading = [Reader(attentions[m], OUTPUT) if m in attentions else Reader(m, key) for m, key in held]
        if reading and all(reader.is_known for reader in reading):
            by_name[name] = reading
    return by_name


def matrix_layout(weight: Weight) -> tuple[Sequence[int], tuple[int, ...]]:
    """Shape of a weight with the groups of a transposed convolution apart, and the dimensions that count outputs."""
    shape = weight.parameter.shape
    if isinstance(weight.module, TRANSPOSED) and weight.module.groups > 1:
        return (weight.module.groups, -1, *shape[1:]), (0, 2)
    return shape, weight.outputs or ()


def windows(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """What each place of the output reads: (sample, in * kernel, place)."""
    stride, num_dims = conv.stride, len(conv.kernel_size)
    if conv.transposed:  # ``_spread`` has made x the input of a plain convolution
        stride = (1,) * num_dims
    else:
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    for dim, (kernel, step, dilation) in enumerate(zip(conv.kernel_size, stride, conv.dilation, strict=True), 2):
        x = x.unfold(dim, dilation * (kernel - 1) + 1, step)[..., ::dilation]
    places = list(range(2, 2 + num_dims))
    return x.movedim(places, [dim - 2 - num_dims for dim in places]).flatten(2 + num_dims).flatten(1, 1 + num_dims)


def _spread(conv: nn.modules.conv._ConvTransposeNd, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
    """The input, with zeros in and around it, of a plain convolution with the same outputs in reverse order."""
    num_dims, x = len(conv.kernel_size), input.detach()
    how = conv.stride, conv.padding, conv.kernel_size
    more = conv._output_padding(x, output_size, *how, num_dims, conv.dilation)  # pyrefly: ignore[bad-argument-type]
    x = x if x.ndim == conv.weight.ndim else x.unsqueeze(0)
    sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[2:], conv.stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[(..., *(slice(None, None, stride) for stride in conv.stride))] = x
    pads: list[int] = []
    for kernel, dilation, padding, extra in zip(conv.kernel_size, conv.dilation, conv.padding, more, strict=True):
        reach = dilation * (kernel - 1) - int(padding)
        pads = [reach + extra, reach, *pads]  # the last dimension comes first
    return F.pad(spread.flip(list(range(2, x.ndim))), pads)
