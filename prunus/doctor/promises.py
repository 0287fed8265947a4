"""Achieved against asked: over all weights, by weight, by row, by group."""

from collections.abc import Sequence

from .asked import Asked
from .look import Seen
from .report import Finding, total

MASKED = "prune it anew with exact counts, or finish its training"
NAMED = 4  # names in a hint
LIVE = "prune it anew with exact counts; --masks tells pruned weights from live zeros"


def check(asked: Asked, seen: Sequence[Seen]) -> list[Finding]:
    """Findings where prunable weights differ from what was asked."""
    weights = [one for one in seen if one.layer.is_prunable and one.counts is not None]
    found = _groups(asked, weights) if asked.groups else []
    if asked.sparsity is None:
        return found
    ways = {"global": _whole, "layer": _layers, "row": _rows}
    if asked.pattern in ways:
        return ways[asked.pattern](asked.sparsity, weights)
    if asked.groups:
        return found + _whole(asked.sparsity, weights)
    tried = [way(asked.sparsity, weights) for way in ways.values()]
    return [] if not all(tried) else tried[0]


def _whole(sparsity: float, weights: Sequence[Seen]) -> list[Finding]:
    """``round(s N)`` of all N."""
    layers = [one.layer for one in weights]
    removed, num, todo = total(layers, "num_removed"), total(layers, "num"), _todo(weights)
    if removed < round(sparsity * num) and (dense := _dense(weights)):
        named = ", ".join(dense[:NAMED]) + (f" and {len(dense) - NAMED} more" if len(dense) > NAMED else "")
        todo = f"no zero is in {named}: --exclude PATTERN leaves out what was meant to be dense, else {todo}"
    return _count("all weights", removed, sparsity, num, todo)


def _layers(sparsity: float, weights: Sequence[Seen]) -> list[Finding]:
    """``round(s n)`` of every weight."""
    todo, dense, found = _todo(weights), _dense(weights), []
    for one in weights:
        hint = (
            f"--exclude {one.layer.name} if it was meant to be dense, else {todo}" if one.layer.name in dense else todo
        )
        found += _count(one.layer.name, one.layer.num_removed, sparsity, one.layer.num, hint)
    return found


def _rows(sparsity: float, weights: Sequence[Seen]) -> list[Finding]:
    """``round(s n)`` of every row."""
    todo, found = _todo(weights), []
    for one in weights:
        assert one.counts is not None
        expected = round(sparsity * one.counts.shape[1])
        removed = one.counts.shape[1] - one.counts.rows
        if wrong := int((removed != expected).sum()):
            what = (
                f"{wrong:,} of {len(removed):,} rows have not the {expected:,} zeros of {one.counts.shape[1]:,} "
                f"asked for: they have {int(removed.min()):,} to {int(removed.max()):,}"
            )
            found.append(Finding("rows", one.layer.name, what, todo))
    return found


def _groups(asked: Asked, weights: Sequence[Seen]) -> list[Finding]:
    assert asked.groups is not None
    (n, m), found = asked.groups, []
    for one in weights:
        assert one.counts is not None
        if one.num_crowded < 0:
            what = f"its rows of {one.counts.shape[1]:,} cannot be split into groups of {m}"
            found.append(Finding("groups", one.layer.name, what, "exclude it, or choose another N:M"))
        elif one.num_crowded:
            what = f"{one.num_crowded:,} of {one.counts.num // m:,} groups of {m} inputs keep more than {n}"
            found.append(Finding("groups", one.layer.name, what, f"prune it to {n}:{m}, or exclude it"))
    return found


def _count(where: str, removed: int, sparsity: float, num: int, todo: str) -> list[Finding]:
    expected = round(sparsity * num)
    if removed == expected:
        return []
    kind, word = ("too-dense", "fewer") if removed < expected else ("too-sparse", "more")
    what = (
        f"{removed:,} of {num:,} weights are removed, {abs(removed - expected):,} {word} than "
        f"the {expected:,} that {sparsity:g} asks for"
    )
    return [Finding(kind, where, what, todo)]


def _dense(weights: Sequence[Seen]) -> list[str]:
    """Names of weights that nothing was removed from, where something was from others."""
    names = [one.layer.name for one in weights if not one.layer.num_removed]
    return names if len(names) < len(weights) else []


def _todo(weights: Sequence[Seen]) -> str:
    return MASKED if any(one.layer.num_pruned is not None for one in weights) else LIVE
