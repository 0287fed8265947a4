"""Folders of ``torch.distributed.checkpoint``: what their ``.metadata`` lists, and tensors put together from it.

The metadata is a pickle. It is read as plain data, so that nothing in it is executed or imported. A folder of prunus
also has ``checksums.json``: one checksum for the metadata and one for each block, compared when the block is read.
"""

import io
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checksum import checksum, hexadecimal
from .json_file import strict_json, write_json
from .plain_pickle import PlainObject, read_pickle
from .regular import check_regular
from .safetensors_header import is_size
from .torch_file import read_torch_file

Size = tuple[int, ...]
CHECKSUMS = "checksums.json"
LARGEST = 1 << 30  # bytes of metadata or checksums
MOST_DIMS = 64


@dataclass(frozen=True)
class StoredBlock:
    """Where bytes are stored; for a block of a tensor, also its place in the tensor."""

    file: str
    start: int
    length: int
    offset: Size | None = None
    size: Size | None = None
    crc32: str | None = None  # None where the checkpoint has no checksums

    @property
    def place(self) -> str:
        return f"{self.file}:{self.start}"


@dataclass(frozen=True)
class Entry:
    """A tensor or another value of the stored state."""

    name: str
    path: tuple[str, ...]  # keys from the outer mapping to the inner
    size: Size | None  # None for what is no tensor
    dtype: torch.dtype | None
    shards: list[StoredBlock]


def read_entries(folder: Path, verify: bool = True) -> list[Entry]:
    """All that the metadata lists; with ``verify`` every block that is there is compared with its checksum."""
    data = _read_whole(folder / ".metadata")
    stored = _read_checksums(folder)
    if stored and stored.get(".metadata") != checksum(data):
        raise ValueError(".metadata does not match its checksum")
    try:
        entries = _entries(read_pickle(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its metadata is damaged: {type(error).__name__} {str(error)[:80]}") from error
    if not stored:
        return entries
    for block in (block for entry in entries for block in entry.shards):
        if block.place not in stored:
            raise ValueError(f"{CHECKSUMS} is damaged: it has no checksum for byte {block.start} of {block.file}")
    entries = [
        replace(entry, shards=[replace(block, crc32=stored[block.place]) for block in entry.shards])
        for entry in entries
    ]
    for block in [block for entry in entries for block in entry.shards] if verify else ():
        path = folder / block.file
        if path.is_file() and block.start + block.length <= path.stat().st_size:
            read_block(folder, block)
    return entries


def read_block(folder: Path, block: StoredBlock) -> bytes:
    check_regular(folder / block.file)
    with (folder / block.file).open("rb") as file:
        if block.start + block.length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{block.file} is damaged: it is truncated")
        file.seek(block.start)
        data = file.read(block.length)
    if block.crc32 not in (None, checksum(data)):
        raise ValueError(f"{block.file} is damaged at byte {block.start}: it does not match its checksum")
    return data


def read_shard(folder: Path, block: StoredBlock) -> Any:
    data = read_block(folder, block)
    try:
        value = read_torch_file(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"{block.file} is damaged at byte {block.start}: {error}") from error
    if block.size is not None and (not isinstance(value, Tensor) or tuple(value.shape) != block.size):
        raise ValueError(f"{block.file} is damaged at byte {block.start}: it has no tensor of shape {block.size} there")
    return value


def read_tensor(folder: Path, entry: Entry) -> Tensor:
    assert entry.size is not None
    check_complete(folder, entry)
    blocks = [read_shard(folder, block) for block in entry.shards]
    if len(blocks) == 1:
        return blocks[0]
    whole = torch.zeros(entry.size, dtype=entry.dtype)
    for block, tensor in zip(entry.shards, blocks, strict=True):
        assert block.offset is not None and block.size is not None
        whole[tuple(slice(at, at + n) for at, n in zip(block.offset, block.size, strict=True))] = tensor
    return whole


def check_complete(folder: Path, entry: Entry) -> None:
    """ValueError unless a tensor's blocks lie inside it, have all of its elements, and fit into their files."""
    size, name = entry.size or (), ".".join(entry.path)
    if prod(size) > sum(block.length for block in entry.shards):
        raise ValueError(f"{name} should have shape {size}, but its bytes cannot hold that")
    num_elements = sum(prod(block.size or ()) for block in entry.shards)
    if num_elements != prod(size):
        raise ValueError(f"the ranks wrote {num_elements} of the {prod(size)} elements of {name}")
    for block in entry.shards:
        ends = [start + n for start, n in zip(block.offset or (), block.size or (), strict=False)]
        if len(ends) != len(size) or any(end > most for end, most in zip(ends, size, strict=True)):
            raise ValueError(f"a block of {name} lies outside the tensor")
        path = folder / block.file
        num_bytes = prod(block.size or ()) * (entry.dtype.itemsize if entry.dtype else 1)
        if num_bytes > block.length or not path.is_file() or block.start + block.length > path.stat().st_size:
            raise ValueError(f"{block.file} does not hold the {num_bytes} bytes of {name}")


def block_checksums(folder: Path, blocks: Iterable[StoredBlock]) -> dict[str, str]:
    return {block.place: checksum(read_block(folder, block)) for block in blocks}


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    content = {".metadata": checksum((folder / ".metadata").read_bytes()), **dict(sorted(checksums.items()))}
    write_json(folder / CHECKSUMS, {"version": 1, "checksums": content, "crc32": _own_checksum(content)})


def _read_checksums(folder: Path) -> dict[str, Any]:
    if not (folder / CHECKSUMS).is_file():
        return {}
    values = strict_json(_read_whole(folder / CHECKSUMS))
    content = values.get("checksums") if isinstance(values, dict) else None
    if not isinstance(content, dict) or values.get("version") != 1 or values.get("crc32") != _own_checksum(content):
        raise ValueError(f"{CHECKSUMS} is damaged: it does not match its own checksum")
    return content


def _own_checksum(content: dict[str, Any]) -> str:
    return hexadecimal(json.dumps(content).encode())


def _read_whole(path: Path) -> bytes:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path.name} is larger than {LARGEST} bytes")
    return path.read_bytes()


def _entries(metadata: Any) -> list[Entry]:
    if not isinstance(metadata, PlainObject) or not metadata.name.endswith(".Metadata"):
        raise ValueError("it has no Metadata of torch.distributed.checkpoint")
    paths = metadata.state.get("planner_data") or {}
    stored: dict[str, dict[Size | None, StoredBlock]] = {}
    for key, info in metadata.state["storage_data"].items():
        index = key.value.state
        offset = None if index.get("offset") is None else _size(index["offset"])
        stored.setdefault(_string(index["fqn"]), {})[offset] = _block(info.state)
    entries = []
    for name, kind in metadata.state["state_dict_metadata"].items():
        keys = paths.get(_string(name), (name,))
        if not isinstance(keys, tuple) or not keys or not all(isinstance(key, str | int) for key in keys):
            raise ValueError(f"{name[:80]} has no key path")
        path, blocks = tuple(map(str, keys)), stored.get(name, {})
        if not kind.name.endswith(".TensorStorageMetadata"):
            entries.append(Entry(name, path, None, None, list(blocks.values())))
            continue
        chunks = [(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in kind.state["chunks"]]
        shards = [replace(blocks[offset], offset=offset, size=size) for offset, size in chunks if offset in blocks]
        entries.append(Entry(name, path, _size(kind.state["size"]), _dtype(kind.state["properties"]), shards))
    return entries


def _block(info: dict[str, Any]) -> StoredBlock:
    file, start, length = info["relative_path"], info["offset"], info["length"]
    is_inside = isinstance(file, str) and Path(file).name == file
    is_place = is_size(start) and is_size(length)
    if not is_inside or not is_place or info.get("transform_descriptors"):
        raise ValueError(f"it refers to {reprlib.repr(file)[:80]}, expected a position in a regular file of its folder")
    return StoredBlock(file, start, length)


def _size(value: PlainObject) -> Size:
    size = value.args[0] if value.args else ()
    if len(size) > MOST_DIMS or not all(map(is_size, size)):
        raise ValueError(f"it has the size {reprlib.repr(size)[:80]}, expected whole numbers of at least 0")
    return tuple(size)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it has the name {reprlib.repr(value)[:80]}, expected a string")
    return value


def _dtype(properties: PlainObject) -> torch.dtype:
    """The dtype of a strided tensor, from the names of dtype and layout; any other layout is refused."""
    dtype, layout, *_ = properties.state
    torch_dtype = getattr(torch, dtype.name.removeprefix("torch."), None) if isinstance(dtype, PlainObject) else None
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"it has the dtype {reprlib.repr(dtype)[:80]}, which torch does not have")
    if not isinstance(layout, PlainObject) or layout.args != ("torch.strided",):
        raise ValueError("it has a layout other than torch.strided")
    return torch_dtype
