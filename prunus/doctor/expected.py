"""What was asked for, by the caller or by the run of a checkpoint, and whether the weights hold to it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedule import SHAPES
from .contents import Contents
from .findings import KINDS, Finding, total
from .tensor_checks import TensorCheck

PATTERNS = ("global", "layer", "row")
ALLOCATE = {"uniform": "layer", "row": "row", "2:4": "2:4"}  # others promise the total alone
MASKED = "prune it anew with exact counts, or finish its training"
NAMED = 4  # names in a hint
LIVE = "prune it anew with exact counts; --masks tells pruned weights from live zeros"


@dataclass(frozen=True)
class Expected:
    """A promise to hold a model to; None where nothing was said."""

    sparsity: float | None = None
    pattern: str | None = None  # global, layer, row or N:M
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), got {self.sparsity}")
        if self.pattern is not None and self.pattern not in PATTERNS and self.groups is None:
            raise ValueError(f"pattern must be {', '.join(PATTERNS)} or N:M such as 2:4, got {self.pattern!r}")
        if self.groups and self.sparsity is not None:
            n, m = self.groups
            if abs(1 - n / m - self.sparsity) > 1e-9:
                raise ValueError(f"{n}:{m} is a sparsity of {1 - n / m:g}, but {self.sparsity:g} was asked for")
        if unknown := sorted(set(self.allow) - set(KINDS)):
            raise ValueError(f"allow takes kinds of findings, got {unknown[0]!r}; they are {', '.join(KINDS)}")

    @property
    def groups(self) -> tuple[int, int] | None:
        """n and m of an N:M pattern."""
        match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", self.pattern or "")
        if not match or not 0 < int(match[1]) < int(match[2]):
            return None
        return int(match[1]), int(match[2])


def of_run(contents: Contents) -> dict[str, Any]:
    """Sparsity, pattern and patterns of names that a training checkpoint was made with, as far as it says."""
    run = contents.run
    found: dict[str, Any] = {
        name: tuple(run[name]) for name in ("include", "exclude") if isinstance(run.get(name), list | tuple)
    }
    if run.get("score", "none") == "none" or not isinstance(run.get("sparsity"), float | int):
        return found
    sparsity = sparsity_at(run, contents.state)
    if sparsity is None:
        why = "an event is due or was late"
        contents.notes.append(f"the run is on its way to its sparsity, which is not checked: {why}")
        return found
    if sparsity == 0:
        return found | ({"sparsity": 0.0} if contents.masks else {})  # without masks a zero is just a value
    return found | {"sparsity": sparsity, "pattern": ALLOCATE.get(str(run.get("allocate")), "global")}


def sparsity_at(run: Mapping[str, Any], state: Mapping[str, Any]) -> float | None:
    """What the last event up to the checkpoint's step asked for; None if an event was put off."""
    final, step = float(run["sparsity"]), state.get("step")
    if state.get("due") or not isinstance(step, int):
        return None
    schedule = run.get("schedule")
    begin, end = (_step(run, name) for name in ("begin", "end"))
    if schedule == "constant":
        return final if step >= 1 else 0.0
    if begin is None or end is None:
        return None
    if schedule == "one_shot":
        return final if step >= max(begin, 1) else 0.0
    if schedule not in SHAPES or begin >= end:
        return None
    if step >= end:
        return final
    if step < max(begin, 1):
        return 0.0
    if run.get("spam"):
        return None  # an event waits for moments that were reset, and then asks for more
    event = begin + (step - begin) // int(run.get("every", 1)) * int(run.get("every", 1))
    return final * SHAPES[schedule]((event - begin) / (end - begin))


def _step(run: Mapping[str, Any], name: str) -> int | None:
    """A moment of the run as a step: JSON keeps apart 1 and 1.0, a fraction of the run."""
    moment, steps = run.get(name), run.get("steps")
    if isinstance(moment, int) or not isinstance(steps, int) or not isinstance(moment, float):
        return moment if isinstance(moment, int) else None
    return round(moment * round(steps * float(run.get("budget_scale", 1.0))))


def check_expected(expected: Expected, checks: Sequence[TensorCheck]) -> list[Finding]:
    """Findings where prunable weights differ from what was expected."""
    weights = [one for one in checks if one.layer.is_prunable and one.counts is not None]
    found = _groups(expected, weights) if expected.groups else []
    if expected.sparsity is None:
        return found
    ways = {"global": _whole, "layer": _layers, "row": _rows}
    if expected.pattern in ways:
        return ways[expected.pattern](expected.sparsity, weights)
    if expected.groups:
        return found + _whole(expected.sparsity, weights)
    tried = [way(expected.sparsity, weights) for way in ways.values()]
    return [] if not all(tried) else tried[0]


def _whole(sparsity: float, weights: Sequence[TensorCheck]) -> list[Finding]:
    """``round(s N)`` of all N."""
    layers = [one.layer for one in weights]
    removed, num, todo = total(layers, "num_removed"), total(layers, "num"), _todo(weights)
    if removed < round(sparsity * num) and (dense := _dense(weights)):
        named = ", ".join(dense[:NAMED]) + (f" and {len(dense) - NAMED} more" if len(dense) > NAMED else "")
        todo = f"no zero is in {named}: --exclude PATTERN leaves out what was meant to be dense, else {todo}"
    return _count("all weights", removed, sparsity, num, todo)


def _layers(sparsity: float, weights: Sequence[TensorCheck]) -> list[Finding]:
    """``round(s n)`` of every weight."""
    todo, dense, found = _todo(weights), _dense(weights), []
    for one in weights:
        hint = (
            f"--exclude {one.layer.name} if it was meant to be dense, else {todo}" if one.layer.name in dense else todo
        )
        found += _count(one.layer.name, one.layer.num_removed, sparsity, one.layer.num, hint)
    return found


def _rows(sparsity: float, weights: Sequence[TensorCheck]) -> list[Finding]:
    """``round(s n)`` of every row."""
    todo, found = _todo(weights), []
    for one in weights:
        assert one.counts is not None
        due = round(sparsity * one.counts.shape[1])
        removed = one.counts.shape[1] - one.counts.rows
        if wrong := int((removed != due).sum()):
            what = (
                f"{wrong:,} of {len(removed):,} rows have not the {due:,} zeros of {one.counts.shape[1]:,} "
                f"asked for: they have {int(removed.min()):,} to {int(removed.max()):,}"
            )
            found.append(Finding("rows", one.layer.name, what, todo))
    return found


def _groups(expected: Expected, weights: Sequence[TensorCheck]) -> list[Finding]:
    assert expected.groups is not None
    (n, m), found = expected.groups, []
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
    due = round(sparsity * num)
    if removed == due:
        return []
    kind, word = ("too-dense", "fewer") if removed < due else ("too-sparse", "more")
    what = (
        f"{removed:,} of {num:,} weights are removed, {abs(removed - due):,} {word} than "
        f"the {due:,} that {sparsity:g} asks for"
    )
    return [Finding(kind, where, what, todo)]


def _dense(weights: Sequence[TensorCheck]) -> list[str]:
    """Names of weights that nothing was removed from, where something was from others."""
    names = [one.layer.name for one in weights if not one.layer.num_removed]
    return names if len(names) < len(weights) else []


def _todo(weights: Sequence[TensorCheck]) -> str:
    return MASKED if any(one.layer.num_pruned is not None for one in weights) else LIVE
