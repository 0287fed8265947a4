"""Final masks of a run in a small file, and how much of two runs' pruned weights is the same."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from safetensors.torch import save
from torch import Size, Tensor

from ...files import write_atomically

if TYPE_CHECKING:
    from ..trainer import Training

NAME = "masks.safetensors"


def save_masks(folder: Path, packed: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> None:
    """Write packed bits, one tensor a weight, and their shapes into the header."""
    header = {name: "x".join(map(str, shapes[name])) for name in packed}
    content = save({name: bits.cpu() for name, bits in packed.items()}, header)
    write_atomically(folder / NAME, lambda file: file.write(content))


def keep_masks(training: "Training") -> None:
    """The masks of a finished training, into its folder; a dense one has none."""
    if training.pruner is not None:
        state = training.pruner.state_dict()["masks"]
        shapes = {name: weight.shape for name, weight in training.model.named_parameters()}
        save_masks(training.run.out, state, shapes)


def jaccard(first: Path, second: Path) -> float | None:
    """``|A and B| / |A or B|`` of what two runs pruned: 1 for the same weights; None where masks are not kept."""
    if not (first / NAME).is_file() or not (second / NAME).is_file():
        return None
    (ours, total), (theirs, _) = _read(first / NAME), _read(second / NAME)
    if ours.keys() != theirs.keys():
        raise ValueError(f"{first / NAME} and {second / NAME} hold masks of different weights")
    # a set bit is a kept weight, and the unused bits of the last byte are zero
    kept_by_both = sum(_ones(ours[name] & theirs[name]) for name in ours)
    kept_by_one = sum(_ones(ours[name] | theirs[name]) for name in ours)
    return (total - kept_by_one) / (total - kept_by_both) if total > kept_by_both else 1.0


def _read(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Packed bits by name, and how many weights they are for."""
    with safe_open(path, "np") as file:
        shapes = file.metadata()
        return {name: file.get_tensor(name) for name in file.keys()}, sum(map(_size, shapes.values()))  # noqa: SIM118


def _size(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def _ones(packed: np.ndarray) -> int:
    return int(ONES[packed].sum())


ONES = np.array([value.bit_count() for value in range(256)], np.int64)
