"""Input norms: how large every input feature of each weight is over the calibration samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import CONVOLUTIONS, Weight
from ..stats import input_squares
from .memory import is_out_of_memory
from .objective import mask_of, outputs
from .samples import Chunk, Samples, moved

Sums = dict[str, Tensor]
SIZE = {"cpu": 4, "cuda": 32}  # samples a pass: more would be no faster
ROWS = 1024  # that are summed one by one; more are tokens of no known sample


@torch.no_grad()
def input_norms(model: nn.Module, weights: Sequence[Weight], samples: Samples) -> tuple[dict[str, Tensor], int]:
    """L2 norm of every input feature over all tokens that the attention masks admit, and the forward passes it took.

    A norm broadcasts to its weight. Samples are batched where that does not change what the layers see.
    """
    device = weights[0].parameter.device
    size = SIZE.get(device.type, 4) if _mixes_nothing(model, weights, samples) else 1
    sums: Sums = {}
    pending = list(samples.chunks(size))
    while pending:
        chunk = pending.pop(0)
        found = _tried(model, weights, samples, chunk)
        if found is None:
            middle = (chunk.start + chunk.stop + 1) // 2
            pending[:0] = [Chunk(chunk.group, chunk.start, middle), Chunk(chunk.group, middle, chunk.stop)]
            continue
        for name, squares in found.items():
            sums[name] = sums[name].add_(squares) if name in sums else squares
    for weight in weights:
        if weight.name not in sums:
            raise ValueError(
                f"the score reads input norms, but no sample reached {weight.name}: its module was not called; "
                "exclude it, give samples that use it, or take magnitude"
            )
    return {name: squares.sqrt().to(torch.float32) for name, squares in sums.items()}, len(samples)


def _tried(model: nn.Module, weights: Sequence[Weight], samples: Samples, chunk: Chunk) -> Sums | None:
    """Sums of squares over one chunk; None where memory was not enough for more than one sample."""
    try:
        return _squares(model, weights, samples, chunk)
    except Exception as error:
        if not is_out_of_memory(error) or chunk.size == 1:
            raise
    return None


def _squares(model: nn.Module, weights: Sequence[Weight], samples: Samples, chunk: Chunk) -> Sums:
    tree = moved(samples.tree(chunk), weights[0].parameter.device)
    sums: Sums = {}
    with _listening(weights, sums, mask_of(tree)):
        outputs(model, tree)
    return sums


def _mixes_nothing(model: nn.Module, weights: Sequence[Weight], samples: Samples) -> bool:
    """Whether two samples together give the sums that they give one by one."""
    number = next((i for i, group in enumerate(samples.groups) if group.size > 1), None)
    if number is None:
        return False
    parts = [_squares(model, weights, samples, Chunk(number, i, i + 1)) for i in (0, 1)]
    together = _squares(model, weights, samples, Chunk(number, 0, 2))
    for name, squares in together.items():
        alone = sum(part[name] for part in parts if name in part)
        if not isinstance(alone, Tensor) or not bool((squares - alone).abs().max() <= 0.01 * alone.abs().max()):
            return False
    return True


@contextmanager
def _listening(weights: Sequence[Weight], sums: Sums, mask: Tensor | None) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            (x,) = args or kwargs.values()
            for part in _parts(module, x.detach(), mask):
                squares = input_squares(module, part).double()
                sums[name] = sums[name].add_(squares) if name in sums else squares

        return add

    handles = [w.module.register_forward_pre_hook(hook(w.name), with_kwargs=True) for w in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(module: nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The input sample by sample, so that the sums do not depend on the size of a batch; without what is masked."""
    if isinstance(module, CONVOLUTIONS):
        return list(x) if x.ndim == len(module.weight.shape) else [x]
    if x.ndim < 3:
        return list(x) if x.ndim == 2 and len(x) <= ROWS else [x]
    if mask is None or mask.shape != x.shape[:2]:
        return list(x)
    return [one[admitted.bool()] for one, admitted in zip(x, mask, strict=True)]
