"""Layers whose per-sample gradients can be rebuilt from their input and the gradient of their output.

For a linear layer the gradient of one sample's loss is ``sum over t of d_t a_t^T``; a convolution is a linear
layer over the windows of its input.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..eligible import is_conv1d
from ..ops.outer import fuses, largest_outer_, outer

FORWARDS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward)
ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}  # of per-sample gradients that are held at a time


def rebuildable(module: nn.Module) -> bool:
    """Whether the module runs the plain forward of a linear layer or a convolution over one or two dimensions."""
    if "forward" in vars(module):
        return False
    return type(module).forward in FORWARDS or is_conv1d(module)


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def output(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What ``module(x)`` would be with another weight."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, module.bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module._conv_forward(x, weight, module.bias)
    bias = module.bias
    assert isinstance(bias, Tensor)
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def sample_gradients(module: nn.Module, x: Tensor, d: Tensor) -> Iterator[Tensor]:
    """Gradients (samples, *weight.shape) of a few samples at a time, in order, in float32 or better.

    ``x`` and ``d`` are the input and the gradient of the output, with a sample in each row.
    """
    weight = weight_of(module)
    size = max(1, ELEMENTS.get(x.device.type, 1 << 26) // max(1, weight.numel()))
    for start in range(0, len(x), size):
        here, back = x[start : start + size], d[start : start + size]
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            yield _of_convolution(module, here, back).view(-1, *weight.shape)
        else:
            yield outer(*_factors(module, here, back))


def add_largest_(record: Tensor, module: nn.Module, x: Tensor, d: Tensor) -> bool:
    """Take the largest per-sample gradients into ``record``; False, with nothing done, where no kernel fuses that."""
    if isinstance(module, nn.Conv1d | nn.Conv2d) or not fuses(x) or d.dtype != x.dtype:
        return False
    largest_outer_(record, *_factors(module, x, d))
    return True


def _factors(module: nn.Module, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The two whose outer products, summed over tokens, are the gradients of the weight as it is laid out."""
    return (_tokens(x), _tokens(d)) if is_conv1d(module) else (_tokens(d), _tokens(x))


def _tokens(x: Tensor) -> Tensor:
    """(sample, token, feature)"""
    return x.reshape(len(x), -1, x.shape[-1])


def _of_convolution(conv: nn.Conv1d | nn.Conv2d, x: Tensor, d: Tensor) -> Tensor:
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    if isinstance(conv, nn.Conv1d):
        x, kernel, stride, dilation = x.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    windows = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (sample, in * kernel, place)
    back = d.flatten(2)  # (sample, out, place)
    by_group = (len(x) * conv.groups, -1, back.shape[-1])
    return outer(back.reshape(by_group).transpose(1, 2), windows.reshape(by_group).transpose(1, 2))
