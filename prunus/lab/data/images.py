"""Labelled images: shuffled and, if asked, cropped and flipped for training; in order for validation."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .order import Batch, mixed, pieces
from .shape import ImageShape

NUM_CLASSES = 10  # in each of the sets that are read here
MARGIN = 4  # pixels around an image that a crop may reach into


@dataclass(frozen=True, eq=False)
class Labelled:
    pixels: np.ndarray  # (count, channels, size, size), uint8
    labels: np.ndarray  # (count,), int64


@dataclass(frozen=True, eq=False)
class Normalise:
    """``(pixels - mean) / std`` for each channel, as float32."""

    mean: Tensor  # (channels, 1, 1)
    std: Tensor

    def __call__(self, pixels: np.ndarray) -> Tensor:
        return (torch.from_numpy(pixels.astype(np.float32)) - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class ImageStream:
    images: Labelled
    normalise: Normalise
    augment: bool

    def __len__(self) -> int:
        """Images in an epoch."""
        return len(self.images.labels)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Images (size, channels, height, width) and labels (size,) of one step, whatever was asked for before."""
        drawn = np.concatenate([indices for _, indices in pieces(len(self), step * size, size, seed)])
        pixels = self.images.pixels[drawn]
        if self.augment:
            pixels = crop_and_flip(pixels, step * size, seed)
        return self.normalise(pixels), torch.from_numpy(self.images.labels[drawn])


@dataclass(frozen=True, eq=False)
class ImageData:
    train: ImageStream
    held_out: Labelled
    shape: ImageShape

    def validation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """The held-out images in order, ``size`` at a time and at most ``limit`` in all; the last may be fewer."""
        pixels, labels = self.held_out.pixels[:limit], self.held_out.labels[:limit]
        for first in range(0, len(labels), size):
            here = slice(first, first + size)
            yield self.train.normalise(pixels[here]), torch.from_numpy(labels[here].copy())


def image_data(train: Labelled, held_out: Labelled, *, augment: bool = False) -> ImageData:
    """Both parts, normalised by the channels' mean and standard deviation over the training images."""
    channels, size = train.pixels.shape[1:3]
    stream = ImageStream(train, normaliser(train.pixels), augment)
    return ImageData(stream, held_out, ImageShape(channels, size, NUM_CLASSES))


def normaliser(pixels: np.ndarray) -> Normalise:
    """Mean and standard deviation of each channel, from exact counts of the 256 levels."""
    levels = torch.arange(256.0, dtype=torch.float64, device="cpu")
    moments = []
    for channel in range(pixels.shape[1]):
        flat = torch.from_numpy(pixels[:, channel].flatten())
        share = torch.bincount(flat, minlength=256) / flat.numel()
        mean = (share * levels).sum()
        moments.append((mean, (share * (levels - mean) ** 2).sum().sqrt()))
    mean, std = torch.tensor(moments, device="cpu").float()[:, :, None, None].unbind(1)
    return Normalise(mean, std.clamp(min=1))  # one level: a constant channel stays finite


def crop_and_flip(pixels: np.ndarray, start: int, seed: int) -> np.ndarray:
    """Each image moved by up to 4 pixels over black and mirrored half of the time.

    An image's draw depends on the seed and its place in the order, ``start`` for the first: counter-based,
    so that the parts of a batch are changed as the whole would be.
    """
    size, ways = pixels.shape[-1], 2 * MARGIN + 1
    words = np.random.Philox(key=mixed("augment", seed)).advance(start).random_raw((len(pixels), 4))  # 4 words a place
    draws = (words[:, :3] % np.array([ways, ways, 2], np.uint64)).tolist()
    padded = np.pad(pixels, ((0, 0), (0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
    moved = np.empty_like(pixels)
    for image, crop, (top, left, mirrored) in zip(moved, padded, draws, strict=True):
        part = crop[:, top : top + size, left : left + size]
        image[:] = part[:, :, ::-1] if mirrored else part
    return moved
