"""A file in the making: its data first, its head when all is known."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from .encode import Encoded
from .metadata import Record
from .safetensors_header import ALIGN, NAMES, Entry, Header, header_text

MOVED = 1 << 26  # bytes of data that are moved up to a head that turned out shorter than its room


@dataclass
class Part:
    """A file with room for a head at its start; places of entries count from the end of that room."""

    path: Path
    file: BinaryIO
    room: int
    entries: dict[str, Entry] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.file.tell() - self.room

    def add(self, name: str, encoded: Encoded, record: Record) -> None:
        for (suffix, tensor), data in zip(encoded.entries.items(), encoded.parts, strict=True):
            begin = self.size
            self.file.write(data.numpy().data)
            self.entries[name + suffix] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), begin, self.size)
        self.records[name] = record

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the head, without much empty room in a small file, and wait for the disk."""
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
        self.file.close()


def open_part(path: Path, room: int) -> Part:
    """A new file with room for a header of ``room`` bytes."""
    file = path.open("w+b")
    file.seek(aligned(room))
    return Part(path, file, aligned(room))


def aligned(length: int) -> int:
    """Where data begins behind a header of ``length`` bytes."""
    return -(-(length + 8) // ALIGN) * ALIGN
