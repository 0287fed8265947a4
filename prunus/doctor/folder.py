"""Hugging Face folders and safetensors files, whoever wrote them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..eligible import plain_name
from ..files.safetensors_header import DTYPES
from . import small
from .source import Source, Stored, dtype_name

INDEX = ".safetensors.index.json"
SERIES = re.compile(r"^(.*)-(\d+)-of-(\d+)\.safetensors$")


def read(path: Path) -> Source:
    """All tensors of a folder, and what its index, its files and its shards disagree about."""
    files = sorted(file.name for file in path.glob("*.safetensors"))
    index = sorted(path.glob(f"*{INDEX}"))
    if not files and not index:
        raise ValueError(f"{path} holds no safetensors file{_others(path)}")
    source = Source(path, "folder", config=_json(path / "config.json"))
    if small.is_small(path):
        return small.read(path, replace(source, kind="small folder"))
    if index and "model.safetensors" not in files:
        return _by_index(source, index[0], files)
    chosen = ["model.safetensors"] if "model.safetensors" in files else files
    if index:
        source.find(
            "duplicate",
            "model.safetensors",
            f"it stands beside {index[0].name}, and tools load the one or the other",
            "delete the one that is out of date",
        )
    if ignored := sorted(set(files) - set(chosen)):
        source.notes.append(f"not read, since there is a model.safetensors: {', '.join(ignored)}")
    return _by_files(source, chosen)


def read_file(path: Path) -> Source:
    """The tensors of one safetensors file, or of the shards that an index names."""
    if small.is_small(path):
        return small.read(path, Source(path, "small file", config=_json(path.parent / "config.json")))
    if path.name.endswith(INDEX):
        source = Source(path, "folder", config=_json(path.parent / "config.json"))
        return _by_index(source, path, sorted(file.name for file in path.parent.glob("*.safetensors")))
    source = Source(path, "file")
    _add(source, path)
    return source


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, not read yet."""
    try:
        file = safe_open(str(path), framework="pt")
        names = list(file.keys())
        shapes = {name: file.get_slice(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    found = {}
    for name, piece in shapes.items():
        dtype = str(piece.get_dtype())
        found[name] = Stored(
            plain_name(name),
            tuple(piece.get_shape()),
            dtype_name(DTYPES[dtype]) if dtype in DTYPES else dtype,
            path.name,
            lambda name=name: file.get_tensor(name),
        )
    return found


def _add(source: Source, path: Path) -> None:
    for stored in sorted(tensors_of(path).values(), key=lambda stored: _in_order(stored.name)):
        other = source.tensors.get(stored.name)
        if other:
            source.find(
                "duplicate",
                stored.name,
                f"it is stored in {other.place} and in {stored.place}",
                "delete one: which of them is loaded depends on the tool",
            )
        else:
            source.tensors[stored.name] = stored


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Key that puts layer 2 before layer 10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _by_files(source: Source, files: Sequence[str]) -> Source:
    for file in files:
        _add(source, source.path / file)
    series = [match for file in files if (match := SERIES.match(file))]
    if series:
        source.find("missing", f"model{INDEX}", "the shards have no index", "write one, or save the model anew")
    for stem, total in {(match[1], match[3]) for match in series}:
        there = {int(match[2]) for match in series if (match[1], match[3]) == (stem, total)}
        if len(there) < int(total):
            first = min(set(range(1, len(there) + 2)) - there)
            what = f"{int(total) - len(there)} of {int(total)} shards are not there, the first is number {first}"
            source.find("missing", f"{stem}-*-of-{total}.safetensors", what, "copy the shards again")
    return source


def _by_index(source: Source, index: Path, files: Sequence[str]) -> Source:
    listed = _weight_map(index)
    folder = index.parent
    for file in sorted(set(listed.values())):
        if (folder / file).is_file():
            _add(source, folder / file)
        else:
            number = sum(shard == file for shard in listed.values())
            source.find("missing", file, f"the index names it for {number} tensors", "copy the shard again")
    for name, file in listed.items():
        stored = source.tensors.get(plain_name(name))
        if stored is None and (folder / file).is_file():
            source.find("missing", name, f"the index places it in {file}, which lacks it", "save the model anew")
        elif stored is not None and stored.place != file and not _is_duplicate(source, stored.name):
            source.find(
                "missing", name, f"the index places it in {file}, but it is in {stored.place}", "mend the index"
            )
    known = {plain_name(name) for name in listed}
    for name in source.tensors:
        if name not in known:
            source.find("missing", name, f"{source.tensors[name].place} holds it, the index lacks it", "mend the index")
    if ignored := sorted(set(files) - set(listed.values())):
        source.notes.append(f"not read, since the index does not name them: {', '.join(ignored)}")
    return source


def _is_duplicate(source: Source, name: str) -> bool:
    return any(finding.kind == "duplicate" and finding.where == name for finding in source.findings)


def _weight_map(index: Path) -> dict[str, str]:
    listed = _json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} has no weight_map from names to files")
    for name, file in listed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file of its folder")
    return listed


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; nothing where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _others(path: Path) -> str:
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        return "; pickled weights (.bin, .pth) are not read: save the model with safe_serialization=True"
    return "; expected a Hugging Face folder, a run folder or a distributed checkpoint"
