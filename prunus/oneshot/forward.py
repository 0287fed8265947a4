"""How a model is called: on a batch, without its cache, in eval mode, with other values, or with another forward."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .samples import Tree


def outputs(model: nn.Module, tree: Tree, call: Callable[..., Any] | None = None) -> Any:
    """What the model returns for a batch; ``call`` is the model inside a wrapper."""
    args, named = arguments(model, tree)
    return (call or model)(*args, **named)


def arguments(model: nn.Module, tree: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model for a batch without its labels, unless a decoder makes its inputs from them."""
    inputs, labels = tree if isinstance(tree, tuple) else (tree, None)
    if not is_encoder_decoder(model) or (isinstance(inputs, Mapping) and "decoder_input_ids" in inputs):
        inputs = {k: v for k, v in inputs.items() if k != "labels"} if isinstance(inputs, Mapping) else inputs
    elif labels is not None:
        named = inputs if isinstance(inputs, Mapping) else {getattr(model, "main_input_name", "input_ids"): inputs}
        inputs = {**named, "labels": labels}
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if isinstance(inputs, Mapping) and "labels" in inputs and shift is not None:
        shifted = shift(labels=inputs["labels"])  # so that the model computes no loss of its own
        inputs = {k: v for k, v in inputs.items() if k != "labels"} | {"decoder_input_ids": shifted}
    if isinstance(inputs, Mapping):
        return (), without_cache(model, inputs)
    return (inputs,), without_cache(model, {})


def first_tensor(tree: Tree) -> Tensor:
    """The first tensor of what a module returned that is no scalar, as a loss is."""
    leaves = pytree.tree_leaves(list(tree.values()) if isinstance(tree, Mapping) else tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return next((tensor for tensor in tensors if tensor.ndim), tensors[0])


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether it is a Hugging Face model with an encoder and a decoder, each with tokens of its own."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the cache of keys and values turned off: passes over whole sequences do not need it."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} | dict(inputs) if takes_cache else dict(inputs)


def head_of(model: nn.Module) -> nn.Linear:
    """The layer that turns the hidden state into logits; ValueError where it is not a plain one in float32 or less."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype == torch.float64:
        raise ValueError("the model has no plain head")
    return head


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards modules are in the modes of before, and autograd tracks the parameters that it tracked."""
    modes = {module: module.training for module in model.modules()}
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen(model: nn.Module, renewed: Collection[Tensor] = ()) -> Iterator[None]:
    """The model in eval mode with ``requires_grad`` off; at the end all but the ``renewed`` buffers is as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    fused = torch.backends.mha.get_fastpath_enabled()
    with modes_kept(model):
        try:
            model.eval().requires_grad_(False)
            # the fused encoder layer of torch does not call its linear layers
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer not in renewed:
                        buffer.copy_(before)


@contextmanager
def requiring_grad(tensors: Collection[Tensor]) -> Iterator[None]:
    """Autograd tracks these tensors, and does not afterwards."""
    try:
        for tensor in tensors:
            tensor.requires_grad_(True)
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)


@contextmanager
def swapped(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Tensors of a model that hold other values while this is open."""
    own = {tensor: tensor.data for tensor in values}
    try:
        for tensor, value in values.items():
            tensor.data = value
        yield
    finally:
        for tensor, value in own.items():
            tensor.data = value


@contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules that run another forward while this is open."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward
