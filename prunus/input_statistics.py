"""Input norms: how large every input feature of each weight is, collected while a model runs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from .eligible import CONVOLUTIONS, TRANSPOSED, Weight, holds_experts, is_conv1d, prunable_kind
from .ranks import Ranks

EAGER = "_experts_implementation"  # of a Hugging Face config: how experts are run


class InputNorms(AbstractContextManager["InputNorms"]):
    """L2 norms of the inputs of each weight's module, over every forward pass while open.

    A norm broadcasts to its weight: (in,) for a linear layer, (in, 1) for ``Conv1D``, one for each element of the
    kernel window for a convolution. Layers that gradient checkpointing runs again are counted once. Compiled models run
    eagerly meanwhile. Over several ``ranks`` squares are means of the ranks' sums, so that all have the same norms.

    In training only modules in training mode count, and sums are float32. For a trained model (``mode`` is eval) sums
    are float64 and do not depend on the batch size; ``mask`` (sample, token) says which tokens count.
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
        stacked = []
        for weight in self.weights:
            if holds_experts(weight.module, weight.parameter):
                stacked.append(weight)
                continue
            for module in (weight.module, *weight.sharers):
                names.setdefault(module, []).append(weight.name)
        # not self: the hook is global, and must not keep it alive
        sums, train, mask = self.squares, self.mode == "train", self.mask
        dtype = torch.float32 if train else torch.float64

        @torch.no_grad()
        def count(module: nn.Module, x: Tensor) -> None:
            for name in names[module]:
                squares = input_squares(module, x.detach(), dtype, mask)
                sums[name] = sums[name] + squares if name in sums else squares

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
            if module in names and counts(module):
                count(module, next(iter(args or kwargs.values())))

        def counts(module: nn.Module) -> bool:
            is_backward = torch._C._current_graph_task_id() != -1  # in which checkpointed layers are called again
            return (module.training or not train) and not is_backward

        handle = register_module_forward_hook(add, with_kwargs=True)
        # torch leaves this entry there when the hook is removed, and torch.compile warns of it
        self._open.callback(_global_forward_hooks_with_kwargs.pop, handle.id, None)
        self._open.callback(handle.remove)
        if any(isinstance(module, NonDynamicallyQuantizableLinear) for module in names):

            def seen(attention: nn.MultiheadAttention, x: Tensor) -> None:
                if attention.out_proj in names and counts(attention.out_proj):
                    is_masked = mask is not None and len(x) == mask.numel()  # attention has tokens before samples
                    count(attention.out_proj, x.unflatten(0, mask.T.shape).transpose(0, 1) if is_masked else x)

            self._open.enter_context(output_projections_seen_by(seen))
        if stacked:
            self._open.enter_context(_expert_inputs(stacked, _ExpertProducts(sums, dtype), mask, counts))
        self._open.enter_context(eagerly())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def listen(self, on: bool) -> None:
        """Start from zero, or stop."""
        self.__enter__() if on else self.__exit__()

    def norms(self) -> dict[str, Tensor]:
        """Norms by weight; collective where there are several ranks."""
        missing = []  # on this rank; all raise if one lacks some, or has only a shard of the inputs
        for weight in self.weights:
            sums = self.squares.get(weight.name)
            if sums is None:
                missing.append(weight.name)
            elif any(a not in (1, b) for a, b in zip(sums.shape[::-1], weight.parameter.shape[::-1], strict=False)):
                missing.append(f"{weight.name}, whose inputs are sharded,")
        problem = f"the score reads input_norm, but it was not collected over all inputs of {', '.join(missing)}"
        error = ValueError(f"{problem}; exclude them") if missing else None
        if not self.ranks:
            if error is not None:
                raise error
            found = {name: sums.sqrt() for name, sums in self.squares.items()}
        else:
            self.ranks.agree(error)
            found = {w.name: (self.ranks.sum(self.squares[w.name]) / self.ranks.size).sqrt() for w in self.weights}
        if any(holds_experts(weight.module, weight.parameter) for weight in self.weights):
            fill_unreached_(found, self.weights)
        return found


def fill_unreached_(norms: dict[str, Tensor], weights: Sequence[Weight]) -> Tensor:
    """Experts that no token reached get the mean of all norms, which is returned: their weights alone decide."""
    mean = torch.stack([norm.mean().cpu() for norm in norms.values()]).mean() if norms else torch.ones(())
    for weight in weights:
        if holds_experts(weight.module, weight.parameter) and weight.name in norms:
            norm = norms[weight.name]
            norms[weight.name] = torch.where((norm == 0).all(2, True).all(1, True), mean.to(norm), norm)
    return mean


def check_inputs(weights: Sequence[Weight]) -> None:
    """Refuse weights that may not multiply the input of their module, as embeddings; name all of them."""
    odd = []
    for weight in weights:
        module = weight.module
        num_matrices = sum(p.ndim > 1 for p in module.parameters(recurse=False))
        is_matrix = weight.parameter.ndim == 2 and weight.name.rpartition(".")[2] == "weight" and num_matrices == 1
        is_linear = is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if not (is_linear or holds_experts(module, weight.parameter) or prunable_kind(module, weight.name)):
            odd.append(f"{weight.name} belongs to {type(module).__name__}")
    if odd:
        problem = f"the score reads the inputs of linear layers and convolutions, but {', '.join(odd)}"
        raise ValueError(f"{problem}; exclude those weights, or take a score that reads no inputs: magnitude")


def input_squares(
    module: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32, mask: Tensor | None = None
) -> Tensor:
    """Sum of squares of each input feature, as it broadcasts to the weight; in float64 the batch size does not show."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        if dtype == torch.float32:
            return _convolution_squares(module, x)
        samples = x if x.ndim == module.weight.ndim else [x]
        return torch.stack([_convolution_squares(module, sample).to(dtype) for sample in samples]).sum(0)
    squares = x.float().square()
    if mask is not None and x.ndim > 2 and x.shape[:2] in (mask.shape, mask.T.shape):
        squares = squares[(mask if x.shape[:2] == mask.shape else mask.T).bool()]
    features = squares.flatten(0, -2).sum(0, dtype=dtype) if squares.ndim > 1 else squares.to(dtype)
    return features.unsqueeze(1) if is_conv1d(module) else features


def _convolution_squares(conv: nn.Module, x: Tensor) -> Tensor:
    """Over all positions of the window: (in, *kernel), (out, in / groups, *kernel), or (in, 1, ...) if transposed."""
    squares = x.float().square()
    if isinstance(conv, TRANSPOSED):
        channels = squares.movedim(-conv.weight.ndim + 1, 0).flatten(1).sum(1)
        return channels.view(-1, *[1] * (conv.weight.ndim - 1))
    assert isinstance(conv, CONVOLUTIONS)
    if squares.ndim == len(conv.kernel_size) + 1:
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


class _ExpertProducts(TorchFunctionMode):
    """Adds up the squares of what multiplies slices of the stacked weights of the module that is running."""

    def __init__(self, sums: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.sums, self.dtype = sums, dtype
        self.running: dict[int, tuple[Weight, Tensor]] = {}  # by where their storage begins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.running and func in PRODUCTS and len(args) > 1 and all(isinstance(arg, Tensor) for arg in args[:2]):
            found = self.running.get(args[1].untyped_storage().data_ptr())
            if found is not None:
                self._count(*found, args[0].detach(), args[1])
        return func(*args, **(kwargs or {}))

    def _count(self, weight: Weight, stack: Tensor, x: Tensor, factor: Tensor) -> None:
        inputs = 1 if weight.outputs == (0, 2) else 2
        squares = x.float().square()
        if factor.ndim == 3:  # all experts at once: (expert, token, in)
            found = squares.sum(1, dtype=self.dtype)
        else:
            number = (factor.storage_offset() - stack.storage_offset()) // stack.stride(0)
            found = squares.new_zeros((len(stack), stack.shape[inputs]), dtype=self.dtype)
            found[number] = squares.flatten(0, -2).sum(0, dtype=self.dtype)
        found = found.unsqueeze(3 - inputs)
        self.sums[weight.name] = self.sums[weight.name] + found if weight.name in self.sums else found


@contextmanager
def _expert_inputs(
    weights: Sequence[Weight], products: _ExpertProducts, mask: Tensor | None, counts: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Collect what experts multiply, one after the other, with zeros for tokens that the mask leaves out."""
    running = ExitStack()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not counts(module):
            return None
        own = [(weight, module.get_parameter(weight.name.rpartition(".")[2])) for weight in by_module[module]]
        products.running = {stack.untyped_storage().data_ptr(): (weight, stack) for weight, stack in own}
        running.enter_context(products)  # only while experts run: in training other modes open and close around them
        x, *rest = (*args, *kwargs.values())
        if mask is None or mask.numel() != x.shape[:-1].numel():
            return None
        values = (x * mask.view(*x.shape[:-1], 1).to(x.dtype), *rest)
        return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))

    def after(*_: object) -> None:
        products.running = {}
        running.close()

    by_module: dict[nn.Module, list[Weight]] = {}
    for weight in weights:
        by_module.setdefault(weight.module, []).append(weight)
    with ExitStack() as stack:
        for module in by_module:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
            stack.enter_context(one_by_one(module))
        yield


PRODUCTS = (nn.functional.linear, torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)


@contextmanager
def one_by_one(module: nn.Module) -> Iterator[None]:
    """The experts of a Hugging Face model run one after the other while this is open, not by one fused product."""
    config = getattr(module, "config", None)
    before = getattr(config, EAGER, None)
    if before is None:
        yield
        return
    setattr(config, EAGER, "eager")
    try:
        yield
    finally:
        setattr(config, EAGER, before)


@contextmanager
def output_projections_seen_by(see: Callable[[nn.MultiheadAttention, Tensor], None]) -> Iterator[None]:
    """Show a function what attention multiplies by its output projection, whose forward it does not call."""
    running: list[_AttentionProducts] = []

    def stop() -> None:
        while running:
            running.pop().__exit__(None, None, None)

    def before(module: nn.Module, _: object) -> None:
        if isinstance(module, nn.MultiheadAttention):
            stop()  # of one that Ctrl-C has ended: torch calls no hook then
            running.append(_AttentionProducts(module, see))
            running[-1].__enter__()

    def after(module: nn.Module, *_: object) -> None:
        if isinstance(module, nn.MultiheadAttention):
            stop()

    with ExitStack() as stack:
        stack.callback(stop)
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, always_call=True).remove)
        yield


class _AttentionProducts(TorchFunctionMode):
    """While an attention runs, its function ``multi_head_attention_forward`` has a ``linear`` of its own."""

    def __init__(self, attention: nn.MultiheadAttention, see: Callable[[nn.MultiheadAttention, Tensor], None]) -> None:
        super().__init__()
        self.attention, self.see = attention, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the function itself, or as another mode that is open has made it
        is_attention = getattr(func, "__code__", None) is nn.functional.multi_head_attention_forward.__code__
        return (self._watched(func) if is_attention else func)(*args, **(kwargs or {}))

    def _watched(self, func: FunctionType) -> FunctionType:
        product = func.__globals__["linear"]

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is self.attention.out_proj.weight:
                self.see(self.attention, x.detach())
            return product(x, weight, bias)

        names = func.__globals__ | {"linear": linear}
        watched = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
        names["multi_head_attention_forward"] = watched
        return watched


_stances: list[Any] = []  # one for each ``eagerly`` that is open


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models as they were written: a compiled graph calls no hook that was registered after it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    _stances.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        _stances.pop().__exit__(None, None, None)  # the latest, whoever closes: the first restores what was before
