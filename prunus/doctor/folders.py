"""Hugging Face folders and safetensors files, plain or in the sparse form that ``prunus.export`` writes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..eligible import plain_name
from ..files.json_file import read_json, repeated_names
from ..files.metadata import is_marked
from ..files.reader import open_tensors
from ..files.regular import check_regular
from ..files.safetensors_header import DTYPES
from .contents import Contents, StoredTensor, plain_dtype

INDEX = ".safetensors.index.json"
SERIES = re.compile(r"^(.*)-(\d+)-of-(\d+)\.safetensors$")


def read_folder(path: Path) -> Contents:
    """All tensors of a folder, and what its index, its files and its shards disagree about."""
    files = sorted(file.name for file in path.glob("*.safetensors"))
    index = sorted(path.glob(f"*{INDEX}"))
    if not files and not index:
        others = "; expected a Hugging Face folder, a run folder or a distributed checkpoint"
        if any(path.glob("*.bin")) or any(path.glob("*.pth")):
            others = "; pickled weights (.bin, .pth) are not read: save the model with safe_serialization=True"
        raise ValueError(f"{path} holds no safetensors file{others}")
    contents = Contents(path, "folder", config=_config(path), pruned=_result(path))
    if any(_is_marked(path / file) for file in files):
        return _read_sparse_form(contents, "small folder")
    if index and "model.safetensors" not in files:
        return _by_index(contents, index[0], files)
    if index:
        what = f"it stands beside {index[0].name}, and tools load the one or the other"
        contents.find("duplicate", "model.safetensors", what, "delete the one that is out of date")
    chosen = ["model.safetensors"] if "model.safetensors" in files else files
    for file in chosen:
        _add(contents, path / file)
    _check_series(contents, chosen)
    _note_ignored(contents, set(files) - set(chosen), "there is a model.safetensors")
    return contents


def read_file(path: Path) -> Contents:
    """The tensors of one safetensors file, or of the shards that an index names."""
    is_index = path.name.endswith(INDEX)
    files = sorted(path.parent.glob("*.safetensors")) if is_index else [path]
    if any(map(_is_marked, files)):
        return _read_sparse_form(Contents(path, "", config=_config(path.parent)), "small file")
    if is_index:
        contents = Contents(path, "folder", config=_config(path.parent))
        return _by_index(contents, path, [file.name for file in files])
    contents = Contents(path, "file")
    _add(contents, path)
    return contents


def _is_marked(file: Path) -> bool:
    """Whether a file says that it is in the sparse form."""
    check_regular(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            return is_marked(opened.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _read_sparse_form(contents: Contents, kind: str) -> Contents:
    """All tensors in the sparse form; what is damaged, missing or doubled in it is a ValueError."""
    contents.kind = kind
    tensors = contents.stack.enter_context(open_tensors(contents.path))
    for name, record in tensors.records.items():
        file, dtype = tensors.homes[name].path.name, plain_dtype(DTYPES[record.dtype])
        contents.tensors[name] = StoredTensor(name, record.layout.shape, dtype, file, partial(tensors.read, name))
        if record.same_as is not None:
            contents.notes.append(f"{name} is {record.same_as}: one tensor under two names")
    dense = sum(record.dense_bytes for record in tensors.records.values())
    stored = sum(tensors.stored_bytes(name) for name in tensors.records)
    contents.notes.append(f"it takes {stored:,} bytes where plain tensors take {dense:,}: {stored / max(1, dense):.3f}")
    return contents


def tensors_of(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, not read yet; layer 2 before layer 10."""
    check_regular(path)
    try:
        file = safe_open(str(path), framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error

    def load(name: str) -> Tensor:
        try:
            if len(slices[name].get_shape()) > 64:
                raise RuntimeError("it has more than 64 dimensions")
            return file.get_tensor(name)
        except (SafetensorError, RuntimeError, AttributeError) as error:  # a type or shape that torch does not have
            raise ValueError(f"{path} has {name!r}, which torch cannot read: {error}") from error

    tensors = []
    for name, stored in slices.items():
        dtype = str(stored.get_dtype())
        dtype = plain_dtype(DTYPES[dtype]) if dtype in DTYPES else dtype
        tensors.append(StoredTensor(plain_name(name), tuple(stored.get_shape()), dtype, path.name, partial(load, name)))
    return sorted(tensors, key=lambda t: [(len(part) if part.isdecimal() else 0, part) for part in t.name.split(".")])


def repeated_tensors(path: Path) -> list[str]:
    """Names that stand twice in the header of a whole safetensors file, whose own reader takes the last."""
    with path.open("rb") as file:
        return repeated_names(file.read(int.from_bytes(file.read(8), "little")))


def _add(contents: Contents, path: Path) -> None:
    for stored in tensors_of(path):
        other = contents.tensors.setdefault(stored.name, stored)
        if other is not stored:
            what = f"it is stored in {other.file} and in {stored.file}"
            contents.find("duplicate", stored.name, what, "delete one: which of them is loaded depends on the tool")
    for name in repeated_tensors(path):
        what = f"its name stands twice in the header of {path.name}, and tools read the one or the other"
        contents.find("duplicate", plain_name(name), what, "save the model anew")


def _note_ignored(contents: Contents, files: Iterable[str], why: str) -> None:
    """Say which files are not read; a shard among them that repeats a tensor is a finding."""
    if ignored := sorted(files):
        contents.notes.append(f"not read, since {why}: {', '.join(ignored)}")
    folder = contents.path if contents.path.is_dir() else contents.path.parent
    for file in filter(SERIES.match, ignored):
        with suppress(ValueError, OSError):
            if twice := [stored.name for stored in tensors_of(folder / file) if stored.name in contents.tensors]:
                what = f"it repeats tensors that other files hold: {len(twice)}, the first is {min(twice)}"
                contents.find("duplicate", file, what, "delete it if it is out of date: some tools load every file")


def _check_series(contents: Contents, files: Iterable[str]) -> None:
    """Shards without an index, and shards that are missing by their numbers."""
    series = [match for file in files if (match := SERIES.match(file))]
    if series:
        contents.find("missing", f"model{INDEX}", "the shards have no index", "write one, or save the model anew")
    for stem, total in {(match[1], match[3]) for match in series}:
        there = {int(match[2]) for match in series if (match[1], match[3]) == (stem, total)}
        if len(there) < int(total):
            first = min(set(range(1, len(there) + 2)) - there)
            what = f"{int(total) - len(there)} of {int(total)} shards are not there, the first is number {first}"
            contents.find("missing", f"{stem}-*-of-{total}.safetensors", what, "copy the shards again")


def _by_index(contents: Contents, index: Path, files: Iterable[str]) -> Contents:
    listed = _weight_map(index)
    for name in repeated_names(index.read_bytes()):
        what = f"its name stands twice in {index.name}, and tools read the one or the other"
        contents.find("duplicate", name, what, "mend the index")
    for file, number in sorted(Counter(listed.values()).items()):
        if (index.parent / file).is_file():
            _add(contents, index.parent / file)
        else:
            contents.find("missing", file, f"the index names it for {number} tensors", "copy the shard again")
    reported = {finding.where for finding in contents.findings}
    for name, file in listed.items():
        stored = contents.tensors.get(plain_name(name))
        if stored is None and file not in reported:
            contents.find("missing", name, f"the index places it in {file}, which lacks it", "save the model anew")
        elif stored is not None and stored.file != file and stored.name not in reported:
            what = f"the index places it in {file}, but it is in {stored.file}"
            contents.find("missing", name, what, "mend the index")
    known = {plain_name(name) for name in listed}
    for stored in (stored for name, stored in contents.tensors.items() if name not in known):
        contents.find("missing", stored.name, f"{stored.file} holds it, the index lacks it", "mend the index")
    _note_ignored(contents, set(files) - set(listed.values()), "the index does not name them")
    return contents


def _weight_map(index: Path) -> Mapping[str, str]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} has no weight_map from names to files")
    for name, file in listed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file of its folder")
    return listed


def _result(folder: Path) -> dict[str, Any]:
    """What ``prunus prune`` wrote beside the model, empty if there is nothing like it."""
    path = folder / "result.json"
    try:
        values = read_json(path) if path.is_file() else {}
    except ValueError:
        return {}
    return values if isinstance(values.get("settings"), dict) and isinstance(values.get("layers"), list) else {}


def _config(folder: Path) -> dict[str, Any]:
    """A model's config.json, empty if there is none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}
