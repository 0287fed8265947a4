"""What a small file says of its tensors, in the metadata of an ordinary safetensors file.

``prunus`` holds JSON with the version and a record for each tensor, ``prunus_crc32`` its checksum, and
``format`` is ``prunus`` too, so that a file with one damaged mark is not taken for a plain one. The index of a model
in several files says which file holds which entry, as Hugging Face writes it. docs/format.md describes all of it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ops.grid import FEWEST, MOST, Grid
from .checksum import hexadecimal
from .encode import BITMASK, CODED_DTYPES, CODES, DENSE, SAME, Layout
from .json_file import strict_json
from .nofm import NOFM
from .safetensors_header import DTYPES, LARGEST, Header, is_size, shape_of

VERSIONS = (1, 2)  # the second has codes, and what has none is written as the first
ENCODINGS = (DENSE, BITMASK, CODES, *NOFM)
KEYS, GRID_KEYS = {"dtype", "shape", "encoding", "crc32"}, {"bits", "group", "outputs"}
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its type, its layout, the checksum of its bytes, and of which tensor it is another name."""

    dtype: str
    layout: Layout
    crc32: str | None = None  # a plain file has none
    same_as: str | None = None

    @property
    def dense_bytes(self) -> int:
        return 0 if self.same_as else self.layout.numel * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        if self.same_as is not None:
            return {"encoding": SAME, "as": self.same_as}
        shape, encoding = list(self.layout.shape), self.layout.encoding
        value = {"dtype": self.dtype, "shape": shape, "encoding": encoding, "crc32": self.crc32}
        if (grid := self.layout.grid) is not None:
            value |= {"bits": grid.bits, "group": grid.group, "outputs": list(grid.outputs)}
        return value


@dataclass(frozen=True)
class Description:
    records: dict[str, TensorRecord]
    metadata: dict[str, str]  # what the user gave
    shard: tuple[int, int] = (1, 1)  # this file's number among how many
    crc32: str | None = None

    @property
    def version(self) -> int:
        """The oldest version of the format that has what the file holds."""
        return 2 if any(record.layout.encoding == CODES for record in self.records.values()) else 1

    def to_metadata(self) -> dict[str, str]:
        tensors = {name: record.to_json() for name, record in self.records.items()}
        value = {"version": self.version, "shard": list(self.shard), "metadata": self.metadata, "tensors": tensors}
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return {"format": "prunus", "prunus": text, "prunus_crc32": hexadecimal(text.encode())}


def is_marked(metadata: Mapping[str, str]) -> bool:
    """Whether a file's metadata says that it is of this format, however damaged."""
    return metadata.get("format") == "prunus" or any(key.startswith("prunus") for key in metadata)


def description_of(header: Header) -> Description:
    """What the file says of itself, checked against its entries; of a plain file, that all is dense."""
    if not is_marked(header.metadata):
        records = {name: TensorRecord(e.dtype, Layout(DENSE, e.shape)) for name, e in header.entries.items()}
        return Description(records, header.metadata)
    text, crc32 = header.metadata.get("prunus", ""), header.metadata.get("prunus_crc32", "")
    if header.metadata.get("format") != "prunus" or hexadecimal(text.encode()) != crc32:
        raise ValueError("the description of its tensors does not match its checksum")
    value = strict_json(text)
    version = value.get("version") if isinstance(value, dict) else None
    if type(version) is not int or version not in VERSIONS:
        raise ValueError("it is not of version 1 or 2 of the format; a newer prunus may read it")
    if set(value) != {"version", "shard", "metadata", "tensors"} or not isinstance(value["tensors"], dict):
        raise ValueError("the description of its tensors is incomplete")
    metadata, shard = value["metadata"], value["shard"]
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("the description's metadata is not a mapping of strings")
    if not isinstance(shard, list) or [type(n) for n in shard] != [int, int] or not 1 <= shard[0] <= shard[1]:
        raise ValueError("the description does not say which file this is, of how many")
    records = _records(value["tensors"])
    _check_entries(header, records)
    description = Description(records, metadata, (shard[0], shard[1]), crc32)
    if description.version > version:
        raise ValueError(f"it holds codes, which version {version} of the format does not have")
    return description


def entry_names(name: str, record: TensorRecord) -> list[str]:
    """Names of a tensor's entries, in the order of their bytes in the checksum."""
    return [name + suffix for suffix in record.layout.entries(0)]


def _check_entries(header: Header, records: Mapping[str, TensorRecord]) -> None:
    """Every tensor must have just the entries that its encoding asks for, and none may be left over."""
    left = dict(header.entries)
    for name, record in records.items():
        for suffix, (dtype, shape) in record.layout.entries(-1).items():
            entry = left.pop(name + suffix, None)
            if entry is None:
                raise ValueError(f"the entry {name + suffix!r} is missing, or used twice")
            is_free = shape == (-1,) and len(entry.shape) == 1
            if entry.dtype != (dtype or record.dtype) or not (is_free or entry.shape == shape):
                raise ValueError(f"the entry {name + suffix!r} is not what {record.layout.encoding} requires")
    if left:
        raise ValueError(f"the entry {min(left)!r} belongs to no tensor")


def _records(tensors: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Records by name; another name of a tensor has that tensor's type and shape."""
    aliases = {
        name: value["as"]
        for name, value in tensors.items()
        if isinstance(value, dict) and value.get("encoding") == SAME and isinstance(value.get("as"), str)
    }
    stored = {name: _record(name, value) for name, value in tensors.items() if name not in aliases}
    if wrong := [name for name, other in aliases.items() if other not in stored]:
        raise ValueError(f"{wrong[0]!r} is another name of a missing tensor")
    records = {}
    for name in tensors:
        other = stored[aliases.get(name, name)]
        same = TensorRecord(other.dtype, Layout(SAME, other.layout.shape), None, aliases.get(name))
        records[name] = same if name in aliases else other
    return records


def _record(name: str, value: Any) -> TensorRecord:
    is_coded = isinstance(value, dict) and value.get("encoding") == CODES
    if not isinstance(value, dict) or set(value) != (KEYS | GRID_KEYS if is_coded else KEYS):
        more = "; codes also need bits, group and outputs" if is_coded else ""
        raise ValueError(f"the record of {name!r} must have dtype, shape, encoding and crc32{more}")
    named = all(isinstance(value[key], str) for key in ("dtype", "encoding", "crc32"))
    if not named or value["dtype"] not in DTYPES or value["encoding"] not in ENCODINGS:
        raise ValueError(f"the record of {name!r} has an unknown dtype or encoding, or no checksum")
    shape = shape_of(value["shape"])
    if value["encoding"] in NOFM and not NOFM[value["encoding"]].fits(shape):
        raise ValueError(f"{name!r} of shape {list(shape)} cannot be {value['encoding']}")
    grid = _grid(name, value, shape) if is_coded else None
    return TensorRecord(value["dtype"], Layout(value["encoding"], shape, grid), value["crc32"])


def _grid(name: str, value: Mapping[str, Any], shape: tuple[int, ...]) -> Grid:
    bits, group, outputs = value["bits"], value["group"], value["outputs"]
    if type(bits) is not int or not FEWEST <= bits <= MOST or not is_size(group) or not group:
        raise ValueError(f"{name!r} cannot have codes of {bits!r:.20} bits in groups of {group!r:.20}")
    dims = outputs if isinstance(outputs, list) else [-1]
    if not all(is_size(dim) and dim < len(shape) for dim in dims) or len(set(dims)) < len(dims):
        raise ValueError(f"{name!r} of shape {list(shape)} cannot have rows by the dimensions {outputs!r:.80}")
    if DTYPES[value["dtype"]] not in CODED_DTYPES or 0 in shape:
        raise ValueError(f"{name!r} of type {value['dtype']} and shape {list(shape)} cannot be codes")
    return Grid(bits, group, tuple(dims))


@dataclass(frozen=True)
class Index:
    """The file of each entry; of small files also each file's checksum of what it says of its tensors."""

    weight_map: dict[str, str]
    checksums: dict[str, str]
    total_size: int = 0
    version: int = 1  # the newest of its files

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
            metadata["prunus"] = {"version": self.version, "files": self.checksums, "crc32": self.crc32}
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
        if marked is not None and (not isinstance(marked, dict) or marked.get("version") not in VERSIONS):
            raise ValueError("it is not of version 1 or 2 of the format; a newer prunus may read it")
        index = Index(weight_map, {} if marked is None else _strings(marked.get("files")))
        if wrong := [name for name in index.files if not FILE_NAME.fullmatch(name)]:
            raise ValueError(f"it lists the file {wrong[0]!r}; files must be beside it and end in .safetensors")
        if marked is not None and marked.get("crc32") != index.crc32:
            raise ValueError("its list of tensors does not match its checksum")
        return index
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("its weight_map and files must be mappings of strings")
    return value
