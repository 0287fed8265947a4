"""Linear layers and convolutions as matrices: weights (out, in), and the inputs (..., in) that they multiply."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..eligible import Weight, is_conv1d, is_linear

FORWARDS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward)


def is_plain(module: nn.Module) -> bool:
    """Whether the module computes what a linear layer does, or a convolution over one or two dimensions."""
    if "forward" in vars(module):
        return False
    return type(module).forward in FORWARDS or is_conv1d(module) or is_linear(module)


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def holders(model: nn.Module, weights: Sequence[Weight]) -> dict[str, list[nn.Module]]:
    """Modules that hold each weight, by name; none if one of them is not a plain layer."""
    names = {weight.parameter: weight.name for weight in weights}
    found: dict[str, list[nn.Module]] = {name: [] for name in names.values()}
    doubtful = set()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if (name := names.get(parameter)) is not None:
                found[name].append(module)
                if key != "weight" or not is_plain(module):
                    doubtful.add(name)
    return {name: [] if name in doubtful else modules for name, modules in found.items()}


def windows(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What each place of the output reads: (sample, in * kernel, place)."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    if isinstance(conv, nn.Conv1d):
        x, kernel, stride, dilation = x.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(x, kernel, dilation=dilation, stride=stride)


def num_groups(module: nn.Module) -> int:
    """Into how many matrices, each with inputs of its own, the weight falls."""
    return module.groups if isinstance(module, nn.Conv1d | nn.Conv2d) else 1


def input_rows(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What the weight multiplies, (..., in) for each group of the module."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return [x]
    if x.ndim < module.weight.ndim:
        x = x.unsqueeze(0)
    return [part.transpose(1, 2) for part in windows(module, x).chunk(module.groups, dim=1)]


def geometry(module: nn.Module) -> object:
    """What two layers must share, beside their input, to read the same rows of it."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return "linear"
