"""The pattern that zeros form: counts over one tensor seen as (outputs, inputs), and what they tell."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .findings import TensorReport

GROUPS = (4, 8, 16, 32)
TILES = (64, 32, 16, 8, 4)
CHUNK = 1 << 20  # elements worked on at a time
FEW = 1e-3  # below this share of zeros a weight is dense: training leaves some by itself
NEARLY = 0.01  # zeros beyond a pattern's own, which a live weight may be by chance
MIN_GROUPS, MIN_ROWS = 16, 4  # fewer agree by chance


@dataclass(frozen=True)
class Counts:
    """Of what stays: counts by row and column, the most in any group of M where M divides a row, whole tiles."""

    shape: tuple[int, int]
    rows: Tensor  # (rows,) how many stay
    columns: Tensor  # (columns,)
    most: dict[int, int] = field(default_factory=dict)
    tile: tuple[int, int] | None = None  # largest tile that is everywhere all kept or all removed

    @property
    def num(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def num_kept(self) -> int:
        return int(self.rows.sum())

    @property
    def num_dead_rows(self) -> int:
        return int((self.rows == 0).sum()) if self.shape[1] else 0


def count_kept(keep: Tensor) -> Counts:
    num_rows, num_columns = keep.shape
    rows = torch.zeros(num_rows, dtype=torch.int64)
    columns = torch.zeros(num_columns, dtype=torch.int64)
    most = {m: 0 for m in GROUPS if num_columns and num_columns % m == 0}
    widths = set(most)
    for start, chunk in row_chunks(keep):
        columns += chunk.float().sum(0).long()  # exact, and faster than a sum of booleans
        groups = chunk.view(torch.uint8)
        for m in (2, *most) if most else ():
            groups = groups[:, 0::2] + groups[:, 1::2]
            if m in most:
                most[m] = max(most[m], int(groups.max()))
            if m in widths and not ((groups == 0) | (groups == m)).all():
                widths.discard(m)
        rows[start : start + len(chunk)] = groups.sum(1)
    return Counts((num_rows, num_columns), rows, columns, most, _tile(keep, widths))


def plain_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def widened(tensor: Tensor) -> Tensor:
    """A float8 as float32, since few operations know it, pairs of float4 as bytes; any other tensor as it is."""
    if plain_dtype(tensor.dtype).startswith("float4"):
        return tensor.view(torch.uint8)
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def is_nonzero(tensor: Tensor) -> Tensor:
    """Where a tensor is not zero; -0.0 is zero, NaN is not."""
    return widened(tensor) != 0


def row_chunks(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Neighbouring rows of about ``CHUNK`` elements, each time with the first one's number."""
    step = max(1, CHUNK // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield start, matrix[start : start + step].contiguous()


def num_crowded(keep: Tensor, n: int, m: int) -> int:
    """How many groups of ``m`` consecutive elements of a row keep more than ``n``."""
    return sum(int((chunk.unflatten(1, (-1, m)).sum(2) > n).sum()) for _, chunk in row_chunks(keep))


def num_not_finite(tensor: Tensor) -> int:
    flat, number = tensor.reshape(-1), 0
    for start in range(0, len(flat), CHUNK):
        chunk = widened(flat[start : start + CHUNK])
        if not chunk.sum(dtype=torch.float64).isfinite():  # a sum is cheap, and shows one value that is not finite
            number += int((~chunk.isfinite()).sum())
    return number


def _tile(keep: Tensor, widths: set[int]) -> tuple[int, int] | None:
    """The largest square tile that is all kept or all removed, else the longest such run in a row."""
    num_rows, num_columns = keep.shape
    if not widths or not num_rows:
        return None
    for size in TILES:
        if num_rows % size == 0 and num_columns % size == 0 and keep.numel() > size * size:
            inside = keep.view(num_rows // size, size, num_columns // size, size).sum((1, 3), dtype=torch.int32)
            if ((inside == 0) | (inside == size * size)).all():
                return size, size
    return 1, max(widths)


def pattern_of(counts: Counts) -> str:
    """dense, all zero, rows, columns, a tile, N:M, row-uniform or unstructured: the most specific that holds."""
    removed, (num_rows, num_columns) = counts.num - counts.num_kept, counts.shape
    rows, columns = counts.num_dead_rows, int((counts.columns == 0).sum())
    if removed <= FEW * counts.num:
        return "dense"
    if not counts.num_kept:
        return "all zero"
    if counts.num_kept == (num_rows - rows) * (num_columns - columns):  # all that is removed are whole lines
        return "rows and columns" if rows and columns else "rows" if rows else "columns"
    if counts.tile and max(counts.tile) > 1:
        return f"{counts.tile[0]}x{counts.tile[1]} blocks"
    for m in GROUPS:  # the smallest, shorter than a row, that all groups obey and nearly all fill
        n = counts.most.get(m, m)
        num_groups = counts.num // m if num_columns > m else 0
        if 0 < n < m and num_groups >= MIN_GROUPS and counts.num_kept >= (1 - NEARLY) * n * num_groups:
            return f"{n}:{m}"
    most = int(counts.rows.max())
    alike, short = int((counts.rows == most).sum()), most * num_rows - counts.num_kept
    is_uniform = num_rows >= MIN_ROWS and alike >= (1 - 5 * NEARLY) * num_rows and short <= NEARLY * removed
    return "row-uniform" if most < num_columns and is_uniform else "unstructured"


def overall(layers: Iterable[TensorReport]) -> str:
    """The pattern over all weights that are not dense: the most specific that all of them obey."""
    sparse = [layer for layer in layers if layer.pattern not in ("dense", "no elements")]
    names = {layer.pattern for layer in sparse}
    if not sparse:
        return "dense"
    if len(names) == 1 and not names & {"unstructured", "row-uniform"}:
        return names.pop()
    low, high = 0.0, 1.0  # sparsities that give every layer its count, within the rounding
    for layer in sparse:
        slack = max(0.5, FEW * layer.num)
        low = max(low, (layer.num_removed - slack) / layer.num)
        high = min(high, (layer.num_removed + slack) / layer.num)
    if len(sparse) > 1 and low <= high:
        return "row-uniform" if names == {"row-uniform"} else "layer-uniform"
    return "global" if names <= {"unstructured", "row-uniform"} else "mixed"
