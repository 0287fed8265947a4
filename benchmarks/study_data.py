"""The data of studies: images to calibrate and evaluate on, and batches to learn from by their number."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.lab.data.batches import ImageShape, ImageStream, Labelled, Normalise, TokenData, TokenWindows, windows
from prunus.lab.data.datasets import read_cifar10
from prunus.lab.evaluate import measured, summed
from prunus.lab.models import RESNETS, resnet
from prunus.trained.model import TrainedModel
from prunus.trained.tokens import read_tokens

NUM_CALIBRATION = 2048  # images to draw calibration samples from
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what ResNet-20 was trained with
NORMALISE = Normalise(torch.tensor(MEAN)[:, None, None] * 255, torch.tensor(STD)[:, None, None] * 255)
HELD_OUT_IMAGES = 2000  # the last training images, which choose the best state and never train
HELD_OUT_BATCHES = 2  # of tokens, likewise
Data = tuple[Callable[[int], Any], list[Any]]  # what makes a batch by its number; batches that choose the best state


def image_model(
    weights: Path, images: Path, samples: int, held_out: int, seed: int, device: torch.device
) -> TrainedModel:
    """ResNet-20 with the weights of a file, calibrated and evaluated on a folder of CIFAR-10."""
    state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
    model = resnet(RESNETS["resnet20"], ImageShape(3, 32, 10))
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    train, test = read_cifar10(images)
    num = min(NUM_CALIBRATION, len(train.labels))
    chosen = np.random.default_rng(seed).permutation(num)[:samples]
    batch = NORMALISE(train.pixels[chosen]).to(device), torch.from_numpy(train.labels[chosen]).to(device)
    pixels, labels = NORMALISE(test.pixels[:held_out]), torch.from_numpy(test.labels[:held_out])

    def accuracy(model: nn.Module) -> float:
        parts = zip(pixels.split(1000), labels.split(1000), strict=True)
        return summed(measured(model, parts, device, nullcontext())).accuracy

    return TrainedModel(model.to(device).eval(), [batch], accuracy, lambda *_: None, F.cross_entropy, "accuracy")


# Batches to learn from, and held-out ones that are not evaluated


@dataclass(frozen=True)
class NumberedBatches(Sequence[Any]):
    """Batches by number, made when they are read."""

    make: Callable[[int], Any]
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.num:
            raise IndexError(index)
        return self.make(index)


def run_batches(data: TokenData, num_evaluated: int, size: int, seed: int) -> Data:
    """Windows of a run's training data; held out are those that follow the evaluated ones."""
    context = data.shape.context
    starts = (min(num_evaluated, data.num_held_out - 1) + np.arange(HELD_OUT_BATCHES * size)) * context
    starts = starts[starts + context < len(data.held_out)]
    held_out = [windows(data.held_out, starts[first : first + size], context) for first in range(0, len(starts), size)]
    return lambda number: data.train.batch(number, size, seed), held_out


def file_batches(train: Path, held_out: Path, length: int, size: int, seed: int) -> Data:
    """Windows (size, length) of token files."""
    stream, ids = TokenWindows(read_tokens(train), length - 1), read_tokens(held_out)
    rows = torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)

    def batch(number: int) -> Tensor:
        inputs, targets = stream.batch(number, size, seed)
        return torch.cat([inputs, targets[:, -1:]], 1)

    return batch, list(rows[: HELD_OUT_BATCHES * size].split(size))


def image_batches(stream: ImageStream, size: int, seed: int) -> Data:
    """Training images, cropped and flipped where the stream does so; the last of them, as they are, are held out."""
    images, normalise = stream.images, stream.normalise
    edge = len(images.labels) - min(HELD_OUT_IMAGES, len(images.labels) // 5)
    train = ImageStream(Labelled(images.pixels[:edge], images.labels[:edge]), normalise, stream.augment)
    held_out = [
        (normalise(images.pixels[first : first + size]), torch.from_numpy(images.labels[first : first + size]))
        for first in range(edge, len(images.labels), size)
    ]
    return partial(train.batch, size=size, seed=seed), held_out
