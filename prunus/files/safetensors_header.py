"""The header of a safetensors file, trusted only as far as it is checked.

Eight bytes give its length, JSON names each entry's type, shape and place. Nothing is allocated by what it
says: sizes must add up to the file's own. safetensors' own reader tells no places, maps the file (which crashes if
it shrinks) and takes the last of two entries of one name, so that it does not serve here.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .json_file import strict_json

LARGEST = 100_000_000  # bytes of a header, as in the safetensors library
MOST_DIMS = 32
ALIGN = 64  # the data begins at a multiple of this
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredArray:
    """An array of the file: its type and shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    entries: dict[str, StoredArray]
    metadata: dict[str, str]


def read_header(file: BinaryIO) -> Header:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise ValueError("it is truncated, or not a safetensors file")
    if length > LARGEST:
        raise ValueError(f"its header of {length} bytes is larger than the {LARGEST} allowed")
    top = strict_json(file.read(length))
    if not isinstance(top, dict):
        raise ValueError("its header is not a JSON object")
    metadata = top.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not a mapping of strings")
    entries = {name: _entry(name, value, 8 + length) for name, value in top.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise ValueError("its entries overlap or leave a gap")
        end = entry.end
    if end != size:
        raise ValueError(f"its entries end at byte {end}, but the file has {size}")
    return Header(entries, metadata)


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape from JSON: a short list of whole numbers that are not negative."""
    if not isinstance(value, list) or len(value) > MOST_DIMS or not all(is_size(n) for n in value):
        raise ValueError(
            f"a shape must be a list of up to {MOST_DIMS} whole numbers of at least 0, got {str(value)[:80]}"
        )
    if math.prod(n for n in value if n) >= 1 << 60:  # also of an empty one, so that strides stay in 64 bits
        raise ValueError(f"the shape {value} is too large")
    return tuple(value)


def header_text(header: Header) -> bytes:
    """The JSON of a header whose entries' places count from the end of it."""
    top: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    for name, entry in header.entries.items():
        top[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    return json.dumps(top, separators=(",", ":"), ensure_ascii=False).encode()


def is_size(value: Any) -> bool:
    """Whether JSON or a pickle gives a whole number that a size or a place in a file can be."""
    return type(value) is int and 0 <= value < 1 << 62


def _entry(name: str, value: Any, data: int) -> StoredArray:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry {name!r} must have dtype, shape and data_offsets")
    dtype, places = value["dtype"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the entry {name!r} has the unknown type {str(dtype)[:40]!r}")
    if not isinstance(places, list) or len(places) != 2 or not all(is_size(n) for n in places):
        raise ValueError(f"the entry {name!r} has no begin and end in data_offsets")
    shape, (begin, end) = shape_of(value["shape"]), places
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"the entry {name!r} of type {dtype} and shape {list(shape)} does not fit its place")
    return StoredArray(dtype, shape, data + begin, data + end)
