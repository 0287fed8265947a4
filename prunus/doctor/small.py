"""The small form that ``prunus.export`` writes: unpacked one tensor at a time, checksums and all."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files.metadata import is_marked
from ..files.reader import Tensors, open_tensors
from ..files.safetensors_header import DTYPES
from .source import Source, Stored, dtype_name


def is_small(path: Path) -> bool:
    """Whether a file or folder says that it is of the small form."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.name.endswith(".index.json"):
        files = sorted(path.parent.glob("*.safetensors"))
    return any(_is_marked(file) for file in files)


def read(path: Path, source: Source) -> Source:
    """All tensors of the small form; what is damaged, missing or doubled in it is a ValueError."""
    tensors = source.stack.enter_context(open_tensors(path))
    for name, record in tensors.records.items():
        place = tensors.homes[name].path.name
        dtype = dtype_name(DTYPES[record.dtype])
        source.tensors[name] = Stored(name, record.layout.shape, dtype, place, _loader(tensors, name))
        if record.same_as is not None:
            source.notes.append(f"{name} is {record.same_as}: one tensor under two names")
    dense = sum(record.dense_bytes for record in tensors.records.values())
    stored = sum(tensors.stored_bytes(name) for name in tensors.records)
    source.notes.append(f"it takes {stored:,} bytes where plain tensors take {dense:,}: {stored / max(1, dense):.3f}")
    return source


def _loader(tensors: Tensors, name: str) -> Callable[[], Tensor]:
    return lambda: tensors.read(name)


def _is_marked(file: Path) -> bool:
    try:
        with safe_open(str(file), framework="pt") as opened:
            return is_marked(opened.metadata() or {})
    except (SafetensorError, OSError):
        return False
