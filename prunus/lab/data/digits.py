"""The 1797 handwritten digits of 8 x 8 that come with scikit-learn."""

from typing import Any

import numpy as np

from .images import Labelled

HELD_OUT = 5  # every fifth image, since the set has no split of its own


def read_digits() -> tuple[Labelled, Labelled]:
    """Train and validation images, with levels from 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise ValueError("'digits' needs scikit-learn; pip install 'prunus[vision]', or give a folder") from missing
    digits: Any = load_digits()
    pixels, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT == 0
    return Labelled(pixels[~held_out], labels[~held_out]), Labelled(pixels[held_out], labels[held_out])
