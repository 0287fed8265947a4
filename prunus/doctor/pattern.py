"""The pattern that zeros form, in one weight and over all of them."""

from collections.abc import Iterable, Sequence

import torch

from .counts import GROUPS, Counts
from .report import Layer

FEW = 1e-3  # below this share of zeros a weight is dense: training leaves some by itself
NEARLY = 0.01  # zeros beyond a pattern's own, which a live weight may be by chance
MIN_GROUPS, MIN_ROWS = 16, 4  # fewer agree by chance


def pattern_of(counts: Counts) -> str:
    """dense, empty, rows, columns, a tile, N:M, row-uniform or unstructured: the most specific that holds."""
    removed = counts.num - counts.num_kept
    if removed <= FEW * counts.num:
        return "dense"
    if not counts.num_kept:
        return "all zero"
    if block := _whole_lines(counts):
        return block
    if counts.tile and max(counts.tile) > 1:
        return f"{counts.tile[0]}x{counts.tile[1]} blocks"
    return _groups(counts) or _rows(counts) or "unstructured"


def overall(layers: Iterable[Layer]) -> str:
    """The pattern over all weights that are not dense: the most specific that all of them obey."""
    sparse = [layer for layer in layers if layer.pattern not in ("dense", "no elements")]
    if not sparse:
        return "dense"
    names = {layer.pattern for layer in sparse}
    if len(names) == 1 and (name := names.pop()) not in ("unstructured", "row-uniform"):
        return name
    if is_uniform(sparse):
        rows = all(layer.pattern == "row-uniform" for layer in sparse)
        return "row-uniform" if rows else "layer-uniform"
    kinds = {"unstructured" if layer.pattern == "row-uniform" else layer.pattern for layer in sparse}
    return "global" if kinds == {"unstructured"} else "mixed"


def is_uniform(layers: Sequence[Layer]) -> bool:
    """Whether one sparsity gives every layer its count: some s with ``|s n - removed|`` within the rounding."""
    low, high = 0.0, 1.0
    for layer in layers:
        slack = max(0.5, FEW * layer.num)
        low = max(low, (layer.num_removed - slack) / layer.num)
        high = min(high, (layer.num_removed + slack) / layer.num)
    return len(layers) > 1 and low <= high


def _whole_lines(counts: Counts) -> str | None:
    """Whether every removed element stands in a row or column that is removed whole."""
    rows, columns = counts.num_dead_rows, counts.num_dead_columns
    if counts.num_kept != (counts.shape[0] - rows) * (counts.shape[1] - columns):
        return None
    return "rows and columns" if rows and columns else "rows" if rows else "columns"


def _groups(counts: Counts) -> str | None:
    """N:M of the smallest M, shorter than a row, that all groups obey and nearly all fill."""
    for m in GROUPS:
        n = counts.most.get(m, m)
        num_groups = counts.num // m if counts.shape[1] > m else 0
        if 0 < n < m and num_groups >= MIN_GROUPS and counts.num_kept >= (1 - NEARLY) * n * num_groups:
            return f"{n}:{m}"
    return None


def _rows(counts: Counts) -> str | None:
    """row-uniform if nearly all rows keep the same number, and the others hardly fewer."""
    most = int(counts.rows.max())
    alike = int((counts.rows == most).sum())
    short = most * len(counts.rows) - counts.num_kept
    if most < counts.shape[1] and len(counts.rows) >= MIN_ROWS and alike >= (1 - 5 * NEARLY) * len(counts.rows):
        return "row-uniform" if short <= NEARLY * (counts.num - counts.num_kept) else None
    return None


def whole_heads(lines: torch.Tensor, head: int) -> int:
    """How many aligned runs of ``head`` lines are removed whole; ``lines`` counts what stays in each."""
    if head < 2 or len(lines) % head:
        return 0
    return int((lines.view(-1, head) == 0).all(1).sum())
