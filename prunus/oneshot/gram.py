"""Gram matrices of layer inputs: what repair knows of the calibration tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.wide_products import add_product_ as _add_product_
from ..ranks import Ranks

BLOCK = 2048  # tokens of one product: sums run over blocks that begin at fixed tokens, wherever batches end
PANEL = {"cpu": 384, "cuda": 2048}  # columns of one product of a symmetric matrix


@dataclass(frozen=True)
class Moments:
    """Second moments of the inputs X (in, tokens) that a group of layers shares, summed over tokens, and means.

    ``cross`` and ``dense`` bring in the inputs X_d of the same tokens in the dense model; both are None where X_d = X.
    """

    gram: Tensor  # X X^T, (in, in)
    cross: Tensor | None  # X_d X^T
    dense: Tensor | None  # X_d X_d^T
    num_tokens: int
    mean: Tensor | None = None  # of X, (in,)
    dense_mean: Tensor | None = None  # of X_d; None where X_d = X


class Gram:
    """Sums up ``Moments`` in blocks of fixed size: neither the size of batches nor padding shows in the bits."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._block: Tensor | None = None  # (1 or 2 streams, BLOCK, in): tokens that wait for their block to fill
        self._filled = 0  # tokens in it
        self._num_multiplied = 0  # products of a block that are in the sums already
        self._sums: list[Tensor] = []  # X X^T, X_d X^T, X_d X_d^T
        self._totals = torch.empty(0)  # (1 or 2 streams, in): sums of X and X_d

    def add(self, x: Tensor, x_dense: Tensor | None = None, valid: Tensor | None = None) -> None:
        """Take up inputs of shape (..., in); ``valid`` (...) is False where a token does not count."""
        self.take(Tokens([x] if x_dense is None else [x, x_dense], valid))

    @torch.no_grad()
    def take(self, tokens: "Tokens") -> None:
        """Take up tokens, which are removed as they are taken: where memory runs out, it can be called again."""
        tokens.flatten_()
        streams = tokens.streams
        x = streams[0]
        if self._block is None:
            self._start(len(streams), x)
        assert self._block is not None
        while True:
            if self._filled == BLOCK:
                self._multiply()
            size = min(BLOCK - self._filled, len(streams[0]))
            if not size:
                return
            for block, stream in zip(self._block, streams, strict=True):
                block[self._filled : self._filled + size] = stream[:size]
            self._filled += size
            self.num_tokens += size
            streams[:] = [stream[size:] for stream in streams]

    def _start(self, num_streams: int, x: Tensor) -> None:
        dtype, num_inputs = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        self._sums = [x.new_zeros(num_inputs, num_inputs, dtype=dtype) for _ in range(2 * num_streams - 1)]
        self._totals = x.new_zeros(num_streams, num_inputs, dtype=dtype)
        self._block = x.new_empty(num_streams, BLOCK, num_inputs)

    @torch.no_grad()
    def moments(self) -> Moments:
        """The sums over all tokens; nothing can be added afterwards."""
        if self._block is None:
            raise ValueError("no tokens were added, so there is no Gram matrix")
        self._multiply()
        for total in self._sums[::2]:
            _mirror_(total)
        mean, dense_mean = (*(self._totals / self.num_tokens), None)[:2]
        self._block = None
        gram, cross, dense = (*self._sums, None, None)[:3]
        assert gram is not None and mean is not None
        return Moments(gram, cross, dense, self.num_tokens, mean, dense_mean)

    def _multiply(self) -> None:
        """Add the products of the block, and empty it; those that were added before memory ran out are left out."""
        assert self._block is not None
        x, *dense = self._block[:, : self._filled]
        products = _gram_products(self._sums[0], x)
        for x_dense in dense:
            products += [(self._sums[1], x_dense, x), *_gram_products(self._sums[2], x_dense)]
        with float32_products(x.device):
            for product in products[self._num_multiplied :]:
                _add_product_(*product)
                self._num_multiplied += 1
        self._totals += self._block[:, : self._filled].sum(1, dtype=self._totals.dtype)
        self._num_multiplied = self._filled = 0


@torch.no_grad()
def sum_over_ranks_(grams: Sequence[Gram], ranks: Ranks, device: torch.device) -> None:
    """Make the sums those of the tokens of all ranks; a rank may have no tokens for some of them."""
    own = torch.tensor([[gram.num_tokens, *gram._totals.shape[:1], gram._totals.shape[-1]] for gram in grams])
    is_wide = torch.tensor([gram._totals.dtype == torch.float64 for gram in grams])
    forms = ranks.stacked(torch.cat([own, is_wide[:, None]], 1))
    for gram, num_tokens, (num_streams, num_inputs, wide) in zip(
        grams, forms[:, :, 0].sum(0).tolist(), forms[:, :, 1:].amax(0).tolist(), strict=True
    ):
        if not num_tokens:
            continue
        if gram._block is None:
            dtype = torch.float64 if wide else torch.float32
            gram._start(num_streams, torch.empty(0, num_inputs, dtype=dtype, device=device))
        gram._multiply()
        gram._sums, gram._totals = [ranks.sum_(total) for total in gram._sums], ranks.sum_(gram._totals)
        gram.num_tokens = num_tokens


@dataclass
class Tokens:
    """Inputs (..., in) of one stream or two; ``valid`` (...) is False where a token does not count."""

    streams: list[Tensor]
    valid: Tensor | None = None

    def flatten_(self) -> None:
        """Make them (token, in), which may copy them; nothing is left to do the second time."""
        valid = self.valid
        self.streams = [s.reshape(-1, s.shape[-1]) if valid is None else s[valid.bool()] for s in self.streams]
        self.valid = None


def _gram_products(total: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What adds x^T x to the panels of ``total`` on and right of its diagonal."""
    return [(total[here, here.start :], x[:, here], x[:, here.start :]) for here in _panels(total)]


def _mirror_(total: Tensor) -> None:
    """Write what is right of the diagonal below it."""
    for columns in _panels(total):
        total[columns.stop :, columns] = total[columns, columns.stop :].T


def _panels(total: Tensor) -> Iterator[slice]:
    width = PANEL.get(total.device.type, 2048)
    for start in range(0, len(total), width):
        yield slice(start, min(start + width, len(total)))


@contextmanager
def float32_products(device: torch.device, tf32: bool = False) -> Iterator[None]:
    """Products of float32 matrices on CUDA are float32 inside, or TF32, whatever is set outside."""
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    before = getattr(settings, "fp32_precision", None)  # since torch 2.9; the older switch cannot always be read there
    if before is None:
        before = "tf32" if settings.allow_tf32 else "ieee"
    settings.allow_tf32 = tf32
    try:
        yield
    finally:
        settings.allow_tf32 = before == "tf32"
        if before == "none":
            settings.fp32_precision = before
