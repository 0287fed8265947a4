"""Files and folders of tensors, read one tensor at a time.

A file may be small or plain safetensors; a folder holds one file, or several and their index.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..grids import OnGrid
from ..ops.grid import Coded, decoded
from .checksum import combined, read_pieces
from .encode import CODES, Layout, coded_of, decode, packed_of
from .metadata import Description, Index, TensorRecord, description_of, entry_names, is_marked, read_index
from .safetensors_header import DTYPES, Header, read_header

# A small model has a name of its own: a tool that knows only model.safetensors then says that there is none,
# where it would otherwise warn of unknown names and go on with random weights.
SMALL, PLAIN = "sparse.safetensors", "model.safetensors"
Result = TypeVar("Result")
Decode = Callable[[Layout, dict[str, Tensor], torch.device], Result]
SWAPS = 100  # of a folder by other writers while its files are opened


@dataclass(frozen=True)
class TensorFile:
    path: Path
    fd: int
    header: Header
    description: Description

    @property
    def is_small(self) -> bool:
        return is_marked(self.header.metadata)

    def read(self, name: str, device: torch.device, decode: "Decode[Result]") -> "Result":
        """The tensor, after its bytes were compared with their checksum."""
        record = self.description.records[name]
        try:
            entries, sums = {}, []
            for suffix, full in zip(record.layout.entries(0), entry_names(name, record), strict=True):
                entry = self.header.entries[full]
                size, has_sums = entry.end - entry.begin, record.crc32 is not None
                data, crcs = read_pieces(self.fd, entry.begin, size, is_temporary=bool(suffix), sums=has_sums)
                entries[suffix] = data.view(DTYPES[entry.dtype]).view(entry.shape)
                sums += crcs
            if record.crc32 not in (None, combined(sums)):
                raise ValueError("its bytes do not match their checksum")
            return decode(record.layout, entries, device)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged in {name!r}: {error}") from None


@dataclass(frozen=True)
class Tensors:
    """Tensors of one file or of many, by name; another name of a tensor gives the same tensor."""

    path: Path
    files: list[TensorFile]
    homes: dict[str, TensorFile]  # the file of each tensor

    @property
    def is_small(self) -> bool:
        return any(file.is_small for file in self.files)

    @property
    def records(self) -> dict[str, TensorRecord]:
        return {name: file.description.records[name] for name, file in self.homes.items()}

    @property
    def metadata(self) -> dict[str, str]:
        return self.files[0].description.metadata if self.files else {}

    def stored_bytes(self, name: str) -> int:
        file = self.homes[name]
        entries = (file.header.entries[full] for full in entry_names(name, file.description.records[name]))
        return sum(entry.end - entry.begin for entry in entries)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        return self._read(name, device, partial(decode, dtype=self._dtype(name)))

    def read_packed(self, name: str, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Values and bits of a tensor that is not stored dense, which is not made."""
        return self._read(name, device, partial(packed_of, dtype=self._dtype(name)))

    def is_coded(self, name: str) -> bool:
        """Whether a tensor, under whichever of its names, is stored as codes."""
        return self._stored(name)[1].layout.encoding == CODES

    def read_coded(self, name: str, device: torch.device | str = "cpu") -> Coded:
        """Bits, codes and scales of a tensor that is stored as codes, which is not made."""
        if not self.is_coded(name):
            raise ValueError(f"{self.path} does not store {name!r} as codes; save_model does for quantised layers")
        return self._read(name, device, coded_of)

    def read_on_grid(self, name: str, device: torch.device | str = "cpu") -> tuple[Tensor, OnGrid | None]:
        if not self.is_coded(name):
            return self.read(name, device), None
        kept = self.read_coded(name, device)
        return decoded(kept, self._dtype(name)), OnGrid(kept.grid, kept.scales)

    def _stored(self, name: str) -> tuple[str, TensorRecord]:
        """The name under which a tensor is stored, and its record."""
        records = self.homes[name].description.records
        name = records[name].same_as or name
        return name, records[name]

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._stored(name)[1].dtype]

    def _read(self, name: str, device: torch.device | str, decode: "Decode[Result]") -> "Result":
        return self.homes[name].read(self._stored(name)[0], torch.device(device), decode)


@contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """The tensors of a file, of an index, or of a folder with either; ValueError if they are not whole."""
    with ExitStack() as stack:
        for _ in range(SWAPS):
            before = _folder_number(path)
            try:
                tensors = _open_all(located(path), stack)
                break
            except (ValueError, OSError):
                stack.close()
                if _folder_number(path) == before:
                    raise
        else:
            raise ValueError(f"{path} keeps being replaced while it is read")
        yield tensors


def _folder_number(path: Path) -> int | None:
    """What changes when another writer swaps a whole folder."""
    try:
        return (path if path.is_dir() else path.parent).stat().st_ino
    except OSError:
        return None


def _open_all(path: Path, stack: ExitStack) -> Tensors:
    if path.name.endswith(".index.json"):
        index = read_index(path)
        files = [stack.enter_context(_open(path.with_name(name))) for name in index.files]
        _check_set(path, index, files)
    else:
        files = [stack.enter_context(_open(path))]
        if files[0].description.shard[1] > 1:
            number, total = files[0].description.shard
            raise ValueError(f"{path} is file {number} of {total}; pass the folder or the index instead")
    return Tensors(path, files, {name: file for file in files for name in file.description.records})


def located(path: Path) -> Path:
    """The file or index that a file, an index or a folder stands for; a file that was too large became an index."""
    if not path.is_dir():
        index = path.with_name(path.name + ".index.json")
        if not path.is_file() and not index.is_file():
            raise ValueError(f"there is no file or folder {path}")
        return path if path.is_file() else index
    names = [name + end for name in (SMALL, PLAIN) for end in ("", ".index.json")]
    present = [path / name for name in names if (path / name).is_file()]
    if not present:
        raise ValueError(f"{path} holds no tensors: none of {', '.join(names)}; pass a file of another name itself")
    if present[0].name.startswith("sparse") and present[-1].name.startswith("model"):
        raise ValueError(f"{path} holds both {present[0].name} and {present[-1].name}; pass the one that you mean")
    return present[0]


@contextmanager
def _open(path: Path) -> Iterator[TensorFile]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    with path.open("rb", buffering=0) as file:
        try:
            header = read_header(file)
            description = description_of(header)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        yield TensorFile(path, file.fileno(), header, description)


def _check_set(path: Path, index: Index, files: list[TensorFile]) -> None:
    """The files must be those that the index was written with, and hold what it says."""
    homes: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        if any(file.is_small != other.is_small for other in files):
            raise ValueError(f"{path} lists both small and plain files; one save writes only one kind")
        if file.is_small and file.description.crc32 != index.checksums.get(file.path.name):
            raise ValueError(f"{file.path} is not the file that {path.name} was written with")
        if file.is_small and file.description.shard != (number, len(files)):
            raise ValueError(f"{file.path} is file {file.description.shard}, expected {(number, len(files))}")
        if twice := homes.keys() & file.header.entries.keys():
            raise ValueError(f"{min(twice)!r} is in {file.path.name} and in {homes[min(twice)]}")
        homes |= dict.fromkeys(file.header.entries, file.path.name)
    if homes != index.weight_map:
        wrong = min(set(homes.items()) ^ set(index.weight_map.items()))
        raise ValueError(f"{path} and its files disagree about {wrong[0]!r}")
