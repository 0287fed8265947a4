"""Checks of one tensor: its counts, its pattern, and what is wrong with it by itself."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from ..ops.lazy import as_rows
from .contents import Role, StoredTensor, embeds_tokens, nonzero, owner_of, stored_mask, widened
from .findings import Finding, TensorReport, percent
from .pattern import CHUNK, Counts, count, num_crowded, num_not_finite, num_whole_heads, pattern_of

ODD = 0.01  # share of zeros from which a matrix that should be dense is odd
ODD_VECTOR = 0.1  # of a vector, whose zeros are more often meant
ABSENT_ROWS = ("embedding", "head")  # rows of tokens that never occur may be zero
LINES = ("rows", "columns", "rows and columns")
QUERIES = ("q_proj", "k_proj", "v_proj", "query", "key", "value")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True)
class Context:
    """What a tensor is checked against: its role and mask, the N:M groups asked for, the width of a head."""

    role: Role
    mask: StoredTensor | None = None
    groups: tuple[int, int] | None = None
    head: int = 0


@dataclass(frozen=True)
class TensorCheck:
    """A layer, the counts of what stays in it, the number of groups that keep too many, and a hash of its bytes."""

    layer: TensorReport
    counts: Counts | None = None
    findings: list[Finding] = field(default_factory=list)
    num_crowded: int = 0  # -1 where its rows cannot be split into the groups
    hashed: str | None = None


def check_tensor(stored: StoredTensor, context: Context) -> TensorCheck:
    """Everything about one tensor, which is in memory only here."""
    num, role, findings = prod(stored.shape), context.role.kind, []
    layer = TensorReport(stored.name, stored.shape, stored.dtype, role, num, 0, "-" if num else "no elements")
    if context.mask and num and (not stored.is_float or len(stored.shape) < 2):
        findings.append(_bad_mask(stored, context.mask))
    if not stored.is_float or num == 0:  # zeros of integers and booleans say nothing
        return TensorCheck(layer, None, findings)
    tensor = stored.load()
    alive, not_finite = nonzero(tensor), num_not_finite(tensor)
    hashed = _hash(tensor) if role in ABSENT_ROWS else None
    num_sines = _num_sines(tensor) if role == "embedding" and not embeds_tokens(stored.name) else 0
    del tensor
    layer = replace(layer, num_zeros=num - int(alive.count_nonzero()), num_not_finite=not_finite)
    if not_finite and "mask" not in stored.name.rpartition(".")[2]:
        what = f"{not_finite:,} of {num:,} values are NaN or infinite"
        findings.append(Finding("not-finite", stored.name, what, "go back to a checkpoint before they appeared"))
    if alive.ndim < 2:
        return TensorCheck(layer, None, [*findings, *_odd(layer, layer.num_zeros)], hashed=hashed)
    check = _check_matrix(alive, layer, stored, context, num_sines)
    return replace(check, findings=findings + check.findings, hashed=hashed)


def _num_sines(table: Tensor) -> int:
    """Zeros of the first row of a table of sines and cosines: sin 0, beside cos 0 = 1."""
    first = widened(table[0])
    is_angle_zero = bool(((first == 0) | (first == 1)).all()) and bool((first == 1).any())
    return int((first == 0).sum()) if is_angle_zero else 0


def _check_matrix(
    alive: Tensor, layer: TensorReport, stored: StoredTensor, context: Context, num_sines: int
) -> TensorCheck:
    """A weight of two or more dimensions against its mask, and the lines, groups and pattern of its zeros."""
    findings, notes, outputs = [], [], context.role.outputs
    mask = stored_mask(context.mask, stored.shape) if context.mask else None
    if mask is not None:
        kept, both = int(mask.count_nonzero()), int((alive & mask).count_nonzero())
        pruned, came_back = layer.num - kept, layer.num - layer.num_zeros - both
        layer = replace(layer, num_pruned=pruned, num_live_zeros=kept - both, num_came_back=came_back)
        notes += [f"{kept - both:,} live zeros"] if kept > both else []
        if came_back:
            what = f"{came_back:,} of {pruned:,} pruned weights are not zero"
            todo = "apply the masks, and hold them where the weights are trained"
            findings.append(Finding("came-back", stored.name, what, todo))
    elif context.mask:
        findings.append(_bad_mask(stored, context.mask))
    counts, stays = count(as_rows(alive, outputs)), as_rows(alive if mask is None else mask, outputs)
    kept_counts = counts if mask is None else count(stays)
    channels = counts.columns  # an input of a convolution is a channel, not one tap of its kernel
    if alive.ndim > 2 and outputs == (0,):
        channels = channels.view(stored.shape[1], -1).sum(1)
    owner = owner_of(stored.name)
    lines = counts.rows if owner in QUERIES else counts.columns if owner in OUTPUTS else None
    if lines is not None and (heads := num_whole_heads(lines, context.head)):
        notes.append(f"{heads} whole heads")
    dead_columns, crowded = int((channels == 0).sum()), 0
    layer = replace(layer, num_dead_rows=counts.num_dead_rows, num_dead_columns=dead_columns)
    layer = replace(layer, pattern=pattern_of(kept_counts), notes=tuple(notes))
    if not layer.is_prunable:
        in_rows = counts.num_dead_rows * counts.shape[1] if layer.role in ABSENT_ROWS else 0  # which have a reason
        findings += _odd(layer, layer.num_zeros - in_rows - num_sines)
    else:
        findings += _dead(layer, counts)
        if context.groups:
            n, m = context.groups
            crowded = num_crowded(stays, n, m) if stays.shape[1] % m == 0 else -1
    return TensorCheck(layer, kept_counts, findings, crowded)


def _bad_mask(stored: StoredTensor, mask: StoredTensor) -> Finding:
    what = f"its mask in {mask.file} is {mask.dtype} {mask.shape}, which is no mask of {stored.dtype} {stored.shape}"
    return Finding("bad-mask", stored.name, what, "take the masks that were saved with this model")


def _dead(layer: TensorReport, counts: Counts) -> Iterator[Finding]:
    """Lines that died; where all that was removed are whole lines, that is the pattern and no fault."""
    if layer.pattern in LINES:
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
        reason = layer.role if layer.role in ("excluded", "without a mask") else f"{layer.role}, not pruned by default"
        what = f"{percent(zeros, layer.num)} of it is zero, but it should be dense ({reason})"
        todo = f"take it from the dense model; --include {layer.name} if it was meant"
        yield Finding("excluded", layer.name, what, todo)


def _hash(tensor: Tensor) -> str:
    """Hash of the values' bits, dtype and shape."""
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        made.update(flat[start : start + CHUNK].contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()
