"""JSON files that are whole or not there."""

import json
from pathlib import Path
from typing import Any

from ..files import write_atomically


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2).encode() + b"\n"))
