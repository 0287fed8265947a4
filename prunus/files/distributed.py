"""Folders of ``torch.distributed.checkpoint``: what their ``.metadata`` lists, and tensors put together from it.

The metadata is a pickle. It is read as plain data, so that nothing in it is executed or imported.
"""

import io
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .plain_pickle import PlainObject, read_pickle
from .torch_file import read_torch_file

Size = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Where bytes are stored; for a block of a tensor, also its place in the tensor."""

    file: str
    start: int
    length: int
    offset: Size | None = None
    size: Size | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor or another value of the saved state."""

    name: str
    path: tuple[str, ...]  # keys from the outer mapping to the inner
    size: Size | None  # None for what is no tensor
    dtype: torch.dtype | None
    shards: list[Shard]


def read_entries(folder: Path) -> list[Entry]:
    """All that a checkpoint's metadata lists; ValueError where it is not such metadata."""
    try:
        return _entries(read_pickle((folder / ".metadata").read_bytes()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its metadata lacks or mistakes {error}") from error


def read_shard(folder: Path, shard: Shard) -> Any:
    """The value or block of a tensor at its place in a file."""
    with (folder / shard.file).open("rb") as file:
        file.seek(shard.start)
        data = file.read(shard.length)
    try:
        return read_torch_file(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"{shard.file} is damaged at byte {shard.start}: {error}") from error


def read_tensor(folder: Path, entry: Entry) -> Tensor:
    """The whole tensor of an entry; ValueError if blocks of it are missing."""
    assert entry.size is not None
    if prod(entry.size) > sum(shard.length for shard in entry.shards):
        raise ValueError(f"{'.'.join(entry.path)} is said to be {entry.size}, which its bytes cannot hold")
    check_complete(entry)
    blocks = [_read_block(folder, shard) for shard in entry.shards]
    if len(blocks) == 1:
        return blocks[0]
    whole = torch.zeros(entry.size, dtype=entry.dtype)
    for shard, block in zip(entry.shards, blocks, strict=True):
        assert shard.offset is not None and shard.size is not None
        whole[tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.size, strict=True))] = block
    return whole


def _read_block(folder: Path, shard: Shard) -> Tensor:
    block = read_shard(folder, shard)
    if not isinstance(block, Tensor) or tuple(block.shape) != shard.size:
        raise ValueError(f"{shard.file} holds something else at byte {shard.start} than a tensor of {shard.size}")
    return block


def check_complete(entry: Entry) -> None:
    """ValueError unless the blocks of a tensor lie inside it and have all of its elements."""
    size, name = entry.size or (), ".".join(entry.path)
    num_stored = sum(prod(shard.size or ()) for shard in entry.shards)
    if num_stored != prod(size):
        raise ValueError(f"the ranks wrote {num_stored} of the {prod(size)} elements of {name}")
    for shard in entry.shards:
        ends = [start + n for start, n in zip(shard.offset or (), shard.size or (), strict=True)]
        if len(ends) != len(size) or any(end > most for end, most in zip(ends, size, strict=True)):
            raise ValueError(f"a block of {name} lies outside of it")


def _entries(metadata: Any) -> list[Entry]:
    if not isinstance(metadata, PlainObject) or not metadata.name.endswith(".Metadata"):
        raise ValueError("it is no Metadata")
    paths = metadata.state.get("planner_data") or {}
    stored: dict[str, dict[Size | None, Shard]] = {}
    for key, info in metadata.state["storage_data"].items():
        offset = None if (said := key.value.state.get("offset")) is None else _size(said)
        stored.setdefault(key.value.state["fqn"], {})[offset] = _shard(info.state)
    found = []
    for name, kind in metadata.state["state_dict_metadata"].items():
        path = tuple(map(str, paths.get(name, (name,))))
        shards = stored.get(name, {})
        if not kind.name.endswith(".TensorStorageMetadata"):
            found.append(Entry(name, path, None, None, list(shards.values())))
            continue
        chunks = [(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in kind.state["chunks"]]
        blocks = [replace(shards[offset], offset=offset, size=size) for offset, size in chunks if offset in shards]
        found.append(Entry(name, path, _size(kind.state["size"]), _dtype(kind.state["properties"]), blocks))
    return found


def _shard(info: dict[str, Any]) -> Shard:
    file, start, length = info["relative_path"], info["offset"], info["length"]
    is_inside = isinstance(file, str) and Path(file).name == file
    is_place = all(isinstance(n, int) and n >= 0 for n in (start, length))
    if not is_inside or not is_place or info.get("transform_descriptors"):
        raise ValueError(f"it names {file!r}, which is no plain file of its folder")
    return Shard(file, start, length)


def _size(value: PlainObject) -> Size:
    size = tuple(value.args[0]) if value.args else ()
    if not all(isinstance(n, int) and n >= 0 for n in size):
        raise ValueError(f"a size of {size} is none")
    return size


def _dtype(properties: PlainObject) -> torch.dtype:
    """The dtype of a strided tensor, from the names of dtype and layout; any other layout is refused."""
    dtype, layout, *_ = properties.state
    found = getattr(torch, dtype.name.removeprefix("torch."), None) if isinstance(dtype, PlainObject) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it names the type {str(dtype)[:80]}, which torch does not have")
    if not isinstance(layout, PlainObject) or layout.args != ("torch.strided",):
        raise ValueError("it names a layout that is not torch.strided")
    return found
