"""Checks of one tensor: its counts, its pattern, and what is wrong with it by itself."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from ..ops.lazy import as_rows
from .contents import StoredTensor, is_nonzero, stored_mask
from .findings import Finding, TensorReport, share
from .pattern import CHUNK, Counts, count_kept, num_crowded, num_not_finite, pattern_of
from .roles import Role, embeds_tokens

ODD = 0.01  # share of zeros from which a matrix that should be dense is odd
ODD_VECTOR = 0.1  # of a vector, whose zeros are more often meant
ABSENT_ROWS = ("embedding", "head")  # rows of tokens that never occur may be zero


@dataclass(frozen=True)
class TensorCheck:
    """A layer, the counts of what stays in it, the number of groups that keep too many, and a hash of its bytes."""

    layer: TensorReport
    counts: Counts | None = None
    findings: list[Finding] = field(default_factory=list)
    num_crowded: int = 0  # -1 where its rows cannot be split into the groups
    hashed: str | None = None


def check_tensor(
    stored: StoredTensor, role: Role, mask: StoredTensor | None, groups: tuple[int, int] | None
) -> TensorCheck:
    """Everything about one tensor, which is in memory only here; ``groups`` are n and m that were asked for."""
    num, findings = prod(stored.shape), []
    layer = TensorReport(stored.name, stored.shape, stored.dtype, role.kind, num, 0, "-" if num else "no elements")
    if mask and num and (not stored.is_float or len(stored.shape) < 2):
        findings.append(_bad_mask(stored, mask))
    if not stored.is_float or num == 0:  # zeros of integers and booleans say nothing
        return TensorCheck(layer, None, findings)
    tensor = stored.load()
    alive, not_finite = is_nonzero(tensor), num_not_finite(tensor)
    hashed = _hash(tensor) if role.kind in ABSENT_ROWS else None
    del tensor
    layer = replace(layer, num_zeros=num - int(alive.count_nonzero()), num_not_finite=not_finite)
    if not_finite and "mask" not in stored.name.rpartition(".")[2]:
        what = f"{not_finite:,} of {num:,} values are NaN or infinite"
        findings.append(Finding("not-finite", stored.name, what, "go back to a checkpoint before they appeared"))
    if alive.ndim < 2:
        return TensorCheck(layer, None, [*findings, *_odd(layer, layer.num_zeros)], hashed=hashed)
    kept = alive
    if mask:
        fitting = stored_mask(mask, stored.shape)
        if fitting is None:
            findings.append(_bad_mask(stored, mask))
        else:
            layer, kept = _with_mask(layer, alive, fitting), fitting
            findings += _came_back(layer)
    check = _check_matrix(alive, kept, layer, role, groups)
    return replace(check, findings=findings + check.findings, hashed=hashed)


def _with_mask(layer: TensorReport, alive: Tensor, mask: Tensor) -> TensorReport:
    kept, both = int(mask.count_nonzero()), int((alive & mask).count_nonzero())
    came_back = layer.num - layer.num_zeros - both
    notes = (f"{kept - both:,} live zeros",) if kept > both else ()
    counted = {"num_pruned": layer.num - kept, "num_live_zeros": kept - both, "num_came_back": came_back}
    return replace(layer, **counted, notes=notes)


def _came_back(layer: TensorReport) -> Iterator[Finding]:
    if layer.num_came_back:
        what = f"{layer.num_came_back:,} of {layer.num_pruned:,} pruned weights are not zero"
        todo = "apply the masks, and hold them where the weights are trained"
        yield Finding("came-back", layer.name, what, todo)


def _check_matrix(
    alive: Tensor, kept: Tensor, layer: TensorReport, role: Role, groups: tuple[int, int] | None
) -> TensorCheck:
    """The lines, groups and pattern of the zeros of a weight of two or more dimensions, and of what its mask keeps."""
    counts, rows = count_kept(as_rows(alive, role.outputs)), as_rows(kept, role.outputs)
    kept_counts = counts if kept is alive else count_kept(rows)
    channels = counts.columns  # an input of a convolution is a channel, not one tap of its kernel
    if alive.ndim > 2 and role.outputs == (0,):
        channels = channels.view(alive.shape[1], -1).sum(1)
    dead = {"num_dead_rows": counts.num_dead_rows, "num_dead_columns": int((channels == 0).sum())}
    layer = replace(layer, **dead, pattern=pattern_of(kept_counts))
    if layer.is_prunable:
        n, m = groups or (0, 1)
        crowded = 0 if not groups else num_crowded(rows, n, m) if rows.shape[1] % m == 0 else -1
        return TensorCheck(layer, kept_counts, list(_dead(layer, counts)), crowded)
    expected = counts.num_dead_rows * counts.shape[1] if layer.role in ABSENT_ROWS else 0
    if layer.role == "embedding" and not embeds_tokens(layer.name):  # in a table of sines the first row has sin 0
        expected += 0 if counts.rows[0] == 0 else counts.shape[1] - int(counts.rows[0])
    return TensorCheck(layer, kept_counts, list(_odd(layer, layer.num_zeros - expected)))


def _bad_mask(stored: StoredTensor, mask: StoredTensor) -> Finding:
    what = f"its mask in {mask.file} is {mask.dtype} {mask.shape}, which is no mask of {stored.dtype} {stored.shape}"
    return Finding("bad-mask", stored.name, what, "take the masks that were saved with this model")


def _dead(layer: TensorReport, counts: Counts) -> Iterator[Finding]:
    """Lines that died; where all that was removed are whole lines, that is the pattern and no fault."""
    if layer.pattern in ("rows", "columns", "rows and columns"):
        return
    for kind, number, of, lines in (
        ("dead-rows", layer.num_dead_rows, counts.shape[0], counts.rows),
        ("dead-columns", layer.num_dead_columns, counts.shape[1], counts.columns),
    ):
        if number and not (kind == "dead-columns" and layer.pattern == "row-uniform"):  # inputs that no row wants
            first = ", ".join(str(int(i)) for i in (lines == 0).nonzero()[:3, 0])
            name, verb = ("output" if kind == "dead-rows" else "input"), ("s have" if number > 1 else " has")
            what = f"{number:,} {name}{verb} only zeros ({kind[5:]} {first}{', ...' if number > 3 else ''} of {of:,})"
            todo = f"prune less or per row, or cut them out for good; --allow {kind} if they are meant"
            yield Finding(kind, layer.name, what, todo)


def _odd(layer: TensorReport, zeros: int) -> Iterator[Finding]:
    """A tensor that should be dense and is not."""
    if layer.role in ("weight", "left dense", "router", "other", "buffer"):
        return
    is_vector = len(layer.shape) < 2
    if is_vector and (zeros == layer.num or zeros < 2):
        return  # never trained, or chance
    if zeros >= (ODD_VECTOR if is_vector else ODD) * layer.num and zeros:
        asked = ("excluded", "not named by only", "without a mask")
        reason = layer.role if layer.role in asked else f"{layer.role}, not pruned by default"
        what = f"{share(zeros, layer.num)} of it is zero, but it should be dense ({reason})"
        todo = f"take it from the dense model; --include {layer.name} if it was meant"
        if layer.role == "not named by only":
            todo = f"take it from the dense model; --only {layer.name} too if it was meant"
        yield Finding("excluded", layer.name, what, todo)


def _hash(tensor: Tensor) -> str:
    """Hash of the values' bits, dtype and shape."""
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        made.update(flat[start : start + CHUNK].contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()
