"""JSON files that are whole or not there."""

import json
from pathlib import Path
from typing import Any

from ..files import write_atomically


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2).encode() + b"\n"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ValueError where it cannot be read or holds something else."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} should hold an object, but holds a {type(values).__name__}")
    return values
