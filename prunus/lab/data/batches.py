"""What a training reads: windows of tokens or labelled images, in an order that is a function of seed and step.

The order is an endless run of permutations, one an epoch. Nothing here remembers what was drawn before, so a resumed
run reads what an unbroken one would have read, and a rank that asks for a part of a batch gets that part: batch
``2 s + r`` of size n is half r of batch s of size 2 n.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets
NUM_CLASSES = 10  # in each of the sets of images
MARGIN = 4  # pixels around an image that a crop may reach into


@dataclass(frozen=True)
class TokenShape:
    """What a model must know of tokens."""

    kind: ClassVar[str] = "tokens"
    vocab_size: int
    context: int


@dataclass(frozen=True)
class ImageShape:
    """What a model must know of images."""

    kind: ClassVar[str] = "images"
    channels: int
    size: int  # height and width
    num_classes: int


def mixed(*words: int | str) -> int:
    """A 64-bit hash of the words: (seed 1, epoch 0) has nothing in common with (seed 0, epoch 1)."""
    return int.from_bytes(blake2b("/".join(map(str, words)).encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=4)  # a batch may lie across two epochs, and there may be two datasets
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Every index below ``count`` once, in the order of this seed and epoch; read-only, since it is shared."""
    generator = torch.Generator("cpu").manual_seed(mixed("order", seed, epoch))
    order = torch.randperm(count, generator=generator, device="cpu").numpy()
    order.flags.writeable = False
    return order


def drawn_indices(count: int, start: int, size: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, indices) for the places ``start`` to ``start + size`` of the endless run, split where an epoch ends."""
    while size > 0:
        epoch, offset = divmod(start, count)
        indices = permutation(count, seed, epoch)[offset : offset + size]
        yield epoch, indices
        start, size = start + len(indices), size - len(indices)


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of ``context + 1`` tokens, side by side behind an offset that is drawn anew each epoch."""

    tokens: np.ndarray  # (num_tokens,), uint8 or uint16, often a memory map
    context: int

    def __len__(self) -> int:
        """Windows in an epoch: those that fit behind the largest offset, so that all epochs are equally long."""
        return max(1, (len(self.tokens) + 1) // (self.context + 1) - 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Inputs and targets (size, context) of one step; a function of its arguments alone."""
        drawn = drawn_indices(len(self), step * size, size, seed)
        spare = len(self.tokens) - len(self) * (self.context + 1)
        offsets = min(self.context, spare) + 1  # one of so many is drawn for each epoch
        starts = [mixed("offset", seed, epoch) % offsets + indices * (self.context + 1) for epoch, indices in drawn]
        return windows(self.tokens, np.concatenate(starts), self.context)


@dataclass(frozen=True, eq=False)
class TokenData:
    train: TokenWindows
    held_out: np.ndarray  # (num_tokens,)
    shape: TokenShape

    @property
    def num_held_out(self) -> int:
        return (len(self.held_out) - 1) // self.shape.context

    def validation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """The held-out windows in order, ``size`` at a time and at most ``limit`` in all; the last may be fewer.

        Windows share one token, the last target of one and the first input of the next, so that every token but
        the first is predicted once. A rest shorter than a window is left out.
        """
        context = self.shape.context
        starts = np.arange(0, len(self.held_out) - context, context)[:limit]
        for first in range(0, len(starts), size):
            yield windows(self.held_out, starts[first : first + size], context)


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    """Inputs and targets (len(starts), context): the targets stand one token later."""
    drawn = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def token_data(train: np.ndarray, held_out: np.ndarray, context: int, vocab_size: int | None) -> TokenData:
    """Both parts; ValueError if one is too short or a token lies outside the vocabulary."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    for part, tokens in {"train": train, "validation": held_out}.items():
        if len(tokens) <= context:
            raise ValueError(
                f"the {part} part holds {len(tokens)} tokens, but one window of context {context} needs {context + 1}; "
                "take a longer file or a smaller context"
            )
    if train.dtype != held_out.dtype:
        raise ValueError(
            f"train and validation must both be text or both be uint16 tokens,"
            f" got {train.dtype} and {held_out.dtype}; convert one of them"
        )
    largest = max(int(train.max()), int(held_out.max()))
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but the data has token {largest}; give at least {largest + 1}")
    rounded = -(-(largest + 1) // 64) * 64
    shape = TokenShape(vocab_size or (256 if train.dtype == np.uint8 else rounded), context)
    return TokenData(TokenWindows(train, context), held_out, shape)


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
        return len(self.images.labels)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Images (size, channels, height, width) and labels (size,) of one step; a function of its arguments alone."""
        drawn = np.concatenate([indices for _, indices in drawn_indices(len(self), step * size, size, seed)])
        pixels = self.images.pixels[drawn]
        if self.augment:
            pixels = crop_and_flip(pixels, step * size, seed)
        return self.normalise(pixels), torch.from_numpy(self.images.labels[drawn])


@dataclass(frozen=True, eq=False)
class ImageData:
    train: ImageStream
    held_out: Labelled
    shape: ImageShape

    @property
    def num_held_out(self) -> int:
        return len(self.held_out.labels)

    def validation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        pixels, labels = self.held_out.pixels[:limit], self.held_out.labels[:limit]
        for first in range(0, len(labels), size):
            here = slice(first, first + size)
            yield self.train.normalise(pixels[here]), torch.from_numpy(labels[here].copy())


def image_data(train: Labelled, held_out: Labelled, *, augment: bool = False) -> ImageData:
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
