"""Convolutional networks: LeNet-5, and ResNets 18 and 50 for images of any size and 20 for CIFAR.

LeNet-5 (LeCun et al. 1998) has ReLU and max-pooling in place of tanh and trained subsampling; ResNets are those of
He et al. 2015 (https://arxiv.org/abs/1512.03385).
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ..data import ImageShape

SMALL = 64  # images up to this size keep their resolution in the stem
FIELD = 32  # the paper centres its digits of 28 x 28 in this field


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
        width, stride = config.width << number, 2 if number else 1
        layers[f"layer{number + 1}"] = stage(config, depth, (num_in, width), stride)
        num_in = config.block.expansion * width

    layers.update(average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers["linear"] = nn.Linear(num_in, shape.num_classes)
    model = nn.Sequential(layers)
    initialise_(model)
    return model


def stage(config: ResNetConfig, depth: int, widths: tuple[int, int], stride: int) -> nn.Sequential:
    """``depth`` blocks from the first width to the second, of which the first block takes the stride."""
    num_in, width = widths
    first = config.block(num_in, width, stride, config.shortcut)
    num_out = config.block.expansion * width
    return nn.Sequential(first, *(config.block(num_out, width, 1, config.shortcut) for _ in range(depth - 1)))


def initialise_(model: nn.Module) -> None:
    """Convolutions normal with variance 2 / fan-out; the rest stays as torch draws it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
