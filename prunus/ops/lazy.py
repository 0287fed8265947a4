"""Scores of one weight that exist already, or are computed chunk by chunk and never stored; scores as integers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .bits import CHUNK
from .formula import Formula
from .shard import Shard


# not frozen: an event makes one for every weight, and a frozen one takes three times as long to make
@dataclass(slots=True, eq=False)
class Lazy:
    """Scores of the weight ``name``: ``of(**reads, **constants)``, evaluated only where they are needed.

    ``reads`` are tensors that broadcast to ``weight``; they are cast to ``dtype`` and multiplied by
    their factor in ``scales`` first. A score that takes ``position`` is given the positions of its
    elements in the flattened weight. ``formula`` says how kernels compute a score with given constants, or
    that none does (None); a score that has one is element-wise. Any other is given whole tensors, and its
    scores of one weight are stored for a while. ``outputs`` are the dimensions that count outputs; each index
    of them is one row of inputs. Where ranks share the weight, all tensors are this rank's ``shard`` of them.
    """

    name: str
    weight: Tensor
    of: Callable[..., Tensor]
    reads: Mapping[str, Tensor]
    constants: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    takes_position: bool = False
    dtype: torch.dtype = torch.float32
    formula: Callable[[Mapping[str, Any]], Formula | None] | None = None
    outputs: tuple[int, ...] | None = (0,)
    shard: Shard | None = None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def numel(self) -> int:
        return self.weight.numel()

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shard.global_shape if self.shard else tuple(self.shape)

    @property
    def global_numel(self) -> int:
        return math.prod(self.shard.global_shape) if self.shard else self.weight.numel()

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def compared(self) -> torch.dtype:
        """The dtype that the scores are compared in: half precision is compared as float32."""
        return self.dtype if self.dtype in (torch.float64, torch.int64) else torch.float32

    @property
    def chunk_size(self) -> int:
        """Elements worked on at a time: what a CPU's cache holds, or what makes a GPU's launches worth while."""
        return CHUNK if self.device.type == "cpu" else 1 << 24

    def chunks(self, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Start and scores of consecutive runs of ``size`` elements of the flattened weight."""
        size = size or self.chunk_size
        if self.formula is None:
            scores = self.all().reshape(-1)
            yield from ((start, scores[start : start + size]) for start in range(0, self.numel, size))
            return
        flat = {name: tensor.reshape(-1) for name, tensor in self.reads.items() if tensor.shape == self.shape}
        for start in range(0, self.numel, size):
            stop = min(start + size, self.numel)
            reads = {
                name: flat[name][start:stop] if name in flat else self._spread(tensor, start, stop)
                for name, tensor in self.reads.items()
            }
            position = self._placed(torch.arange(start, stop, device=self.device)) if self.takes_position else None
            yield start, self._score(reads, position)

    def at(self, positions: Tensor) -> Tensor:
        if self.formula is None:
            return self.all().reshape(-1)[positions]
        reads = {
            name: tensor.view(-1)[positions]
            if tensor.shape == self.shape and tensor.is_contiguous()
            else tensor.expand(self.shape)[torch.unravel_index(positions, self.shape)]
            for name, tensor in self.reads.items()
        }
        return self._score(reads, self._placed(positions))

    def all(self) -> Tensor:
        scores = self._score(self.reads, self._all_positions() if self.takes_position else None)
        return scores if self.formula is None else scores.expand(self.shape)

    @property
    def num_inputs(self) -> int:
        outputs = self.outputs or ()
        return math.prod(size for dim, size in enumerate(self.global_shape) if dim not in outputs)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (row, inputs...): a view, unless dimensions of inputs lie between."""
        assert self.outputs is not None  # a selector refuses such weights
        if not self.outputs:
            return tensor.unsqueeze(0)
        return tensor.permute(_rows_first(self.outputs, tensor.ndim)).flatten(0, len(self.outputs) - 1)

    def from_rows(self, rows: Tensor) -> Tensor:
        return from_rows(rows, self.outputs or (), self.shape)

    def rows(self, parts: Sequence[slice] | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Which rows, and their scores (row, input): ``parts``, or about ``chunk_size`` elements at a time."""
        num_rows = len(self.rows_of(self.weight))
        step = max(1, self.chunk_size * num_rows // max(1, self.numel))
        if parts is None:
            parts = [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
        if self.formula is None:
            scores = self.rows_of(self.all())
            yield from ((part, scores[part].flatten(1)) for part in parts)
            return
        reads = {name: self.rows_of(tensor.expand(self.shape)) for name, tensor in self.reads.items()}
        position = self.rows_of(self._all_positions()) if self.takes_position else None
        for part in parts:
            here = {name: tensor[part].flatten(1) for name, tensor in reads.items()}
            yield part, self._score(here, None if position is None else position[part].flatten(1))

    def _score(self, reads: Mapping[str, Tensor], position: Tensor | None) -> Tensor:
        extra = {"position": position} if self.takes_position else {}
        cast = {
            name: tensor.to(self.dtype) * self.scales[name] if name in self.scales else tensor.to(self.dtype)
            for name, tensor in reads.items()
        }
        scores = self.of(**cast, **extra, **self.constants)
        # what a user's function gave must be one number for each element: broadcast, most would tie
        if self.formula is None and not (
            isinstance(scores, Tensor) and scores.shape == self.shape and not scores.is_complex()
        ):
            came = type(scores).__name__
            if isinstance(scores, Tensor):
                came = f"{scores.dtype}" if scores.shape == self.shape else f"a tensor of shape {tuple(scores.shape)}"
            problem = f"a score must give one real number for each element of {self.name}"
            raise ValueError(f"{problem}, a tensor of shape {tuple(self.shape)}, but yours gave {came}")
        return scores.to(self.compared)

    def _placed(self, positions: Tensor) -> Tensor:
        return self.shard.positions(positions) if self.shard else positions

    def _all_positions(self) -> Tensor:
        return self._placed(torch.arange(self.numel, device=self.device)).view(self.shape)

    def _spread(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor broadcast to the weight, copying only their rows."""
        inner = self.shape[-1]
        first = start // inner
        rows = tensor.expand(self.shape).flatten(0, -2)[first : -(-stop // inner)]
        return rows.reshape(-1)[start - first * inner : stop - first * inner]


Sources = Sequence[Lazy]  # of the weights that are cut together


def stored(name: str, scores: Tensor) -> Lazy:
    """Source of scores that exist already; float64 and integers are compared as they are."""
    if scores.is_complex():
        raise ValueError(f"scores are real numbers, but those of {name} are {scores.dtype}")
    scores = scores.detach().view(1) if scores.ndim == 0 else scores.detach()
    dtype = torch.int64 if not scores.is_floating_point() else torch.promote_types(scores.dtype, torch.float32)
    outputs = (0,) if scores.ndim > 1 else ()
    return Lazy(name, scores, _itself, {"scores": scores}, dtype=dtype, formula=_as_stored, outputs=outputs)


def alike(sources: list[Lazy]) -> list[Lazy]:
    """The same sources, compared in one dtype: float64 where they differ."""
    if len({source.compared for source in sources}) < 2:
        return sources
    return [replace(source, dtype=torch.float64) for source in sources]


def check_elementwise(source: Lazy) -> None:
    """Raise ValueError if a part of the weight gets other scores when it is scored alone: so would a rank's."""
    dim = next((dim for dim, size in enumerate(source.shape) if size > 1), None)
    if dim is None or source.takes_position or source.shard is None:
        return
    size = [length - length // 2 if i == dim else length for i, length in enumerate(source.shape)]
    half = replace(source.shard, global_shape=tuple(source.shape), offset=(0,) * len(size), shape=tuple(size))
    reads = {name: half.of(tensor) for name, tensor in source.reads.items()}
    alone = replace(source, weight=half.of(source.weight), reads=reads, shard=None).all()
    if not torch.equal(alone.nan_to_num(), half.of(source.all()).nan_to_num()):
        problem = f"the score of an element of {source.name} depends on others, which other ranks may hold"
        raise ValueError(f"{problem}; over sharded weights a score must be element-wise")


def _itself(scores: Tensor) -> Tensor:
    return scores


def _as_stored(_: Mapping[str, Any]) -> Formula:
    return Formula("itself", {"w": "scores"})


def sortable(scores: Tensor) -> Tensor:
    """Signed integers of the width of ``scores`` that stand in the same order; -0.0 equals 0.0."""
    if not scores.is_floating_point():
        return scores.long()
    width = {4: torch.int32, 8: torch.int64}[scores.element_size()]
    words = (scores + 0.0).view(width)
    return words ^ ((words >> (8 * words.element_size() - 1)) & torch.iinfo(width).max)


def from_sortable(key: int, dtype: torch.dtype) -> float | int:
    """The score whose sortable integer is ``key``."""
    if not dtype.is_floating_point:
        return key
    width = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    word = key if key >= 0 else key ^ torch.iinfo(width).max
    return torch.tensor(word, dtype=width).view(dtype).item()


def as_rows(tensor: Tensor, outputs: Sequence[int]) -> Tensor:
    """The tensor as a matrix (outputs, inputs); the rows of groups and of experts follow each other."""
    num_rows = math.prod(tensor.shape[dim] for dim in outputs)
    rows = tensor.permute(_rows_first(outputs, tensor.ndim))
    return rows.reshape(num_rows, tensor.numel() // max(1, num_rows))


def from_rows(rows: Tensor, outputs: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Rows of inputs in the shape of the weight that they are of."""
    order = _rows_first(outputs, len(shape))
    return rows.reshape([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _rows_first(outputs: Sequence[int], ndim: int) -> list[int]:
    return [*outputs, *(dim for dim in range(ndim) if dim not in outputs)]
