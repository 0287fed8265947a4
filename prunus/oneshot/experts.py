"""Experts whose weights are stacked in one tensor, (expert, out, in) or (expert, in, out): what each reads in a pass.

A stacked weight is found in the products that read a slice of it, so nothing rests on names of modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..eligible import Weight
from ..input_statistics import PRODUCTS


def is_stacked(weight: Weight) -> bool:
    return weight.parameter.ndim == 3 and weight.outputs in ((0, 1), (0, 2))


class ExpertInputs(TorchFunctionMode):
    """Collects (expert, input) of products with a stacked weight; ``mask`` is for experts that compute at once."""

    def __init__(self, parameter: nn.Parameter, mask: Tensor | None = None) -> None:
        super().__init__()
        self.parameter, self.mask = parameter, mask
        self.found: list[tuple[int, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor):
            x, weight = args[:2]
            same = weight.untyped_storage().data_ptr() == self.parameter.untyped_storage().data_ptr()
            if same and weight.shape == self.parameter.shape[1:]:
                first = weight.storage_offset() - self.parameter.storage_offset()
                self.found.append((first // self.parameter.stride(0), x.detach().clone()))
            elif same and weight.shape == self.parameter.shape and x.ndim == 3:  # (expert, token, in)
                counts = 1
                if self.mask is not None and self.mask.numel() == x.shape[1]:
                    counts = self.mask.reshape(-1, 1).to(x.dtype)
                self.found += [(i, rows * counts) for i, rows in enumerate(x.detach())]
        return func(*args, **(kwargs or {}))


@contextmanager
def routed(module: nn.Module, calls: list[tuple[Any, ...]], replay: bool, mask: Tensor | None) -> Iterator[None]:
    """Note in ``calls`` which tokens go to which expert, or send them there again; those that do not count are zero."""
    number = 0

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal number
        x, *rest = (*args, *kwargs.values())
        if mask is not None and mask.numel() == x.shape[:-1].numel():
            x = x * mask.view(*x.shape[:-1], 1).to(x.dtype)
        if not replay:
            calls.append(tuple(rest))
        rest = calls[number]
        number += 1
        values = (x, *rest)
        return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield
