"""Launches that cost the host little.

Triton finds out at every call which compiled form of a kernel the arguments ask for, in tens of
microseconds. An event or a step launches a handful of kernels with the same kinds of arguments again
and again, so the form is remembered here by these kinds, and tensors are handed over as addresses.
"""

from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]) -> None:
    """Run ``kernel`` on the device of ``args[0]``; ``constants`` are its constexpr arguments and options."""
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants)
    kinds, values = [id(kernel), device, *constants.values()], []
    for arg in args:  # a compiled form depends on a tensor's type and alignment, and on whether an integer is 1 or even
        if isinstance(arg, Tensor):
            value = arg.data_ptr()
            kinds.append((arg.dtype, value % 16 == 0))
        else:
            value = arg
            kinds.append((arg == 1, arg % 16 == 0, abs(arg) < 1 << 31) if isinstance(arg, int) else None)
        values.append(value)
    key = tuple(kinds)
    if key in _COMPILED:
        compiled, tail = _COMPILED[key]
        compiled[(*grid, 1, 1)[:3]](*values, *tail)
        return None
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
    return None
