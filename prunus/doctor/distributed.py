"""Folders of ``torch.distributed.checkpoint``: pieces that ranks wrote, put together one tensor at a time."""

import io
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..eligible import plain_name
from ..files.plain_pickle import Thing, plain
from ..files.torch_file import read_saved
from .checkpoint import MODELS, strings
from .source import Source, Stored


@dataclass(frozen=True)
class Piece:
    """Where bytes stand, and for a part of a tensor where it belongs."""

    file: str
    start: int
    length: int
    offset: tuple[int, ...] | None


@dataclass(frozen=True)
class Entry:
    path: tuple[str, ...]  # keys from the outer mapping to the inner
    size: tuple[int, ...] | None  # None for what is no tensor
    dtype: str
    pieces: list[Piece]


def read(path: Path) -> Source:
    """Weights, masks, options and digests of all ranks; a missing file or piece is a finding."""
    source = Source(path, "distributed checkpoint")
    try:
        entries = _entries(plain((path / ".metadata").read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / '.metadata'} does not describe a distributed checkpoint: {error}") from error
    for entry in entries:
        _check_pieces(source, path, entry)
        if entry.size is None:
            _add_value(source, path, entry)
        else:
            _add_tensor(source, path, entry)
    if not source.tensors:
        raise ValueError(f"{path} holds no tensors of a model")
    return source


def _entries(metadata: Any) -> list[Entry]:
    if not isinstance(metadata, Thing) or not metadata.name.endswith(".Metadata"):
        raise ValueError("it is no Metadata")
    kinds, storage = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
    paths = metadata.state.get("planner_data") or {}
    pieces: dict[str, list[Piece]] = {}
    for key, info in storage.items():
        place, where = key.thing.state, info.state
        offset = None if place.get("offset") is None else _size(place["offset"])
        file, start, length = where["relative_path"], where["offset"], where["length"]
        if Path(file).name != file or not all(isinstance(n, int) and n >= 0 for n in (start, length)):
            raise ValueError(f"it names {file!r}, which is no file of its folder")
        pieces.setdefault(place["fqn"], []).append(Piece(file, start, length, offset))
    found = []
    for name, kind in kinds.items():
        size = _size(kind.state["size"]) if kind.name.endswith(".TensorStorageMetadata") else None
        dtype = _dtype(kind.state["properties"]) if size is not None else ""
        path = tuple(map(str, paths.get(name, (name,))))
        found.append(Entry(path, size, dtype, pieces.get(name, [])))
    return found


def _size(thing: Thing) -> tuple[int, ...]:
    size = tuple(thing.args[0]) if thing.args else ()
    if not all(isinstance(n, int) and n >= 0 for n in size):
        raise ValueError(f"a size of {size} is none")
    return size


def _dtype(properties: Thing) -> str:
    """The dtype, first of the properties' state, written by torch as a global's name."""
    state = properties.state
    first = state[0] if isinstance(state, tuple) else state.get("dtype")
    return first.name.removeprefix("torch.") if isinstance(first, Thing) else str(first)


def _check_pieces(source: Source, folder: Path, entry: Entry) -> None:
    name = ".".join(entry.path)
    if not entry.pieces and (entry.size is None or prod(entry.size)):
        source.find("missing", name, "no rank wrote it", "save the checkpoint anew, with all ranks")
    for file in dict.fromkeys(piece.file for piece in entry.pieces):
        size = (folder / file).stat().st_size if (folder / file).is_file() else -1
        if any(piece.start + piece.length > size for piece in entry.pieces if piece.file == file):
            what = "is not there" if size < 0 else "is cut short"
            source.find("missing", name, f"{file}, which holds a part of it, {what}", "copy the file again")


def _whole(source: Source, entry: Entry) -> bool:
    return not any(f.kind == "missing" and f.where == ".".join(entry.path) for f in source.findings)


def _load_piece(folder: Path, piece: Piece) -> Any:
    with (folder / piece.file).open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    try:
        return read_saved(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"{piece.file} is damaged at byte {piece.start}: {error}") from error


def _assembled(folder: Path, entry: Entry) -> Tensor:
    """The whole tensor; a place that no rank wrote is a ValueError."""
    assert entry.size is not None
    if prod(entry.size) > sum(piece.length for piece in entry.pieces):
        raise ValueError(f"{'.'.join(entry.path)} is said to be {entry.size}, which its bytes cannot hold")
    parts = [(piece, _load_piece(folder, piece)) for piece in entry.pieces]
    if len(parts) == 1 and tuple(parts[0][1].shape) == entry.size:
        return parts[0][1]
    whole = torch.zeros(entry.size, dtype=parts[0][1].dtype if parts else getattr(torch, entry.dtype))
    written = 0
    for piece, part in parts:
        place = whole
        for dim, start in enumerate(piece.offset or ()):
            place = place.narrow(dim, start, part.shape[dim])
        place.copy_(part)
        written += part.numel()
    if written != whole.numel():
        raise ValueError(f"the ranks wrote {written} of the {whole.numel()} elements of {'.'.join(entry.path)}")
    return whole


def _add_tensor(source: Source, folder: Path, entry: Entry) -> None:
    if not _whole(source, entry) or entry.size is None:
        return
    place = entry.pieces[0].file if entry.pieces else ".metadata"
    keys, target = entry.path, source.tensors
    if "masks" in keys[:-1]:
        keys, target = keys[keys.index("masks") + 1 :], source.masks
    elif keys[0] in MODELS and len(keys) > 1:
        keys = keys[1:]
    elif keys[0] in ("optimizer", "optim", "pruner", "rng", "cuda_rng"):
        return
    name = plain_name(".".join(keys))
    target[name] = Stored(name, entry.size, entry.dtype, place, lambda: _assembled(folder, entry))


def _add_value(source: Source, folder: Path, entry: Entry) -> None:
    """Options, the pruner's step and the digests; other values are not read."""
    keys = entry.path
    wanted = "digest" in ".".join(keys) or keys[0] in ("run", "pruner")
    if not wanted or not _whole(source, entry) or len(entry.pieces) != 1:
        return
    value = _load_piece(folder, entry.pieces[0])
    if any("digest" in key for key in keys):
        source.digests |= dict(strings(value, f"{entry.pieces[0].file}: {'.'.join(keys)}"))
    elif keys[0] == "run" and len(keys) == 2:
        source.run[keys[1]] = value
    elif keys[0] == "pruner" and keys[-1] in ("step", "due"):
        source.state[keys[-1]] = value
