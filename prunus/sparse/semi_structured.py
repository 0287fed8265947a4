"""2:4 models on NVIDIA GPUs: weights as PyTorch's semi-structured tensors, whose products cuSPARSELt computes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .model_layers import check_values, chosen

DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability of the first GPUs with sparse matrix units
MULTIPLES = (32, 64)  # of which a weight (out, in) must be, in 16 bits


def is_two_of_four(weight: Tensor) -> bool:
    """Whether of every four neighbouring inputs of an output at most two are not zero."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return not bool((weight.detach().reshape(-1, 4).count_nonzero(1) > 2).any())


def semi_structured_(
    model: nn.Module, *, only: str | Sequence[str] = (), exclude: str | Sequence[str] = ()
) -> list[str]:
    """Turn the weights of 2:4 linear layers into semi-structured tensors in place, and return the layers' names.

    It takes layers with at least half of their weights zero; globs over names: ``only`` restricts them, ``exclude``
    leaves some out. If one cannot be converted, for example because it is not 2:4, a ValueError names it and the model
    is unchanged. Run the model under CUDA graphs: otherwise cuSPARSELt plans every product again, which takes about
    half a millisecond and pays only for large products.
    """
    layers = {name: layer for name, layer in chosen(model, only, exclude).items() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        check_values(f"{name}.weight", layer.weight)
    layers = {name: each for name, each in layers.items() if 2 * each.weight.count_nonzero() <= each.weight.numel()}
    if not layers:
        which = " that only and exclude leave" if only or exclude else ""
        raise ValueError(f"no linear layer{which} is at least half zeros: prune to 2:4 first, with NofM(2, 4)")
    for name, layer in layers.items():
        if reason := why_not(layer.weight):
            raise ValueError(f"{name}.weight {reason}; exclude the layer, or prune it with NofM(2, 4)")
    device = next(iter(layers.values())).weight.device
    if not can_run(device):
        problem = "semi-structured tensors need an NVIDIA GPU of compute capability 8.0 or newer"
        raise ValueError(f'{problem}, but the model is on {device}; move it with model.to("cuda") first')
    for layer in layers.values():
        layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
    return list(layers)


def why_not(weight: Tensor) -> str | None:
    """What keeps a weight from being a semi-structured tensor; None if nothing does."""
    if weight.dtype not in DTYPES:
        return f"is {str(weight.dtype).removeprefix('torch.')}, not bfloat16 or float16"
    if any(size % multiple for size, multiple in zip(weight.shape, MULTIPLES, strict=True)):
        return f"is {weight.shape[0]} x {weight.shape[1]}, not a multiple of {MULTIPLES[0]} x {MULTIPLES[1]}"
    if not is_two_of_four(weight):
        return "is not 2:4: some four neighbouring inputs keep more than two"
    return None


def can_run(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST
