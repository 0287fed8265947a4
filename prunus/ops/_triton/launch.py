"""Launches that cost the host little.

Triton finds out at every call which compiled form of a kernel the arguments ask for, in tens of
microseconds. An event or a step launches a handful of kernels with the same kinds of arguments again
and again, so the form is remembered here by these kinds.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]) -> None:
    """Run ``kernel`` on the device of ``args[0]``; ``constants`` are its constexpr arguments and options."""
    device = args[0].device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        key = (id(kernel), device, *map(_kind, args), *constants.values())
        if key in _COMPILED:
            compiled, tail = _COMPILED[key]
            compiled[(*grid, 1, 1)[:3]](*args, *tail)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _kind(arg: Tensor | int | float) -> object:
    """What a compiled form may depend on: a tensor's type and alignment; whether an integer is 1, large, or even."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, -(1 << 31) <= arg < 1 << 31
    return float
