"""How many multiplications a model takes for a sample: those of its convolutions and linear layers."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from prunus.eligible import CONVOLUTIONS, TRANSPOSED, is_conv1d
from prunus.oneshot.forward import frozen, outputs


@torch.no_grad()
def multiplications(model: nn.Module, sample: Any) -> int:
    """Multiplications of layers that are called as modules, for a batch of one sample; biases, norms, attention aside.

    A convolution multiplies its whole kernel at each place of its output, beyond the edges of the image too.
    """
    total = 0

    def count(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        if isinstance(module, TRANSPOSED):  # (in, out / groups, kernel), all of it at each place of the input
            total += args[0].numel() * weight[0].numel()
        else:
            total += output.numel() * (len(weight) if is_conv1d(module) else weight[0].numel())

    with ExitStack() as stack:
        stack.enter_context(frozen(model))
        for module in model.modules():
            if isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_conv1d(module):
                stack.callback(module.register_forward_hook(count).remove)
        outputs(model, sample)
    return total
