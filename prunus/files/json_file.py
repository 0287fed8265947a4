"""JSON files: complete when they appear, checked when they are read."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from .atomic import write_atomically
from .regular import check_regular


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda file: file.write(to_json(value, indent=2).encode() + b"\n"))


def to_json(value: Any, indent: int | None = None) -> str:
    """The value as text; a number that is not finite, which JSON does not have, is null."""
    if is_deep(value):
        raise ValueError("cannot write JSON that is nested too deep, as from a damaged file")
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, or a ValueError; NaN and Infinity, which older versions wrote, are None."""
    check_regular(path)
    try:
        values = json.loads(path.read_bytes(), parse_constant=lambda name: None)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(values).__name__}")
    if is_deep(values):
        raise ValueError(f"{path} cannot be read: its JSON is nested too deep")
    return values


def is_deep(value: Any) -> bool:
    """Whether JSON is nested deeper than anything that is meant: what walks over it would end in a RecursionError."""
    level = [value]
    for _ in range(50):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list | tuple)
        ]
        level = [one for values in inner for one in values]
    return bool(level)


def strict_json(data: bytes | str) -> Any:
    """JSON without repeated keys, NaN and what UTF-8 cannot hold; any mistake is a ValueError."""

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the name {name[:80]!r} occurs twice")
        "".join(values).encode()
        return values

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"JSON does not allow the number {name}")

    try:
        text = data if isinstance(data, str) else data.decode()
        text.encode()
        return json.loads(text, object_pairs_hook=refuse_twice, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"its JSON is damaged: {error}") from None
