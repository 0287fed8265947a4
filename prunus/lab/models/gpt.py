"""GPT-2 (Radford et al. 2019): a pre-norm transformer with learned positions and a head tied to the embedding."""

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    num_layers: int
    num_heads: int
    width: int
    context: int = 1024
    vocab_size: int = 50257
    bias: bool = True  # in the linear layers and the norms

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width must be a multiple of num_heads, got {self.width} and {self.num_heads}")


class Attention(nn.Module):
    """Causal self-attention; ``qkv`` holds query, key and value in this order, each split into heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (batch, time, 3, heads, head width)
        query, key, value = split.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, bias = config.width, config.bias
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        up, down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        layers: OrderedDict[str, nn.Module] = OrderedDict(up=up, gelu=nn.GELU(approximate="tanh"), down=down)
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits (batch, time, vocab) of the next token from tokens (batch, time)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        initialise_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"the model reads at most {self.config.context} tokens, got {length}; cut the input")
        x = self.embedding(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def initialise_(model: GPT) -> None:
    """Matrices normal with std 0.02, divided by sqrt(2 L) where they write to the residual stream; biases zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 2:
            writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
            parameter.normal_(std=0.02 / math.sqrt(2 * model.config.num_layers) if writes else 0.02)
