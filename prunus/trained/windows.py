"""Batches to train on, by number: windows of tokens or rows of arrays, in an order of their own, read when needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Rows, TokenFile, num_rows, num_windows, rows_of_tokens, windows_at


@dataclass(frozen=True)
class TrainingBatches(Sequence[Any]):
    """Every sample once, ``size`` a batch, in the order of ``seed``; what is left over is left out."""

    samples: TokenFile | Rows
    model: Any
    size: int
    length: int = 0  # tokens of a window
    start: Sequence[int] = ()  # tokens that open every window
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < self.size:
            what = f"windows of {self.length} tokens" if isinstance(self.samples, TokenFile) else "samples"
            raise ValueError(f"there are {self.num_samples} {what}, fewer than a batch of {self.size}; give more data")

    @property
    def num_samples(self) -> int:
        if isinstance(self.samples, TokenFile):
            return num_windows(self.samples.ids, self.length, self.start)
        return num_rows(self.samples)

    def __len__(self) -> int:
        return self.num_samples // self.size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        chosen = self.order[number * self.size : (number + 1) * self.size]
        if isinstance(self.samples, TokenFile):
            return rows_of_tokens(self.model, windows_at(self.samples.ids, chosen, self.length, self.start))
        return {name: array[torch.from_numpy(chosen)] for name, array in self.samples.items()}

    @cached_property
    def order(self) -> np.ndarray:
        return np.random.default_rng(self.seed).permutation(self.num_samples)


def in_batches(samples: Tensor | Rows, size: int) -> list[Any]:
    if isinstance(samples, Tensor):
        return list(samples.split(size))
    firsts = range(0, num_rows(samples), size)
    return [{name: array[first : first + size] for name, array in samples.items()} for first in firsts]
