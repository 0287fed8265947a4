"""The models of the experiments: GPT-2, LeNet-5 and ResNets, by name in ``MODELS``.

GPT-2 (Radford et al. 2019) is a pre-norm transformer with learned positions and a head tied to the embedding. LeNet-5
(LeCun et al. 1998) has ReLU and max-pooling in place of tanh and trained subsampling. ResNets are those of He et al.
2015 (https://arxiv.org/abs/1512.03385): 18 and 50 for images of any size, 20 for CIFAR.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from .data import ImageShape, TokenShape

SMALL = 64  # images up to this size keep their resolution in the stem
FIELD = 32  # the paper centres its digits of 28 x 28 in this field


class Attention(nn.Module):
    """Causal self-attention; ``qkv`` holds query, key and value in this order, each split into heads."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (batch, time, 3, heads, head width)
        query, key, value = split.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(num_heads, width)
        self.mlp_norm = nn.LayerNorm(width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        layers: OrderedDict[str, nn.Module] = OrderedDict(up=up, gelu=nn.GELU(approximate="tanh"), down=down)
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits (batch, time, vocab) of the next token from tokens (batch, time)."""

    def __init__(self, num_layers: int, num_heads: int, width: int, shape: TokenShape) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}")
        self.context = shape.context
        self.embedding = nn.Embedding(shape.vocab_size, width)
        self.positions = nn.Embedding(shape.context, width)
        self.blocks = nn.ModuleList(Block(num_heads, width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:  # those that write to the residual stream are divided by sqrt(2 L)
                writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if writes else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"the model reads at most {self.context} tokens, got {length}; shorten the input")
        x = self.embedding(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LeNet5(nn.Module):
    """Logits (batch, classes) from square images (batch, channels, size, size) of any size."""

    def __init__(self, channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(in_field(images))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def in_field(images: Tensor) -> Tensor:
    """Images of 32 x 32: those of 28 or more are centred in zeros as in the paper, others resized."""
    missing = FIELD - images.shape[-1]
    if 0 <= missing <= 4:
        before, after = missing // 2, missing - missing // 2
        return F.pad(images, (before, after, before, after))
    return F.interpolate(images, size=(FIELD, FIELD), mode="bilinear")


class PadShortcut(nn.Module):
    """Option A of the paper: every ``stride``-th pixel, with zero channels around; it has no weights."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (num_out - num_in) // 2
        self.after = num_out - num_in - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def project(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    """Option B of the paper: a convolution of 1 x 1 and its norm."""
    return nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))


def conv3x3(num_in: int, num_out: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of the image, divided by ``stride``."""
    return nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)


Shortcut = Callable[[int, int, int], nn.Module]


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, num_in: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(num_in, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3x3(width, width), nn.BatchNorm2d(width)
        self.downsample = _shortcut(num_in, width, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions beside a shortcut, four times as wide at the end."""

    expansion = 4

    def __init__(self, num_in: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        num_out = self.expansion * width
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3x3(width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        self.downsample = _shortcut(num_in, num_out, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _shortcut(num_in: int, num_out: int, stride: int, shortcut: Shortcut) -> nn.Module:
    unchanged = num_in == num_out and stride == 1
    return nn.Identity() if unchanged else shortcut(num_in, num_out, stride)


@dataclass(frozen=True)
class ResNetConfig:
    block: type[Basic] | type[Bottleneck]
    depths: tuple[int, ...]  # blocks in each stage
    width: int  # of the first stage; doubled by each following one
    shortcut: Shortcut
    only_small: bool = False  # takes the stem for small images whatever the size


RESNETS = {
    "resnet18": ResNetConfig(Basic, (2, 2, 2, 2), 64, project),
    "resnet20": ResNetConfig(Basic, (3, 3, 3), 16, PadShortcut, only_small=True),
    "resnet50": ResNetConfig(Bottleneck, (3, 4, 6, 3), 64, project),
}


def resnet(config: ResNetConfig, shape: ImageShape) -> nn.Sequential:
    """Logits (batch, classes) from images; small images meet a 3 x 3 stem of stride 1 and no pooling."""
    small = config.only_small or shape.size <= SMALL
    if small:
        stem = conv3x3(shape.channels, config.width)
    else:
        stem = nn.Conv2d(shape.channels, config.width, 7, stride=2, padding=3, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(config.width), relu=nn.ReLU())
    if not small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)

    num_in = config.width
    for number, depth in enumerate(config.depths):
        width, blocks = config.width << number, []
        for place in range(depth):
            stride = 2 if number and not place else 1
            blocks.append(config.block(num_in, width, stride, config.shortcut))
            num_in = config.block.expansion * width
        layers[f"layer{number + 1}"] = nn.Sequential(*blocks)

    layers.update(average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers["linear"] = nn.Linear(num_in, shape.num_classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # normal with variance 2 / fan-out; the rest stays as torch draws it
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


GPTS = {  # layers, heads and width
    "gpt2-tiny": (4, 4, 128),
    "gpt2-mini": (6, 6, 384),
    "gpt2-small8": (8, 8, 512),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
MODELS = dict.fromkeys(GPTS, "tokens") | dict.fromkeys(("lenet5", *RESNETS), "images")  # what each reads


def build(name: str, shape: TokenShape | ImageShape, width: int = 0, layers: int = 0) -> nn.Module:
    """The untrained model, drawn from torch's global generator; a GPT takes ``width`` and ``layers`` over its own."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    if MODELS[name] != shape.kind:
        fitting = ", ".join(other for other, kind in MODELS.items() if kind == shape.kind)
        raise ValueError(f"{name} reads {MODELS[name]}, but the data holds {shape.kind}; take one of {fitting}")
    if isinstance(shape, TokenShape):
        num_layers, num_heads, own_width = GPTS[name]
        head = own_width // num_heads
        if width % head:
            raise ValueError(f"width must be a multiple of the head width {head}, got {width}")
        return GPT(layers or num_layers, width // head or num_heads, width or own_width, shape)
    if width or layers:
        raise ValueError(f"only GPTs take a width or a number of layers, not {name}")
    return LeNet5(shape.channels, shape.num_classes) if name == "lenet5" else resnet(RESNETS[name], shape)
