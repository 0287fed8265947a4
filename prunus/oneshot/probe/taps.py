"""Per-sample gradients of many samples in one pass, from the inputs of layers and the gradients of their outputs.

For a linear layer the gradient of one sample's loss is ``sum over t of d_t a_t^T``; a convolution is a linear
layer over the windows of its input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...eligible import is_conv1d
from ...ops.wide_products import wide_bmm
from ..forward import replaced
from ..layers import weight_of, windows

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}  # of per-sample gradients that exist at a time

Variant = Mapping[str, Tensor]  # weights used in place of the model's own, by name
LayerGradient = tuple[nn.Module, Tensor, Tensor]  # a layer, its input, and the gradient of its output


class NotRows(Exception):
    """A layer was called with an input that does not have one row per sample; the weight's name is the argument."""


@dataclass(frozen=True)
class Call:
    """One call of a tapped layer: its input, and its output in the graph."""

    name: str
    module: nn.Module
    x: Tensor
    version: int
    out: Tensor


@dataclass
class Taps:
    """Taps on layers in a pass over ``num_rows`` rows: samples, repeated for every variant, each with its weights."""

    modules: Mapping[str, Sequence[nn.Module]]
    num_rows: int
    variants: Sequence[Variant] = ({},)
    strict: bool = True
    calls: list[Call] = field(default_factory=list)
    on_call: Callable[[str], object] | None = None
    recording: bool = True  # off during the backward, which may call layers again

    @contextmanager
    def open(self) -> Iterator["Taps"]:
        """The layers run tapped while this is open."""
        forwards = {module: self._tapped(name, module) for name, modules in self.modules.items() for module in modules}
        with replaced(forwards):
            yield self

    def _tapped(self, name: str, module: nn.Module) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            (x,) = args or kwargs.values()
            ndim = weight_of(module).ndim
            ndim_fits = x.ndim == ndim if ndim > 2 else x.ndim >= 2
            if self.strict and (not ndim_fits or len(x) != self.num_rows):
                raise NotRows(name)
            if self.on_call is not None:
                self.on_call(name)
            out = self._output(name, module, x)
            # where no gradient passes through the layer, the graph begins here
            out = out if out.requires_grad else out.detach().requires_grad_()
            if self.recording:
                self.calls.append(Call(name, module, x.detach(), x._version, out))
            return out.clone()  # the model may change it in place

        return forward

    def _output(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        own = weight_of(module).detach()  # a gradient that still reaches the weight is then of another use of it
        weights = [variant[name].to(x.device) if name in variant else own for variant in self.variants]
        if all(weight is own for weight in weights):
            return _output(module, x, own)
        parts = x.chunk(len(weights))
        return torch.cat([_output(module, part, weight) for part, weight in zip(parts, weights, strict=True)])

    def gradients(self, total: Tensor) -> list[Tensor | None]:
        """Gradient of ``total`` for the output of every call; frees the graph."""
        if not self.calls:
            return []
        for call in self.calls:
            if call.x._version != call.version:
                raise NotRows(call.name)  # its input has been changed in place
        self.recording = False
        return list(torch.autograd.grad(total, [call.out for call in self.calls], allow_unused=True))

    def layers(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[str, int, list[LayerGradient]]]:
        """Name, number of the variant, and the calls of its layers, for every tapped weight that a gradient reached."""
        for name in self.modules:
            calls = [
                (call.module, call.x.chunk(len(self.variants)), d.chunk(len(self.variants)))
                for call, d in zip(self.calls, gradients, strict=True)
                if call.name == name and d is not None
            ]
            for number in range(len(self.variants) if calls else 0):
                yield name, number, [(module, x[number], d[number]) for module, x, d in calls]


def sample_gradients(calls: Sequence[LayerGradient]) -> Iterator[Tensor]:
    """Gradients (samples, *shape) of a weight, a few samples at a time; the calls of its layers add up."""
    for parts in zip(*(_of_call(module, x, d) for module, x, d in calls), strict=True):
        yield sum(parts[1:], start=parts[0])


def add_largest_(record: Tensor, module: nn.Module, x: Tensor, d: Tensor) -> bool:
    """Take the largest per-sample gradients into ``record``; False, with nothing done, where there is no kernel."""
    if isinstance(module, nn.Conv1d | nn.Conv2d) or not fuses(x) or d.dtype != x.dtype:
        return False
    largest_outer_(record, *_factors(module, x, d))
    return True


def outer(left: Tensor, right: Tensor) -> Tensor:
    """``sum over t of left_t right_t^T`` of each sample: (sample, left features, right features), float32 or better."""
    return wide_bmm(left.transpose(1, 2), right)


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
        from ...ops._triton.outer import largest_outer_ as kernel

        kernel(record, left.contiguous(), right.contiguous())
    else:
        largest_outer_reference_(record, left, right)


def _output(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """``module(x)`` with another weight."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, module.bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module._conv_forward(x, weight, module.bias)
    bias = module.bias
    assert isinstance(bias, Tensor)
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def _of_call(module: nn.Module, x: Tensor, d: Tensor) -> Iterator[Tensor]:
    """Gradients (samples, *weight.shape) of a few samples at a time, in order, in float32 or better."""
    weight = weight_of(module)
    size = max(1, ELEMENTS.get(x.device.type, 1 << 26) // max(1, weight.numel()))
    for start in range(0, len(x), size):
        here = slice(start, start + size)
        yield outer(*_factors(module, x[here], d[here])).view(-1, *weight.shape)


def _factors(module: nn.Module, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """(sample or its group, token, feature): their outer products, summed over tokens, are laid out as the weight."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        d = d.flatten(2)  # (sample, out, place)
        by_group = (len(x) * module.groups, -1, d.shape[-1])
        return d.reshape(by_group).transpose(1, 2), windows(module, x).reshape(by_group).transpose(1, 2)
    x, d = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, d))
    return (x, d) if is_conv1d(module) else (d, x)
