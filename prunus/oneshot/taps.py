"""Taps on layers: their inputs and the gradients of their outputs, in a pass where each part of the batch may see
another weight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .kinds import output, sample_gradients, weight_of
from .session import replaced

Variant = Mapping[str, Tensor]  # weights that stand in for the model's own, by name
Reached = tuple[nn.Module, Tensor, Tensor]  # a layer, its input, and the gradient of its output


class NotRows(Exception):
    """A layer was called with something that has no row a sample; its name is the argument."""


@dataclass(frozen=True)
class Call:
    """One call of a tapped layer: its input, and its output, of which the graph of the pass knows."""

    name: str
    module: nn.Module
    x: Tensor
    version: int
    out: Tensor


@dataclass
class Taps:
    """Tapped layers of one pass over ``num_rows`` rows, which are the samples once for every variant."""

    modules: Mapping[str, Sequence[nn.Module]]
    num_rows: int
    variants: Sequence[Variant] = ({},)
    strict: bool = True
    calls: list[Call] = field(default_factory=list)
    on_call: Callable[[str], None] | None = None
    recording: bool = True  # no more once the backward runs, which may call layers again

    @contextmanager
    def open(self) -> Iterator["Taps"]:
        """The layers run tapped while this is open."""
        forwards = {module: self._tapped(name, module) for name, modules in self.modules.items() for module in modules}
        with replaced(forwards):
            yield self

    def _tapped(self, name: str, module: nn.Module) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            (x,) = args or kwargs.values()
            if self.strict:
                self._check(name, module, x)
            if self.on_call is not None:
                self.on_call(name)
            out = self._output(name, module, x)
            # without a gradient that passes through it, the graph of the pass begins here
            out = out if out.requires_grad else out.detach().requires_grad_()
            if self.recording:
                self.calls.append(Call(name, module, x.detach(), x._version, out))
            return out.clone()  # which the model may change in place

        return forward

    def _check(self, name: str, module: nn.Module, x: Tensor) -> None:
        ndim = weight_of(module).ndim
        ndim_fits = x.ndim == ndim if ndim > 2 else x.ndim >= 2
        if not ndim_fits or len(x) != self.num_rows:
            raise NotRows(name)

    def _output(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        own = weight_of(module).detach()  # so that a gradient which still reaches the weight is that of another use
        weights = [variant[name].to(x.device) if name in variant else own for variant in self.variants]
        if all(weight is own for weight in weights):
            return output(module, x, own)
        parts = x.chunk(len(weights))
        return torch.cat([output(module, part, weight) for part, weight in zip(parts, weights, strict=True)])

    def gradients(self, total: Tensor) -> list[Tensor | None]:
        """Gradient of ``total`` for the output of every call; frees the graph."""
        if not self.calls:
            return []
        for call in self.calls:
            if call.x._version != call.version:
                raise NotRows(call.name)  # its input was changed in place since
        self.recording = False
        return list(torch.autograd.grad(total, [call.out for call in self.calls], allow_unused=True))

    def layers(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[str, int, list[Reached]]]:
        """Name, number of the variant, and what its calls have shown, of every tapped weight a gradient reached."""
        for name in self.modules:
            found = [
                (call.module, call.x.chunk(len(self.variants)), d.chunk(len(self.variants)))
                for call, d in zip(self.calls, gradients, strict=True)
                if call.name == name and d is not None
            ]
            for number in range(len(self.variants) if found else 0):
                yield name, number, [(module, x[number], d[number]) for module, x, d in found]


def per_sample(reached: Sequence[Reached]) -> Iterator[Tensor]:
    """Gradients (samples, *shape) of a weight, a few samples at a time; the calls of its layer add up."""
    streams = [sample_gradients(module, x, d) for module, x, d in reached]
    for parts in zip(*streams, strict=True):
        yield sum(parts[1:], start=parts[0])
