"""Input norms: how large every input feature of each weight is, collected while a model runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks_with_kwargs, register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from .eligible import CONVOLUTIONS, TRANSPOSED, Weight, is_conv1d, prunable_kind
from .ranks import Ranks


class InputNorms(AbstractContextManager["InputNorms"]):
    """L2 norms of the inputs of each weight's module, over every forward pass while open.

    A norm broadcasts to its weight: (in,) for a linear layer, (in, 1) for ``Conv1D``, one for each
    element of the kernel window for a convolution. The modules themselves are left as they are.
    Layers that gradient checkpointing runs again in the backward are counted once. Compiled models run eagerly
    meanwhile. Over several ``ranks`` squares are means of the ranks' sums, so that all have the same norms.

    In training (``mode`` is train) only modules in training mode count, and sums are float32. For a trained model
    (eval) all modules count, and sums are float64 and do not depend on the batch size; ``mask`` (sample, token) says
    which tokens count.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        ranks: Ranks | None = None,
        *,
        mode: Literal["train", "eval"] = "train",
        mask: Tensor | None = None,
    ) -> None:
        check_inputs(weights)
        self.weights, self.ranks, self.mode, self.mask = weights, ranks, mode, mask
        self.squares: dict[str, Tensor] = {}  # sums, by weight
        self._open = ExitStack()
        finalize(self, self._open.close)  # the hook is global: it must not outlive this object

    def __enter__(self) -> "InputNorms":
        """Start from zero."""
        self.__exit__()
        self.squares.clear()
        names = WeakKeyDictionary[nn.Module, list[str]]()
        for weight in self.weights:
            names.setdefault(weight.module, []).append(weight.name)
        # not self: the hook is global, and must not keep it alive
        sums, train, mask = self.squares, self.mode == "train", self.mask
        dtype = torch.float32 if train else torch.float64

        @torch.no_grad()
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
            for name in names.get(module, ()) if (module.training or not train) and not _is_backward() else ():
                squares = input_squares(module, next(iter(args or kwargs.values())).detach(), dtype, mask)
                sums[name] = sums[name] + squares if name in sums else squares

        self._open.callback(_remove, register_module_forward_hook(add, with_kwargs=True))
        self._open.enter_context(eagerly())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def listen(self, on: bool) -> None:
        """Start from zero, or stop."""
        self.__enter__() if on else self.__exit__()

    def norms(self) -> dict[str, Tensor]:
        """Norms by weight; collective where there are several ranks."""
        squares = self.squares
        if self.ranks:
            squares = {name: self.ranks.sum(sums) / self.ranks.size for name, sums in self._agreed().items()}
        return {name: sums.sqrt() for name, sums in squares.items()}

    def _agreed(self) -> dict[str, Tensor]:
        """Sums of all weights; raises on all ranks if one of them lacks some, or has only a shard of the inputs."""
        assert self.ranks is not None
        found, missing = {}, []
        for weight in self.weights:
            sums = self.squares.get(weight.name)
            if sums is None:
                missing.append(weight.name)
            elif any(a not in (1, b) for a, b in zip(sums.shape[::-1], weight.parameter.shape[::-1], strict=False)):
                missing.append(f"{weight.name}, whose inputs are sharded,")
            else:
                found[weight.name] = sums
        self.ranks.agree(
            ValueError(f"the score reads input_norm, but none of all inputs was collected for {missing[0]}; exclude it")
            if missing
            else None
        )
        return found


def check_inputs(weights: Sequence[Weight]) -> None:
    """Refuse weights that may not multiply the input of their module, as embeddings and experts."""
    for weight in weights:
        module = weight.module
        num_matrices = sum(p.ndim > 1 for p in module.parameters(recurse=False))
        is_matrix = weight.parameter.ndim == 2 and weight.name.rpartition(".")[2] == "weight" and num_matrices == 1
        is_linear = is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if not (is_linear or prunable_kind(module, weight.name)):
            raise ValueError(
                f"the score reads the inputs of linear layers and convolutions, but {weight.name} belongs to "
                f"{type(module).__name__}; leave it out, or take a score that reads none: magnitude"
            )


def _remove(handle: RemovableHandle) -> None:
    handle.remove()
    _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch leaves it there, and torch.compile warns of it


def _is_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpointed layers are called again."""
    return torch._C._current_graph_task_id() != -1


def input_squares(
    module: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32, mask: Tensor | None = None
) -> Tensor:
    """Sum of squares of each input feature, in a shape that broadcasts to the module's weight.

    In float64 convolutions are summed one sample after the other, so that the batch size does not show.
    """
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        if dtype == torch.float32:
            return _convolution_squares(module, x)
        samples = x if x.ndim == module.weight.ndim else [x]
        return torch.stack([_convolution_squares(module, sample).to(dtype) for sample in samples]).sum(0)
    squares = x.float().square()
    if mask is not None and x.ndim > 2 and mask.shape == x.shape[:2]:
        squares = squares[mask.bool()]
    features = squares.flatten(0, -2).sum(0, dtype=dtype) if squares.ndim > 1 else squares.to(dtype)
    return features.unsqueeze(1) if is_conv1d(module) else features


def _convolution_squares(module: nn.Module, x: Tensor) -> Tensor:
    """Sums over all places of the input, with or without a batch dimension."""
    squares = x.float().square()
    if isinstance(module, TRANSPOSED):
        channels = squares.movedim(-module.weight.ndim + 1, 0).flatten(1).sum(1)
        return channels.view(-1, *[1] * (module.weight.ndim - 1))
    assert isinstance(module, CONVOLUTIONS)
    return _window_squares(module, squares)


def _window_squares(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, squares: Tensor) -> Tensor:
    """Sums over all positions of the window: (in, *kernel), or (out, in / groups, *kernel) with groups."""
    spatial = len(conv.kernel_size)
    if squares.ndim == spatial + 1:
        squares = squares.unsqueeze(0)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = nn.functional.pad(squares, conv._reversed_padding_repeated_twice, mode=mode)
    sums = squares.new_empty((squares.shape[1], *conv.kernel_size))
    lengths = [
        (size - dilation * (kernel - 1) - 1) // stride * stride + 1
        for size, kernel, stride, dilation in zip(
            padded.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True
        )
    ]
    for offset in product(*map(range, conv.kernel_size)):
        window = padded
        for dim, (at, length) in enumerate(zip(offset, lengths, strict=True)):
            start = at * conv.dilation[dim]
            window = window[(slice(None),) * (dim + 2) + (slice(start, start + length, conv.stride[dim]),)]
        sums[(slice(None), *offset)] = window.flatten(2).sum((0, 2))
    if conv.groups == 1:
        return sums
    return sums.unflatten(0, (conv.groups, -1)).repeat_interleave(conv.out_channels // conv.groups, 0)


_stances: list[Any] = []  # one for each ``eagerly`` that is open


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models as they were written: a compiled graph calls no hook that was registered after it.

    Compiled code is kept and used again afterwards.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    _stances.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        _stances.pop().__exit__(None, None, None)  # the latest, whoever closes: the first restores what was before
