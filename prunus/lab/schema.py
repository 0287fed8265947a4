"""What the fields of a folder's files may hold. They are checked once, where they are read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 1e100  # beyond it sums and products of a report would overflow
EXACT = 2**53


@dataclass(frozen=True)
class Kind:
    """A value by itself, named as messages do."""

    name: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """Missing, null, or what ``of`` says."""

    of: Any


@dataclass(frozen=True)
class Named:
    """An object whose fields have any name and are all of one kind."""

    of: Any


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= EXACT


ANY = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
WHOLE = Kind("a whole number", is_whole)
COUNT = Kind("a whole number from 0 on", lambda value: is_whole(value) and value >= 0)
AMOUNT = Kind("a number from 0 on", lambda value: is_number(value) and value >= 0)
SHARE = Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)

# losses and qualities are missing on purpose: a run that diverged has any number there, and charts show a gap
Spec = Kind | Maybe | Named | list[Any] | dict[str, Any]
LINE: Spec = {"sparsity": Maybe(SHARE), "zeros": Maybe([COUNT]), "layers": Maybe(Named(COUNT))}
RESULT: Spec = {"seconds": AMOUNT, "peak_memory": AMOUNT, "sparsity": SHARE, "num_parameters": COUNT}
FAILED: Spec = {"message": TEXT}
CELL: Spec = {
    "arm": TEXT,
    "cold": FLAG,
    "machine": Maybe(TEXT),
    "data": Maybe(Named(TEXT)),
    "peak_mib": Maybe(AMOUNT),
    "wall_seconds": Maybe(AMOUNT),
    "examples": Maybe(COUNT),
    "at_once": Maybe(COUNT),
    "overlap": Maybe(SHARE),
    "overlap_with": Maybe(TEXT),
}
STUDY: Spec = {
    "hash": TEXT,
    "base": {},
    "data": Named(TEXT),
    "arms": [{"name": TEXT, "changes": {}, "against": TEXT, "cells": [[ANY]]}],
}
_ROW: Spec = {name: Maybe(TEXT) for name in ("against", "verdict", "dense", "same_as")} | {
    "arm": TEXT,
    "sparsity": SHARE,
    "values": [ANY],
    "difference": Maybe({}),
    "cost": Maybe({}),
    "budget_scale": AMOUNT,
    "against_budget": Maybe(AMOUNT),
    "beside": Maybe([TEXT]),
}
_PROBLEM: Spec = {"arm": TEXT, "sparsity": SHARE, "seed": WHOLE, "message": TEXT}
STUDY_RESULT: Spec = {
    "rows": [_ROW],
    "failed": [_PROBLEM],
    "off_target": [_PROBLEM],
    "num_runs": COUNT,
    "num_finished": COUNT,
}


def check(value: Any, spec: Spec, where: str, name: str) -> None:
    """ValueError if ``value`` is not what ``spec`` says; unknown fields are allowed."""
    if isinstance(spec, Maybe):
        return None if value is None else check(value, spec.of, where, name)
    is_list = isinstance(spec, list)
    if isinstance(spec, Kind):
        holds, expected = spec.holds(value), spec.name
    else:
        holds, expected = isinstance(value, list if is_list else dict), "a list" if is_list else "an object"
    if not holds:
        shown = json.dumps(value)
        raise ValueError(f"{where}{name} should be {expected}, but is {shown[:40]}{'...' * (len(shown) > 40)}")
    inner: dict[Any, Spec] = {}
    if isinstance(spec, list):
        inner = dict.fromkeys(range(len(value)), spec[0])
    elif isinstance(spec, Named):
        inner = dict.fromkeys(value, spec.of)
    elif isinstance(spec, dict):
        inner, value = spec, dict.fromkeys(spec) | value
    for key, one in inner.items():
        check(value[key], one, where, f"{name}[{key}]" if is_list else str(key) if name == "it" else f"{name}.{key}")
    return None
