"""Files of ``torch.save``, read without executing what is in them. Those of prunus carry a checksum for every tensor.

torch stores checksums of its own but does not compare them when it loads. Ours are taken of the values in memory
and compared with what was read, so that nothing between the two can change a bit unseen.
"""

import errno
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .atomic import write_atomically
from .checksum import checksum, hexadecimal
from .regular import check_regular

FORMAT = "prunus-checkpoint-2"
CHECKSUMS = "checksums"
OUTSIDE = (errno.EINVAL, errno.EOVERFLOW, errno.EFBIG)  # a damaged file sends its reader to where no file reaches


def write_torch_file(path: Path, state: Mapping[str, Any], previous: Path | None = None) -> None:
    """Write a state with checksums; a file that is there becomes ``previous`` if that is given."""
    state = {"format": FORMAT} | {key: value for key, value in state.items() if key not in ("format", CHECKSUMS)}
    checksums = checksums_of(state)
    write_atomically(path, lambda file: torch.save(state | {CHECKSUMS: checksums}, file), previous)


def read_torch_file(file: Path | BinaryIO, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, if it is plain values and tensors alone; ValueError for anything else.

    Checksums are compared where the file has them. With ``mmap``, tensors are mapped where the file allows it: files
    from before 2020 are read whole.
    """
    if isinstance(file, Path):
        check_regular(file)
    try:
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            _refuse_compressed(file)
        source = str(file) if isinstance(file, Path) else file
        state = torch.load(source, "cpu", weights_only=True, mmap=mmap and is_zip)
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, *OUTSIDE):
            raise  # the system did not let us read: that says nothing about the file
        raise ValueError(_reason(error)) from error
    if isinstance(state, dict) and (CHECKSUMS in state or state.get("format") == FORMAT):
        _verify(state, state.pop(CHECKSUMS, None))
    return state


def checksums_of(state: Mapping[str, Any]) -> dict[str, str]:
    """The checksum of every tensor by its place in the state; under "" that of all of it, other values included."""
    checksums: dict[str, str] = {}

    def described(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            if value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"{place} has more elements than the file stores")
            checksums[place] = checksum(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
            return str(value.dtype), tuple(value.shape), checksums[place]
        if isinstance(value, Mapping):
            return [(key, described(inner, f"{place}/{key}" if place else str(key))) for key, inner in value.items()]
        if isinstance(value, list | tuple):
            return type(value).__name__, [described(inner, f"{place}/{i}") for i, inner in enumerate(value)]
        return value

    return {"": hexadecimal(repr(described(state, "")).encode()), **checksums}


def _verify(state: dict[str, Any], stored: Any) -> None:
    if not isinstance(stored, Mapping):
        raise ValueError("it is damaged: its checksums are missing")
    try:
        computed = checksums_of(state)
    except (RecursionError, RuntimeError, TypeError) as error:
        raise ValueError(f"it is damaged: its values have no checksum ({type(error).__name__})") from error
    for place, crc32 in computed.items():
        if place and stored.get(place) != crc32:
            raise ValueError(f"it is damaged: {place[:160]} does not match its checksum")
    if computed != stored:
        raise ValueError("it is damaged: its values do not match their checksum")


def _refuse_compressed(file: Path | BinaryIO) -> None:
    """torch.save does not compress; a small file could otherwise fill the memory."""
    with zipfile.ZipFile(file) as archive:
        if any(info.file_size > info.compress_size for info in archive.infolist()):
            raise ValueError("its content is compressed")
    if not isinstance(file, Path):
        file.seek(0)


def _reason(error: Exception) -> str:
    """The few words that matter: torch goes on to advise to execute the file."""
    said = str(error)
    cause = re.search(r"WeightsUnpickler error:\s*([^\n]+)", said)
    if not cause and not isinstance(error, RuntimeError | OSError | EOFError | zipfile.BadZipFile):
        return "torch.save did not write it"
    lines = (cause[1] if cause else said).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
