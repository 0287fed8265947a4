"""Writing tensors one at a time, into one file or several.

What a file will say of its tensors is known only when they are packed, so room is left for its header, which
is written last. All files have other names until everything is on the disk; an index comes last.
"""

import json
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from ..ops.bits import words_of
from ..ops.grid import Coded
from .atomic import part_file, publish, sync, write_atomically
from .checksum import checksum
from .encode import SAME, Encoded, Layout, encode, encode_codes
from .metadata import Description, Index, TensorRecord
from .safetensors_header import ALIGN, DTYPES, LARGEST, NAMES, Header, StoredArray, header_text

Report = Callable[[int, int, str], object]  # is called with tensors done, tensors in all, and the last one's name
SUFFIXES = (".bits", ".indices", ".values", ".scales", ".codes")
MAX_SHARD_BYTES = 5_000_000_000
MOVED = 1 << 26  # bytes of data that are moved up to a header that turned out shorter than its room


@dataclass(frozen=True)
class TensorSpec:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name, other names of some, and what fetches one, or its codes where it is stored as these."""

    specs: dict[str, TensorSpec]
    aliases: dict[str, str]  # another name to the name that is in ``specs``
    fetch: Callable[[str], Tensor]
    order: list[str]  # all names as they were given
    metadata: dict[str, str]
    fetch_coded: Callable[[str], Coded | None]


@dataclass(frozen=True)
class SavedTensor:
    name: str
    encoding: str
    numel: int
    num_nonzero: int
    dense_bytes: int
    stored_bytes: int
    num_negative_zeros: int = 0  # -0.0 comes back as it is, and takes the room of a value
    bits: int | None = None  # of a kept weight that is stored as a code


@dataclass(frozen=True)
class Saved:
    files: list[Path]
    rows: list[SavedTensor]

    @property
    def dense_bytes(self) -> int:
        return sum(row.dense_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        return sum(row.stored_bytes for row in self.rows)


@dataclass(frozen=True)
class WritePlan:
    """Where to write, and how: ``small`` writes the packed form, otherwise plain safetensors are written."""

    path: Path  # of the one file; several take their names from it
    small: bool = True
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be positive, got {self.max_shard_bytes}")
        if self.path.suffix != ".safetensors":
            raise ValueError(f"the path must end in .safetensors, got {self.path}")
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"{self.path} cannot be written: it is a folder, or its folder does not exist")
        if self.index.exists():
            raise ValueError(f"{self.index} is there already: remove that model first, or choose another place")

    @property
    def index(self) -> Path:
        return self.path.with_name(self.path.name + ".index.json")

    def names(self, total: int) -> list[Path]:
        if total == 1:
            return [self.path]
        return [self.path.with_name(f"{self.path.stem}-{i:05}-of-{total:05}.safetensors") for i in range(1, total + 1)]


@dataclass
class UnfinishedFile:
    """A file with room for a header at its start; places of entries count from the end of that room."""

    file: BinaryIO
    room: int
    entries: dict[str, StoredArray] = field(default_factory=dict)
    records: dict[str, TensorRecord] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.file.tell() - self.room

    def add(self, name: str, encoded: Encoded, record: TensorRecord) -> None:
        for (suffix, tensor), data in zip(encoded.entries.items(), encoded.parts, strict=True):
            begin = self.size
            self.file.write(data.numpy().data)
            self.entries[name + suffix] = StoredArray(NAMES[tensor.dtype], tuple(tensor.shape), begin, self.size)
        self.records[name] = record

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header, without much empty room in a small file, and wait for the disk."""
        text, size = header_text(Header(self.entries, metadata)), self.size
        assert aligned(len(text)) <= self.room
        if size <= MOVED and aligned(len(text)) < self.room:
            self.file.seek(self.room)
            data = self.file.read(size)
            self.room = aligned(len(text))
            self.file.seek(self.room)
            self.file.write(data)
            self.file.truncate()
        self.file.seek(0)
        self.file.write((self.room - 8).to_bytes(8, "little") + text.ljust(self.room - 8))
        self.file.flush()
        os.fsync(self.file.fileno())


def aligned(length: int) -> int:
    """Where data begins behind a header of ``length`` bytes."""
    return -(-(length + 8) // ALIGN) * ALIGN


class Writer:
    """Fills one file after the other; ``finish`` gives them their names. ``files`` removes those that have none."""

    def __init__(self, plan: WritePlan, source: TensorSource, files: ExitStack) -> None:
        self.plan, self.source, self.files = plan, source, files
        self.parts: list[UnfinishedFile] = []
        self.rows: list[SavedTensor] = []
        self.all_names = set(source.order)
        self.left = {name: _room(name, source) for name in source.specs}  # of tensors not yet written
        self.shared = sum(_room(name, source) for name in source.aliases)

    def add(self, name: str) -> None:
        spec = self.source.specs[name]
        packs = self.plan.small and not any(name + suffix in self.all_names for suffix in SUFFIXES)
        kept = self.source.fetch_coded(name) if packs else None
        encoded = encode(self.source.fetch(name), packs) if kept is None else encode_codes(kept)
        crc32 = checksum(*(part.numpy().data for part in encoded.parts)) if self.plan.small else None
        limit = self.plan.max_shard_bytes
        if not self.parts or (self.parts[-1].size and self.parts[-1].size + encoded.num_bytes > limit):
            self._open()
        record = TensorRecord(spec.dtype, Layout(encoded.encoding, spec.shape, encoded.grid), crc32)
        self.parts[-1].add(name, encoded, record)
        self.left.pop(name)
        self.rows.append(_row(name, encoded, record))

    def finish(self) -> Saved:
        if not self.parts:
            self._open()
        for name, other in self.source.aliases.items():
            part = next(part for part in self.parts if other in part.records)
            record = part.records[other]
            part.records[name] = TensorRecord(record.dtype, Layout(SAME, record.layout.shape), None, other)
            self.rows.append(SavedTensor(name, SAME, 0, 0, 0, 0))
        names = self.plan.names(len(self.parts))
        checksums = {path.name: self._finish_part(i) for i, path in enumerate(names)}
        if len(names) == 1:
            publish(self.parts[0].file, self.plan.path)
            sync(self.plan.path.parent)
            return Saved(names, self.rows)
        self._publish_all(names)
        weight_map = {name: path.name for path, part in zip(names, self.parts, strict=True) for name in part.entries}
        size = sum(row.stored_bytes for row in self.rows)
        version = max(Description(part.records, {}).version for part in self.parts)
        index = Index(weight_map, checksums if self.plan.small else {}, size, version)
        write_atomically(self.plan.index, lambda file: file.write(index.to_json()))
        return Saved(names, self.rows)

    def _finish_part(self, number: int) -> str:
        """Complete one file; the checksum of its description, which plain files do not have."""
        part, described = self.parts[number], self.source.metadata
        if self.plan.small:
            ordered = {name: part.records[name] for name in self.source.order if name in part.records}
            described = Description(ordered, self.source.metadata, (number + 1, len(self.parts))).to_metadata()
        part.finish(described)
        return described["prunus_crc32"] if self.plan.small else ""

    def _publish_all(self, names: list[Path]) -> None:
        """Give several files their names; one that is there is refused, so that files of two models never mix."""
        done: list[Path] = []
        try:
            if self.plan.path.exists():
                raise FileExistsError
            for part, path in zip(self.parts, names, strict=True):
                publish(part.file, path, replace=False)
                done.append(path)
        except BaseException as error:
            for path in done:
                path.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                old = self.plan.path if self.plan.path.exists() else names[len(done)]
                raise ValueError(f"{old} is there already: remove that model first, or choose another place") from None
            raise
        sync(self.plan.path.parent)

    def _open(self) -> None:
        if self.parts:
            self.parts[-1].file.flush()
        room = 512 + len(json.dumps(json.dumps(self.source.metadata))) + self.shared + sum(self.left.values())
        if room > LARGEST:
            raise ValueError(f"{len(self.left)} tensors are too many for one header; save them in several parts")
        file = self.files.enter_context(part_file(self.plan.path))
        file.seek(aligned(room))
        self.parts.append(UnfinishedFile(file, aligned(room)))


def write(source: TensorSource, plan: WritePlan, report: Report | None = None) -> Saved:
    """Write all tensors: those of wide elements first, so that every entry is aligned."""
    check_layers(source.specs)
    if not plan.small:
        source = _without_aliases(source)
    with ExitStack() as files:
        writer = Writer(plan, source, files)
        try:
            names = sorted(source.specs, key=lambda name: -DTYPES[source.specs[name].dtype].itemsize)
            for number, name in enumerate(names, 1):
                writer.add(name)
                if report:
                    report(number, len(names), name)
            return writer.finish()
        except OSError as error:
            if error.errno and not error.filename:  # a full disk
                raise OSError(error.errno, error.strerror, str(plan.path)) from error
            raise


def check_layers(names: Collection[str]) -> None:
    """ValueError for the state of layers that ``sparsify_`` made, which no other layer could load."""
    for name in names:
        layer, _, part = name.rpartition(".")
        others = {"codes": ("values", "heads", "rows"), "starts": ("data",)}.get(part, ())
        if others and all(f"{layer}.{other}" in names for other in others):
            raise ValueError(f"{layer} is a sparse layer, which cannot be saved: call unsparsify_(model) first")


def _without_aliases(source: TensorSource) -> TensorSource:
    """Plain files hold a tensor under each of its names."""
    specs = {name: source.specs[source.aliases.get(name, name)] for name in source.order}

    def fetch(name: str) -> Tensor:
        return source.fetch(source.aliases.get(name, name))

    return replace(source, specs=specs, aliases={}, fetch=fetch)


def _room(name: str, source: TensorSource) -> int:
    """Bytes of the header that a tensor may take."""
    quoted, shape = json.dumps(name), str(source.specs[source.aliases.get(name, name)].shape)
    return 3 * len(quoted) + len(json.dumps(quoted)) + 2 * len(shape) + 460


def _row(name: str, encoded: Encoded, record: TensorRecord) -> SavedTensor:
    counts = record.layout.numel, encoded.num_nonzero, record.dense_bytes, encoded.num_bytes
    if encoded.grid is not None:
        return SavedTensor(name, encoded.encoding, *counts, bits=encoded.grid.bits)
    values = list(encoded.entries.values())[-1]
    has_sign, words = values.is_floating_point() and values.element_size() > 1, words_of(values).numpy()
    negative = int(np.count_nonzero(words == np.iinfo(words.dtype).min)) if has_sign else 0  # the sign bit alone
    return SavedTensor(name, encoded.encoding, *counts, negative)
