"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling in place of tanh and trained subsampling."""

from torch import Tensor, nn
from torch.nn import functional as F

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
