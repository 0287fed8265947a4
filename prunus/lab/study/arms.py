"""Arms: what a study compares, as changes of fields of one base run, from code, text or TOML. Loads no torch."""

import tomllib
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..run import Run, ScoreName

# what makes two numbers comparable: data, order, evaluation set and the weights that are counted
SAME = "model data validation vocab_size context augment include exclude eval_every eval_size".split()
OF_THE_STUDY = {
    "out": "--out",
    "save_every": "--save-every",
    "device": "--devices",
    "resume": "the same command again",
}
ELSEWHERE = OF_THE_STUDY | {"sparsity": "--sparsity", "seed": "--seeds"}
UNCHANGED = ("log_every", "track")
TYPES = get_type_hints(Run)


def slug(name: str) -> str:
    """The name as part of a folder's name: lower case, with a dash for all but letters, digits and dots."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c == ".") else "-" for c in name.lower())
    return "-".join(part for part in kept.split("-") if part.strip("."))


@dataclass(frozen=True)
class Arm:
    """``changes`` are fields of Run; it is compared with ``against``, or with magnitude of its recipe if empty."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""

    def __post_init__(self) -> None:
        if not slug(self.name):
            raise ValueError(f"an arm needs a name with letters or digits, got {self.name!r}")
        for name in self.changes:
            if name in SAME:
                raise ValueError(f"arm {self.name} changes {name}, which all arms share; make another study of it")
            if name in ELSEWHERE or name in UNCHANGED:
                where = f"; it is given by {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                raise ValueError(f"{name} is nothing that an arm changes{where}: arm {self.name}")

    def __str__(self) -> str:
        """What it changes."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "no change"

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
            raise ValueError(f"two arms are called {arm.name}: {found[arm.name]} and {arm}; rename one")
        found[arm.name] = arm
    folders: dict[str, str] = {}
    for arm in found.values():
        other = folders.setdefault(slug(arm.name), arm.name)
        if other != arm.name:
            raise ValueError(f"arms {other!r} and {arm.name!r} would share a folder; rename one")
        if arm.against and arm.against not in found:
            raise ValueError(f"arm {arm.name} is against {arm.against!r}, which is no arm: {', '.join(found)}")
    return tuple(found.values())


def score_arm(score: str) -> Arm:
    """The arm for one of the names in ``--scores``."""
    if score in ("dense", "none"):
        return CONTROLS[0]
    if score not in get_args(ScoreName):
        raise ValueError(f"there is no score {score!r}; the scores are {', '.join(get_args(ScoreName))}")
    return Arm(score, {"score": score})


def parse_arm(text: str) -> Arm:
    """An arm from ``name: field=value field=value``; ``against=NAME`` may be among them, and NAME may have spaces."""
    name, colon, rest = text.partition(":")
    words, against = [], []
    for word in rest.split():
        if word.startswith("against="):
            against.append(word.removeprefix("against="))
        elif against and not ("=" in word and word.partition("=")[0] in TYPES):
            against.append(word)
        else:
            words.append(word)
    changes = parse_fields(words, f"arm {name.strip()}")
    if not colon or not changes or against == [""]:
        raise ValueError(f"an arm is written as 'name: field=value field=value against=ARM', got {text!r}")
    return Arm(name.strip(), changes, " ".join(against))


def parse_fields(words: Iterable[str], where: str) -> dict[str, Any]:
    """Values by field of Run from ``field=value``; ``where`` begins an error message."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in found:
            raise ValueError(f"{where}: expected field=value, each field once, got {word!r}")
        literal: Any = value
        with suppress(tomllib.TOMLDecodeError):  # a number, true, false or list as TOML writes it, or .95; else text
            literal = tomllib.loads(f"x = {'0' * value.startswith('.')}{value}")["x"]
        found[name] = typed(name, literal, where)
    return found


def read_base(path: Path) -> tuple[Run, list[Arm], tuple[float, ...]]:
    """Base run, arms and sparsities of a TOML file: fields of Run at the top, and ``[[arm]]`` with name and fields.

    A score in the file is an arm too.
    """
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; --base takes a TOML file with fields of a run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    tables = values.pop("arm", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) and "name" in table for table in tables):
        raise ValueError(f"{path}: an arm is a table [[arm]] with a name and the fields that it changes")
    if "seed" in values:
        raise ValueError(f"{path}: the seeds of a study are said by --seeds ('5,' is seed 5 alone); leave seed out")
    base = Run(**{name: typed(name, value, str(path)) for name, value in values.items()})
    arms = [score_arm(base.score)] if "score" in values else []
    for table in tables:
        name, against = str(table.pop("name")), str(table.pop("against", ""))
        arms.append(Arm(name, {key: typed(key, value, f"arm {name}") for key, value in table.items()}, against))
    return base, arms, (base.sparsity,) if base.sparsity and "sparsity" in values else ()


def typed(name: str, value: Any, where: str) -> Any:
    """``value`` as the field ``name`` of Run has it; ValueError where the field does not take it."""
    if option := OF_THE_STUDY.get(name):
        raise ValueError(f"{where}: {name} is nothing that runs of a study choose; leave it out and say {option}")
    if name not in TYPES:
        near = get_close_matches(name, TYPES, n=1)
        raise ValueError(f"{where}: a run has no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    hint = TYPES[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple and isinstance(value, list | str):
            return (value,) if isinstance(value, str) else tuple(map(str, value))
        if kind in (Path, str) and isinstance(value, str):
            return kind(value)
        if kind in (int, float, bool) and type(value) is kind:
            return value
    if float in kinds and type(value) is int:
        return float(value)
    choices = [str(c) for kind in kinds for c in (get_args(kind) if get_origin(kind) is Literal else (kind,))]
    names = ", ".join(choice.removeprefix("<class '").removesuffix("'>") for choice in choices)
    raise ValueError(f"{where}: {name} cannot be {value!r}; it takes {names}")
