"""The index of a model in several files: which file holds which entry, as Hugging Face writes it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checksum import hexadecimal
from .safetensors_header import LARGEST, file_error, strict_json

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True)
class Index:
    """Entry to file; of small files also each file's checksum of what it says of its tensors."""

    weight_map: dict[str, str]
    checksums: dict[str, str]
    total_size: int = 0

    @property
    def files(self) -> list[str]:
        return sorted(set(self.weight_map.values()) | set(self.checksums))

    @property
    def crc32(self) -> str:
        content = [sorted(self.checksums.items()), sorted(self.weight_map.items())]
        return hexadecimal(json.dumps(content).encode())

    def to_json(self) -> bytes:
        metadata: dict[str, Any] = {"total_size": self.total_size}
        if self.checksums:
            metadata["prunus"] = {"version": 1, "files": self.checksums, "crc32": self.crc32}
        value = {"metadata": metadata, "weight_map": self.weight_map}
        return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def read_index(path: Path) -> Index:
    """The checked index; its files may only lie beside it."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
        value = strict_json(path.read_bytes())
        weight_map = _strings(value.get("weight_map") if isinstance(value, dict) else None)
        metadata = value.get("metadata", {})
        marked = metadata.get("prunus") if isinstance(metadata, dict) else None
        if marked is None:
            return _checked(Index(weight_map, {}))
        if not isinstance(marked, dict) or marked.get("version") != 1:
            raise ValueError("it is not of version 1 of the format; a newer prunus may read it")
        index = _checked(Index(weight_map, _strings(marked.get("files"))))
        if marked.get("crc32") != index.crc32:
            raise ValueError("its list of tensors does not match its checksum")
        return index
    except ValueError as error:
        raise file_error(path, error) from None


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("its weight_map and files must be mappings of strings")
    return value


def _checked(index: Index) -> Index:
    for name in index.files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"it names the file {name!r}; files lie beside it and end in .safetensors")
    return index
