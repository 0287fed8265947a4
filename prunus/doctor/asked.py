"""What was asked for: by the caller, or by the run that a checkpoint comes from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..schedule import SHAPES
from .report import KINDS
from .source import Source

PATTERNS = ("global", "layer", "row")
ALLOCATE = {"uniform": "layer", "row": "row", "2:4": "2:4"}  # others promise the total alone


@dataclass(frozen=True)
class Asked:
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


def of_run(source: Source) -> dict[str, Any]:
    """Sparsity, pattern and patterns of names that a training checkpoint was made with, as far as it says."""
    run = source.run
    found: dict[str, Any] = {
        name: tuple(run[name]) for name in ("include", "exclude") if isinstance(run.get(name), list | tuple)
    }
    if run.get("score", "none") == "none" or not isinstance(run.get("sparsity"), float | int):
        return found
    sparsity = sparsity_at(run, source.state)
    if sparsity is None:
        source.notes.append("the run is on its way to its sparsity, which is not checked: an event is due or was late")
        return found
    if sparsity == 0:
        return found | ({"sparsity": 0.0} if source.masks else {})  # without masks a zero is just a value
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
