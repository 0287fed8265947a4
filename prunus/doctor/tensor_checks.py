"""Checks of one tensor: its counts, its pattern, and what is wrong with it by itself."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .contents import StoredTensor, mask_of
from .findings import Finding, Layer, percent
from .pattern import PIECE, Counts, count, nonzero, num_crowded, num_not_finite, pattern_of, whole_heads
from .roles import Role, owner_of, rows_of

ODD = 0.01  # share of zeros from which a matrix that should be dense is odd
ODD_VECTOR = 0.1  # of a vector, whose zeros are more often meant
ABSENT_ROWS = ("embedding", "head")  # rows of tokens that never occur may be zero
LINES = ("rows", "columns", "rows and columns")
QUERIES = ("q_proj", "k_proj", "v_proj", "query", "key", "value")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True)
class View:
    """What a tensor is checked against: its role and mask, the groups asked for, the width of a head."""

    role: Role
    mask: StoredTensor | None = None
    groups: tuple[int, int] | None = None
    head: int = 0


@dataclass(frozen=True)
class TensorCheck:
    """A layer, the counts of what stays in it, the number of groups that keep too many, and a hash of its bytes."""

    layer: Layer
    counts: Counts | None
    findings: list[Finding]
    num_crowded: int = 0
    hashed: str | None = None


def check_tensor(stored: StoredTensor, view: View) -> TensorCheck:
    """Everything about one tensor, which is in memory only here."""
    if not stored.is_float or prod(stored.shape) == 0:
        return _unread(stored, view)
    tensor, role = stored.load(), view.role
    alive = nonzero(tensor)
    findings = list(_not_finite(stored, num := num_not_finite(tensor)))
    facts: dict[str, Any] = {"num": tensor.numel(), "num_zeros": tensor.numel() - int(alive.count_nonzero())}
    facts["num_not_finite"] = num
    hashed = _hash(tensor) if role.kind in ABSENT_ROWS else None
    if tensor.ndim < 2:
        layer = _layer(stored, view, facts | {"pattern": "-"})
        findings += [_misfit(stored, view.mask)] if view.mask else []
        return TensorCheck(layer, None, findings + list(_odd(layer, facts["num_zeros"])), hashed=hashed)
    del tensor
    mask = mask_of(view.mask, stored.shape) if view.mask else None
    if view.mask and mask is None:
        findings.append(_misfit(stored, view.mask))
    if mask is not None:
        facts |= _against_mask(alive, mask)
        findings += _came_back(stored, facts["num_came_back"], facts["num_pruned"])
    counts = count(rows_of(alive, role.outputs))
    stays = counts if mask is None else count(rows_of(mask, role.outputs))
    facts |= _lines(counts, stored.shape, role) | {"pattern": pattern_of(stays)}
    notes = _notes(facts, counts, owner_of(stored.name), view)
    layer = _layer(stored, view, facts | {"notes": notes})
    findings += _dead(layer, counts) if layer.is_prunable else _odd(layer, _odd_zeros(layer, counts))
    crowded = _crowded(alive if mask is None else mask, view) if layer.is_prunable else 0
    return TensorCheck(layer, stays, findings, crowded, hashed)


def _layer(stored: StoredTensor, view: View, facts: Mapping[str, Any]) -> Layer:
    return Layer(stored.name, stored.shape, stored.dtype, view.role.kind, **facts)


def _unread(stored: StoredTensor, view: View) -> TensorCheck:
    """An empty tensor, or one of integers or booleans, whose zeros say nothing."""
    num = prod(stored.shape)
    facts = {"num": num, "num_zeros": 0, "pattern": "-" if num else "no elements"}
    findings = [_misfit(stored, view.mask)] if view.mask and num else []
    return TensorCheck(_layer(stored, view, facts), None, findings)


def _not_finite(stored: StoredTensor, number: int) -> Iterator[Finding]:
    if number and "mask" not in stored.name.rpartition(".")[2]:
        what = f"{number:,} of {prod(stored.shape):,} values are NaN or infinite"
        yield Finding("not-finite", stored.name, what, "go back to a checkpoint before they appeared")


def _misfit(stored: StoredTensor, mask: StoredTensor) -> Finding:
    what = f"its mask in {mask.file} is {mask.dtype} {mask.shape}, which is no mask of {stored.dtype} {stored.shape}"
    return Finding("bad-mask", stored.name, what, "take the masks that were saved with this model")


def _against_mask(alive: Tensor, mask: Tensor) -> dict[str, int]:
    kept, both = int(mask.count_nonzero()), int((alive & mask).count_nonzero())
    return {
        "num_pruned": mask.numel() - kept,
        "num_live_zeros": kept - both,
        "num_came_back": int(alive.count_nonzero()) - both,
    }


def _came_back(stored: StoredTensor, number: int, pruned: int) -> Iterator[Finding]:
    if number:
        what = f"{number:,} of {pruned:,} pruned weights are not zero"
        yield Finding("came-back", stored.name, what, "apply the masks, and hold them where the weights are trained")


def _lines(counts: Counts, shape: tuple[int, ...], role: Role) -> dict[str, int]:
    """Dead outputs and dead inputs; an input of a convolution is a channel, not one tap of its kernel."""
    columns = counts.columns
    if len(shape) > 2 and role.outputs == (0,):
        columns = columns.view(shape[1], -1).sum(1)
    return {"num_dead_rows": counts.num_dead_rows, "num_dead_columns": int((columns == 0).sum())}


def _notes(facts: Mapping[str, Any], counts: Counts, owner: str, view: View) -> tuple[str, ...]:
    notes = []
    if live := facts.get("num_live_zeros"):
        notes.append(f"{live:,} live zeros")
    lines = counts.rows if owner in QUERIES else counts.columns if owner in OUTPUTS else None
    if lines is not None and (heads := whole_heads(lines, view.head)):
        notes.append(f"{heads} whole heads")
    return tuple(notes)


def _dead(layer: Layer, counts: Counts) -> Iterator[Finding]:
    """Lines that died; where all that was removed are whole lines, that is the pattern and no fault."""
    if layer.pattern in LINES:
        return
    for kind, number, of, lines in (
        ("dead-rows", layer.num_dead_rows, counts.shape[0], counts.rows),
        ("dead-columns", layer.num_dead_columns, counts.shape[1], counts.columns),
    ):
        if number:
            first = ", ".join(str(int(i)) for i in (lines == 0).nonzero()[:3, 0])
            name, verb = ("output" if kind == "dead-rows" else "input"), ("s have" if number > 1 else " has")
            what = f"{number:,} {name}{verb} only zeros ({kind[5:]} {first}{', ...' if number > 3 else ''} of {of:,})"
            todo = f"prune less or per row, or cut them out for good; --allow {kind} if they are meant"
            yield Finding(kind, layer.name, what, todo)


def _odd_zeros(layer: Layer, counts: Counts) -> int:
    """Zeros that need a reason; whole rows of an embedding have one."""
    in_rows = counts.num_dead_rows * counts.shape[1] if layer.role in ABSENT_ROWS else 0
    return layer.num_zeros - in_rows


def _odd(layer: Layer, zeros: int) -> Iterator[Finding]:
    """A tensor that should be dense and is not."""
    if layer.role in ("weight", "other", "buffer"):
        return
    is_vector = len(layer.shape) < 2
    if is_vector and (zeros == layer.num or zeros < 2):
        return  # never trained, or chance
    if zeros >= (ODD_VECTOR if is_vector else ODD) * layer.num and zeros:
        reason = layer.role if layer.role in ("excluded", "without a mask") else f"{layer.role}, not pruned by default"
        what = f"{percent(zeros, layer.num)} of it is zero, but it should be dense ({reason})"
        todo = f"take it from the dense model; --include {layer.name} if it was meant"
        yield Finding("excluded", layer.name, what, todo)


def _crowded(keep: Tensor, view: View) -> int:
    if view.groups is None:
        return 0
    rows = rows_of(keep, view.role.outputs)
    n, m = view.groups
    return num_crowded(rows, n, m) if rows.shape[1] % m == 0 else -1


def _hash(tensor: Tensor) -> str:
    """Hash of the values' bits, dtype and shape."""
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), PIECE):
        made.update(flat[start : start + PIECE].contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()
