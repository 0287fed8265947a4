"""Windows of tokens: shuffled without replacement for training, in order for validation."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .order import Batch, mixed, pieces
from .shape import TokenShape


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of ``context + 1`` tokens, side by side behind an offset that is drawn anew each epoch."""

    tokens: np.ndarray  # (num_tokens,), uint8 or uint16, often a memory map
    context: int

    def __len__(self) -> int:
        """Windows in an epoch: those that fit behind the largest offset, so that all epochs are equally long."""
        return max(1, (len(self.tokens) + 1) // (self.context + 1) - 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Inputs and targets (size, context) of one step, whatever was asked for before."""
        drawn = pieces(len(self), step * size, size, seed)
        starts = [self._offset(seed, epoch) + indices * (self.context + 1) for epoch, indices in drawn]
        return windows(self.tokens, np.concatenate(starts), self.context)

    def _offset(self, seed: int, epoch: int) -> int:
        spare = len(self.tokens) - len(self) * (self.context + 1)
        return mixed("offset", seed, epoch) % (min(self.context, spare) + 1)


@dataclass(frozen=True, eq=False)
class TokenData:
    train: TokenWindows
    held_out: np.ndarray  # (num_tokens,)
    shape: TokenShape

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
    rows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    drawn = torch.from_numpy(rows)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def token_data(train: np.ndarray, held_out: np.ndarray, context: int, vocab_size: int | None) -> TokenData:
    """Both parts, once they are found long enough and their tokens within the vocabulary."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    for part, tokens in {"train": train, "validation": held_out}.items():
        if len(tokens) <= context:
            raise ValueError(
                f"the {part} part holds {len(tokens)} tokens, but one window of context {context} takes {context + 1};"
                f" take a longer file or a smaller context"
            )
    shape = TokenShape(_vocabulary(train, held_out, vocab_size), context)
    return TokenData(TokenWindows(train, context), held_out, shape)


def _vocabulary(train: np.ndarray, held_out: np.ndarray, given: int | None) -> int:
    if train.dtype != held_out.dtype:
        raise ValueError(
            f"train and validation must both be text or both be uint16 tokens,"
            f" got {train.dtype} and {held_out.dtype}; convert one of them"
        )
    largest = max(int(train.max()), int(held_out.max()))
    if given is not None and largest >= given:
        raise ValueError(f"vocab_size is {given}, but the data holds token {largest}; give at least {largest + 1}")
    rounded = -(-(largest + 1) // 64) * 64
    return given or (256 if train.dtype == np.uint8 else rounded)
