"""The models of the experiments, by name. Listing the names loads no torch: a builder imports its own file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from ..data import ImageShape, TokenShape


@dataclass(frozen=True)
class Model:
    """What a model reads, and the function from the shape of that data to the untrained module."""

    kind: Literal["tokens", "images"]
    builder: Callable[[Any], nn.Module]


def build(name: str, shape: TokenShape | ImageShape) -> nn.Module:
    """The untrained model ``name`` for data of ``shape``, drawn from torch's global generator."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    model = MODELS[name]
    if model.kind != shape.kind:
        fitting = ", ".join(other for other, row in MODELS.items() if row.kind == shape.kind)
        raise ValueError(f"{name} reads {model.kind}, but the data holds {shape.kind}; take one of {fitting}")
    return model.builder(shape)


def _gpt(shape: TokenShape, num_layers: int, num_heads: int, width: int) -> nn.Module:
    from .gpt import GPT, GPTConfig

    return GPT(GPTConfig(num_layers, num_heads, width, context=shape.context, vocab_size=shape.vocab_size))


def _lenet5(shape: ImageShape) -> nn.Module:
    from .vision import LeNet5

    return LeNet5(shape.channels, shape.num_classes)


def _resnet(shape: ImageShape, name: str) -> nn.Module:
    from .vision import RESNETS, resnet

    return resnet(RESNETS[name], shape)


MODELS = {
    "gpt2-tiny": Model("tokens", partial(_gpt, num_layers=4, num_heads=4, width=128)),
    "gpt2-mini": Model("tokens", partial(_gpt, num_layers=6, num_heads=6, width=384)),
    "gpt2-small8": Model("tokens", partial(_gpt, num_layers=8, num_heads=8, width=512)),
    "gpt2": Model("tokens", partial(_gpt, num_layers=12, num_heads=12, width=768)),
    "gpt2-medium": Model("tokens", partial(_gpt, num_layers=24, num_heads=16, width=1024)),
    "gpt2-large": Model("tokens", partial(_gpt, num_layers=36, num_heads=20, width=1280)),
    "gpt2-xl": Model("tokens", partial(_gpt, num_layers=48, num_heads=25, width=1600)),
    "lenet5": Model("images", _lenet5),
    "resnet18": Model("images", partial(_resnet, name="resnet18")),
    "resnet20": Model("images", partial(_resnet, name="resnet20")),
    "resnet50": Model("images", partial(_resnet, name="resnet50")),
}
