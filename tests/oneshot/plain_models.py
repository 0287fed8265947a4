"""Small models without a configuration, with the block structures of torchvision, timm and others."""

import torch
from torch import nn
from torch.nn import functional as F


def conv3x3(num_in, num_out, stride=1, groups=1):
    return nn.Conv2d(num_in, num_out, 3, stride, 1, groups=groups, bias=False)


class TorchvisionBlock(nn.Module):
    """torchvision's Bottleneck: its ReLU is one module that is called three times."""

    def __init__(self, num_in, width, stride=1, groups=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3x3(width, width, stride, groups), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or num_in != 4 * width:
            down = nn.Conv2d(num_in, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(down, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TimmBlock(nn.Module):
    """timm's BasicBlock: identities stand where other options have layers, and the shortcut comes last."""

    def __init__(self, num_in, width, stride=1):
        super().__init__()
        self.conv1, self.bn1, self.drop_block = conv3x3(num_in, width, stride), nn.BatchNorm2d(width), nn.Identity()
        self.act1, self.aa = nn.ReLU(inplace=True), nn.Identity()
        self.conv2, self.bn2, self.se = conv3x3(width, width), nn.BatchNorm2d(width), None
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or num_in != width:
            down = nn.Conv2d(num_in, width, 1, bias=False)
            pool = nn.AvgPool2d(2, stride, ceil_mode=True) if stride > 1 else nn.Identity()
            self.downsample = nn.Sequential(pool, down, nn.BatchNorm2d(width))

    def forward(self, x):
        shortcut = x
        x = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))
        x = self.bn2(self.conv2(x))
        x += shortcut if self.downsample is None else self.downsample(shortcut)
        return self.act2(x)


class PreActivation(nn.Module):
    """The shortcut is computed first, and norms come before convolutions."""

    def __init__(self, num_in, width):
        super().__init__()
        self.bn1, self.shortcut = nn.BatchNorm2d(num_in), nn.Conv2d(num_in, width, 1)
        self.conv1, self.bn2, self.conv2 = conv3x3(num_in, width), nn.BatchNorm2d(width), conv3x3(width, width)

    def forward(self, x):
        x = F.relu(self.bn1(x))
        shortcut = self.shortcut(x)
        return self.conv2(F.relu(self.bn2(self.conv1(x)))) + shortcut


class MobileBlock(nn.Module):
    """MobileNetV2's: a depthwise convolution between two pointwise ones."""

    def __init__(self, width, hidden):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.depthwise = nn.Sequential(conv3x3(hidden, hidden, groups=hidden), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.project = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        return x + self.project(self.depthwise(self.expand(x)))


class UNet(nn.Module):
    """What goes down is read again on the way up, beside other channels."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = conv3x3(3, 6), conv3x3(6, 6, 2)
        self.up, self.last = nn.ConvTranspose2d(6, 6, 2, 2), nn.Conv2d(12, 2, 1)

    def forward(self, x):
        high = F.relu(self.down1(x))
        low = F.relu(self.down2(high))
        return self.last(torch.cat([high, self.up(low)], 1))


class Shared(nn.Module):
    """``middle`` is called twice, so that its outputs are its own inputs too."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.middle(self.middle(self.first(x).relu()).relu()).relu())


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``, with gate and up apart or in one layer, as halves or as pairs."""

    def __init__(self, layout=""):
        super().__init__()
        self.layout, self.down = layout, nn.Linear(10, 6)
        if layout:
            self.both = nn.Linear(6, 20)
        else:
            self.gate, self.up = nn.Linear(6, 10, bias=False), nn.Linear(6, 10)

    def forward(self, x):
        if self.layout == "halves":
            gate, up = self.both(x).chunk(2, -1)
        elif self.layout == "pairs":
            gate, up = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return x + self.down(F.silu(gate) * up)


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, act, num=12):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, num), act, nn.Linear(num, 4)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


class SideReader(nn.Module):
    """The mean of all hidden units is read beside the layer that reads each of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden) + 0.1 * hidden.mean(-1, keepdim=True)


def images(*blocks, width=3):
    return nn.Sequential(*blocks), torch.randn(2, width, 8, 8)


def with_statistics(model):
    """Batch norms whose statistics and weights differ by channel, as after training."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.3)
    return model
