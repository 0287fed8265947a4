"""The header of a GGUF file, checked before a library reads it that believes every length in it."""

import math
import mmap
import struct
from pathlib import Path

from .regular import check_regular

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the types of numbers
STRING, ARRAY = 8, 9
MOST_VALUES = 1 << 22  # in all arrays; the largest vocabularies have about a million with their merges
MOST_DEPTH = 4  # of arrays in arrays
MOST_DIMS = 4  # of a tensor


def check_gguf(path: Path) -> int:
    """The number of tensors in a GGUF file; ValueError unless all that its header describes fits into the file."""
    check_regular(path)
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).check()
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: it is not a GGUF file, or is damaged: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.num_values, self.order = data, 0, 0, "<"

    def check(self) -> int:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        if self.number("I") & 0xFFFF == 0:  # of a machine with the other order of bytes
            self.order = ">"
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        for _ in range(num_fields):
            self.skip_string()
            self.skip_value(self.number("I"))
        for _ in range(num_tensors):
            self.skip_string()
            if (num_dims := self.number("I")) > MOST_DIMS:
                raise ValueError(f"a tensor has {num_dims} dimensions")
            numel = math.prod(self.number("Q") for _ in range(num_dims))
            if not 0 < numel <= 8 * len(self.data):  # no type has less than a bit for each
                raise ValueError(f"a tensor has {numel} elements in a file of {len(self.data)} bytes")
            self.skip(4 + 8)  # type and offset
        return num_tensors

    def number(self, kind: str) -> int:
        at = self.at
        self.skip(struct.calcsize(self.order + kind))
        return struct.unpack_from(self.order + kind, self.data, at)[0]

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"its header refers to {size} bytes beyond its end")

    def skip_string(self) -> None:
        self.skip(self.number("Q"))

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in SIZES:
            self.skip(SIZES[kind])
        elif kind == STRING:
            self.skip_string()
        elif kind == ARRAY and depth < MOST_DEPTH:
            kind, length = self.number("I"), self.number("Q")
            self.num_values += length
            if self.num_values > MOST_VALUES:
                raise ValueError(f"an array of {length} values is too long")
            if kind in SIZES:
                self.skip(length * SIZES[kind])
            else:
                for _ in range(length):
                    self.skip_value(kind, depth + 1)
        else:
            raise ValueError(f"a value has the unknown type {kind}, or nests arrays too deep")
