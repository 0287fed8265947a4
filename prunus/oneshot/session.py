"""The model while it is probed, and the promise that it comes back as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import bits


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and DDP: what they trace or wrap cannot be run in part."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """The model in eval mode with no parameter that asks for a gradient; then modes, flags and buffers as before."""
    modes = {module: module.training for module in model.modules()}
    asked = {parameter: parameter.requires_grad for parameter in model.parameters()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        for parameter in asked:
            parameter.requires_grad_(False)
        # the fused encoder layer of torch does not call its linear layers
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for parameter, flag in asked.items():
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules that run another forward for a while."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


@contextmanager
def swapped(values: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Parameters that hold other values for a while; their own are not touched."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in before.items():
            parameter.data = value


class Originals:
    """What weights held before they were changed, at the changed places only, bit for bit."""

    def __init__(self) -> None:
        self._saved: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    @torch.no_grad()
    def save(self, parameter: nn.Parameter, where: Tensor) -> Tensor:
        """Remember the elements of ``parameter`` at the boolean ``where``, and return them."""
        values = parameter.detach()[where]  # a copy: it never aliases the live weight
        self._saved.append((parameter, bits.pack(where), values))
        return values

    @torch.no_grad()
    def restore_(self) -> None:
        """Write everything back, the last change first."""
        while self._saved:
            parameter, packed, values = self._saved.pop()
            parameter.detach()[bits.unpack(packed, parameter.shape)] = values
