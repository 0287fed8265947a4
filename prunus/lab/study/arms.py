"""Arms: what a study compares, as changes of fields of one base run. Loads no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# what makes two numbers comparable: data, order, evaluation set and the weights that are counted
SAME = "model data validation vocab_size context augment include exclude eval_every eval_size".split()
OF_THE_STUDY = {
    "out": "--out",
    "save_every": "--save-every",
    "device": "--devices",
    "resume": "the same command again",
}
ELSEWHERE = OF_THE_STUDY | {"sparsity": "--sparsity", "seed": "--seeds"}
NOT_ASKED = ("log_every", "track")


def slug(name: str) -> str:
    """The name as a part of a folder's: lower case, with a dash for everything but letters, digits and dots."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c == ".") else "-" for c in name.lower())
    return "-".join(part for part in kept.split("-") if part.strip("."))


@dataclass(frozen=True)
class Arm:
    """``changes`` are fields of Run; ``against`` is what it is compared with, magnitude of its recipe if empty."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""

    def __post_init__(self) -> None:
        if not slug(self.name):
            raise ValueError(f"an arm needs a name with letters or digits, got {self.name!r}")
        for name in self.changes:
            if name in SAME:
                raise ValueError(f"arm {self.name} changes {name}, which all arms share; make another study of it")
            if name in ELSEWHERE or name in NOT_ASKED:
                where = f"; it is given by {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                raise ValueError(f"{name} is nothing that an arm changes{where}: arm {self.name}")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "changes": dict(self.changes), "against": self.against}


CONTROLS = (
    Arm("dense", {"score": "none"}),
    Arm("random", {"score": "random"}),
    Arm("magnitude", {"score": "magnitude"}),
)


def with_controls(arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """Dense, random and magnitude, which every comparison contains, then the others, each once."""
    found = {arm.name: arm for arm in CONTROLS}
    for arm in arms:
        if arm.name in found and dict(found[arm.name].changes) != dict(arm.changes):
            raise ValueError(f"two arms are called {arm.name}: {said(found[arm.name])} and {said(arm)}; rename one")
        found[arm.name] = arm
    _check_names(found)
    return tuple(found.values())


def _check_names(arms: Mapping[str, Arm]) -> None:
    folders: dict[str, str] = {}
    for arm in arms.values():
        other = folders.setdefault(slug(arm.name), arm.name)
        if other != arm.name:
            raise ValueError(f"arms {other!r} and {arm.name!r} would share a folder; rename one")
        if arm.against and arm.against not in arms:
            raise ValueError(f"arm {arm.name} is against {arm.against!r}, which is no arm: {', '.join(arms)}")


def said(arm: Arm) -> str:
    return " ".join(f"{name}={value}" for name, value in arm.changes.items()) or "no change"
