"""The final masks of a run in a small file, and how much two runs' pruned weights overlap."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...files.atomic import write_atomically
from ...ops import bits

if TYPE_CHECKING:
    from ..trainer import Training

NAME = "masks.safetensors"
ONES = np.array([value.bit_count() for value in range(256)], np.int64)  # set bits of a byte


def save_masks(folder: Path, masks: Mapping[str, Tensor]) -> None:
    """Write boolean masks as packed bits, one tensor a weight, and their shapes into the header."""
    header = {name: "x".join(map(str, mask.shape)) for name, mask in masks.items()}
    content = save({name: bits.pack(mask.cpu()) for name, mask in masks.items()}, header)
    write_atomically(folder / NAME, lambda file: file.write(content))


def keep_masks(training: "Training") -> None:
    """Write the masks of a finished training into its folder; a dense one has none."""
    if training.pruner is not None:
        save_masks(training.run.out, training.pruner.masks)


def jaccard(first: Path, second: Path) -> float | None:
    """``|A and B| / |A or B|`` of what two runs pruned: 1 for the same weights; None where masks are not kept."""
    if not (first / NAME).is_file() or not (second / NAME).is_file():
        return None
    (ours, total), (theirs, _) = _read(first / NAME), _read(second / NAME)
    if ours.keys() != theirs.keys():
        raise ValueError(f"{first / NAME} and {second / NAME} hold masks of different weights")
    # a set bit is a kept weight, and the unused bits of the last byte are zero
    kept_by_both = sum(int(ONES[ours[name] & theirs[name]].sum()) for name in ours)
    kept_by_one = sum(int(ONES[ours[name] | theirs[name]].sum()) for name in ours)
    return (total - kept_by_one) / (total - kept_by_both) if total > kept_by_both else 1.0


def _read(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Packed bits by name, and how many weights they are for."""
    try:
        with safe_open(path, "np") as file:
            total = sum(math.prod(map(int, shape.split("x"))) for shape in file.metadata().values())
            return {name: file.get_tensor(name) for name in file.keys()}, total  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}; delete it, and the overlap is left out") from error
