"""Files that are whole or not there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside ``path`` and move it there: a reader sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2).encode() + b"\n"))
