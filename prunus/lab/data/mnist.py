"""MNIST and its kin: four idx files, plain or gz (http://yann.lecun.com/exdb/mnist)."""

import math
from pathlib import Path

import numpy as np

from .files import read_bytes
from .images import NUM_CLASSES, Labelled

PARTS = ("train", "t10k")


def is_mnist(folder: Path) -> bool:
    """Whether any of the four files is there, so that a missing one can be named."""
    return any(folder.glob("*-idx[13]-ubyte*"))


def read_mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """Train and validation images of a folder."""
    train, held_out = (_read_part(folder, part) for part in PARTS)
    return train, held_out


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
