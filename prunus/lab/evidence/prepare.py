"""Data of the study that must be made once: tokens of a text by a model's own tokenizer, and images as one file."""

from pathlib import Path
from typing import Any

import numpy as np

from ..data.image_files import read_cifar10
from .cases import IMAGES

NUM_CALIBRATION = 2048  # images to draw calibration samples from


def write_tokens(folder: Path, text: Path) -> list[Path]:
    """Tokens of both halves of a text, cut between two lines: ``calib.u16`` and ``valid.u16``."""
    from transformers import AutoTokenizer

    packed = sorted(folder.glob("*.gguf"))
    if not packed:
        raise ValueError(f"{folder} holds no .gguf file, whose tokenizer makes tokens of the text")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=packed[0].name, local_files_only=True)
    whole = text.read_text(encoding="utf-8")
    middle = whole.index("\n", len(whole) // 2) + 1
    found = []
    for name, half in (("calib", whole[:middle]), ("valid", whole[middle:])):
        tokens = np.array(tokenizer.encode(half, add_special_tokens=False))
        if tokens.max() > 0xFFFF:
            raise ValueError(f"the vocabulary of {folder} does not fit into uint16: token {tokens.max()}")
        found.append(folder / f"{name}.u16")
        tokens.astype("<u2").tofile(found[-1])
    return found


def write_images(folder: Path, cifar10: Path) -> Path:
    """The test images of CIFAR-10 and the first training images, with their labels."""
    train, test = read_cifar10(cifar10)
    np.savez_compressed(
        folder / IMAGES,
        test_pixels=test.pixels,
        test_labels=test.labels,
        calib_pixels=train.pixels[:NUM_CALIBRATION],
        calib_labels=train.labels[:NUM_CALIBRATION],
    )
    return folder / IMAGES
