"""Runs and arms from text: ``field=value`` on a command line, and TOML files. Loads no torch."""

import tomllib
import types
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..run import Run, ScoreName
from .arms import CONTROLS, OF_THE_STUDY, Arm

TYPES = get_type_hints(Run)


def score_arm(score: str) -> Arm:
    """The arm that a name of ``--scores`` stands for."""
    if score in ("dense", "none"):
        return CONTROLS[0]
    if score not in get_args(ScoreName):
        raise ValueError(f"there is no score {score!r}; the scores are {', '.join(get_args(ScoreName))}")
    return Arm(score, {"score": score})


def parse_arm(text: str) -> Arm:
    """An arm from ``name: field=value field=value``, among them ``against=NAME``, in which there may be spaces."""
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


def parse_fields(words: Iterable[str], who: str) -> dict[str, Any]:
    """Values by field of Run from ``field=value``."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in found:
            raise ValueError(f"{who}: expected field=value, each field once, got {word!r}")
        found[name] = typed(name, _literal(value), who)
    return found


def _literal(text: str) -> Any:
    """A number, true, false or list as TOML writes it, or .95; any other text is itself."""
    try:
        return tomllib.loads(f"x = {'0' * text.startswith('.')}{text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def read_base(path: Path) -> tuple[Run, list[Arm], tuple[float, ...]]:
    """Base run, arms and sparsities of a TOML file: fields of Run at the top, and ``[[arm]]`` with name and fields.

    A score that the file names is an arm too.
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
    return base, [*arms, *map(_table_arm, tables)], (base.sparsity,) if base.sparsity and "sparsity" in values else ()


def _table_arm(table: dict[str, Any]) -> Arm:
    name, against = str(table.pop("name")), str(table.pop("against", ""))
    return Arm(name, {key: typed(key, value, f"arm {name}") for key, value in table.items()}, against)


def typed(name: str, value: Any, who: str) -> Any:
    """``value`` as the field ``name`` of Run holds it, or one line that says what it takes."""
    if where := OF_THE_STUDY.get(name):
        raise ValueError(f"{who}: {name} is nothing that runs of a study choose; leave it out and say {where}")
    if name not in TYPES:
        near = get_close_matches(name, TYPES, n=1)
        raise ValueError(f"{who}: a run has no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    for kind in _kinds(TYPES[name]):
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple and isinstance(value, list | str):
            return (value,) if isinstance(value, str) else tuple(map(str, value))
        if kind in (Path, str) and isinstance(value, str):
            return kind(value)
        if kind in (int, float, bool) and type(value) is kind:
            return value
    if float in _kinds(TYPES[name]) and type(value) is int:
        return float(value)
    raise ValueError(f"{who}: {name} cannot be {value!r}; it takes {_choices(TYPES[name])}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> str:
    names = [str(c) for kind in _kinds(hint) for c in (get_args(kind) if get_origin(kind) is Literal else (kind,))]
    return ", ".join(name.removeprefix("<class '").removesuffix("'>") for name in names)
