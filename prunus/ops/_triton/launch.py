"""Launches that cost the host little.

Triton finds out at every call which compiled form of a kernel the arguments ask for, in tens of
microseconds. An event or a step launches a handful of kernels with the same kinds of arguments again
and again, so the form is remembered here by these kinds, and tensors are handed over as addresses.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[Hashable, tuple[Any, tuple, int]] = {}


@dataclass(slots=True, eq=False)
class At:
    """The part of a buffer from an address on, multiple of 16, without the cost of a view."""

    address: int
    buffer: Tensor
    dtype: torch.dtype

    def view(self) -> Tensor:
        first = self.address - self.buffer.data_ptr()
        rest = self.buffer.view(torch.uint8)[first:]
        return rest[: len(rest) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]) -> None:
    """Run ``kernel`` on the device of ``args[0]``; ``constants`` are its constexpr arguments and options."""
    kinds: list[Hashable] = list(constants.values())
    for arg in args:  # a compiled form depends on a tensor's type and alignment, and on whether an integer is 1 or even
        if isinstance(arg, Tensor):
            kinds.append((arg.dtype, arg.data_ptr() % 16 == 0))
        else:
            kinds.append((arg == 1, arg % 16 == 0, abs(arg) < 1 << 31) if isinstance(arg, int) else None)
    launch_as((args[0].device, *kinds), kernel, grid, args, constants)


def launch_as(kind: Hashable, kernel: Any, grid: tuple[int, ...], args: Sequence, constants: dict[str, Any]) -> Any:
    """``launch`` of a kernel whose compiled form is settled by ``kind``, a hash of which includes the device.

    What is remembered: the compiled form, its last arguments and the number of the device; None in the interpreter.
    """
    known = _COMPILED.get((id(kernel), kind))
    if known is None:
        _compile((id(kernel), kind), kernel, grid, args, constants)
        return _COMPILED.get((id(kernel), kind))
    values = [arg.address if type(arg) is At else arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    compiled, tail, index = known
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            compiled[(*grid, 1, 1)[:3]](*values, *tail)
    else:
        compiled[(*grid, 1, 1)[:3]](*values, *tail)
    return known


def _compile(key: Hashable, kernel: Any, grid: tuple[int, ...], args: Sequence, constants: dict[str, Any]) -> None:
    """The first launch, by Triton's own door."""
    plain = [arg.view() if type(arg) is At else arg for arg in args]
    device = next(arg.device for arg in plain if isinstance(arg, Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        compiled = kernel[grid](*plain, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        tail = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _COMPILED[key] = compiled, tail, device.index
