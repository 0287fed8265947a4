"""Activations that do not fit into a limit of memory are kept in a file.

The file is written and read piece by piece: pages of a mapped file would count as memory. It has no name, so that it is
gone when the process is, however that ends.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

PIECE = 1 << 26  # bytes that are copied at a time
SHARE = 0.25  # of the free disk that activations may take which could be computed again


class Spill:
    """Memory for ``limit`` bytes of activations, and a file in ``folder`` for what is beyond it."""

    def __init__(self, limit: float, folder: Path | None = None) -> None:
        self.limit, self.folder = limit, Path(tempfile.gettempdir()) if folder is None else folder
        self.used = 0  # bytes in memory
        self._file: _File | None = None

    def room(self, like: Tensor, size: int) -> "Tensor | FileRows":
        """Room for ``size`` rows like those of a tensor, in memory where the limit allows it."""
        num_bytes = like[:1].nbytes * size
        if self.used + num_bytes <= self.limit:
            rows = empty_rows(like, size)
            self.used += num_bytes
            finalize(rows, self._give_back, num_bytes)
            return rows
        return self.in_file(like, size)

    def in_file(self, like: Tensor, size: int) -> "FileRows":
        """Room for as many rows, whatever the limit is."""
        if self._file is None:
            self._file = _File(self.folder)
        return FileRows(self._file, like, size)

    def free_bytes(self) -> int:
        """What the disk of the file still holds."""
        folder = self.folder.absolute()
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free

    def _give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes

    def close(self) -> None:
        """Give the space on the disk back; what is in the file is lost."""
        if self._file is not None:
            self._file.file.close()
            self._file = None


class Room:
    """Room for ``memory`` bytes of activations and, with a spill, for a share of the free disk beyond them."""

    def __init__(self, memory: float, spill: Spill | None = None) -> None:
        self.memory, self.spill = memory, spill
        self.disk = 0.0 if spill is None else SHARE * spill.free_bytes()

    def has(self, num_bytes: int) -> bool:
        return num_bytes <= self.memory + self.disk

    def take(self, like: Tensor, size: int) -> "Tensor | FileRows":
        """Room for ``size`` rows like those of a tensor."""
        num_bytes = like[:1].nbytes * size
        if self.spill is None or num_bytes <= self.memory:
            self.memory -= num_bytes
            return empty_rows(like, size)
        self.disk -= num_bytes
        return self.spill.in_file(like, size)

    def copy(self, values: Tensor) -> "Tensor | FileRows":
        rows = self.take(values, len(values))
        rows[:] = values
        return rows

    def give(self, rows: "Tensor | FileRows") -> None:
        """Take back the room of some rows."""
        if isinstance(rows, FileRows):
            self.disk += rows.nbytes
        else:
            self.memory += rows.nbytes


class _File:
    """A file without a name, of which pieces are taken and given back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checked(folder.mkdir, parents=True, exist_ok=True)
        self.file: Any = self._checked(tempfile.TemporaryFile, buffering=0, dir=folder)
        self.end = 0
        self.gaps: list[tuple[int, int]] = []  # offsets and sizes of what was given back

    def take(self, num_bytes: int) -> int:
        for number, (offset, size) in enumerate(self.gaps):
            if size >= num_bytes:
                self.gaps[number : number + 1] = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                return offset
        self.end += num_bytes
        return self.end - num_bytes

    def give(self, offset: int, num_bytes: int) -> None:
        """Take a piece back, and join it with its neighbours: a larger one may need their place."""
        gaps: list[tuple[int, int]] = []
        for start, size in sorted([*self.gaps, (offset, num_bytes)]):
            if gaps and sum(gaps[-1]) == start:
                start, size = gaps[-1][0], gaps.pop()[1] + size
            gaps.append((start, size))
        self.gaps = gaps

    def write(self, offset: int, values: Tensor) -> None:
        left = _bytes_of(values)
        self.file.seek(offset)
        while left:
            left = left[self._checked(self.file.write, left) :]

    def read(self, offset: int, into: Tensor) -> None:
        left = _bytes_of(into)
        self.file.seek(offset)
        while left:
            num = self.file.readinto(left)
            if not num:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder))
            left = left[num:]

    def _checked(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return act(*args, **kwargs)
        except OSError as error:
            what = f"{error.strerror}: activations beyond the memory limit go there; free some space, or raise memory"
            raise OSError(error.errno, what, str(self.folder)) from error


class FileRows:
    """Rows of a tensor, one after the other in a file, with their dimensions in the order that they had in memory."""

    def __init__(self, file: _File, like: Tensor, size: int) -> None:
        self.file, self.dtype, self.device = file, like.dtype, like.device
        self.shape, self.ndim = torch.Size((size, *like.shape[1:])), like.ndim
        self._order = [0, *sorted(range(1, like.ndim), key=like.stride, reverse=True)]
        self._row = like[:1].nbytes
        self.nbytes = size * self._row
        self._offset = file.take(self.nbytes)
        finalize(self, file.give, self._offset, self.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, dim: int) -> int:
        """As of a tensor, with dimensions in the order of the file."""
        inner = self._order[self._order.index(dim) + 1 :]
        return torch.Size([self.shape[d] for d in inner]).numel()

    def __getitem__(self, where: slice | Tensor) -> Tensor:
        if isinstance(where, Tensor):
            return torch.cat([self[row : row + 1] for row in where.tolist()]) if len(where) else self[:0]
        start, stop, _ = where.indices(len(self))
        rows = torch.empty([max(0, stop - start), *(self.shape[d] for d in self._order[1:])], dtype=self.dtype)
        self.file.read(self._offset + start * self._row, rows)
        return rows.permute([self._order.index(d) for d in range(self.ndim)]).to(self.device)

    def __setitem__(self, where: slice, rows: Tensor) -> None:
        start, stop, _ = where.indices(len(self))
        rows = rows.detach().cpu().expand(stop - start, *self.shape[1:]).permute(self._order)
        self.file.write(self._offset + start * self._row, rows.contiguous())


def empty_rows(leaf: Tensor, size: int) -> Tensor:
    """Room for ``size`` rows like those of ``leaf``, dimensions in the same order in memory: kernels may go by it."""
    order = memory_order(leaf)
    if len(leaf) == size or order[0] != 0:
        return torch.empty_like(leaf) if len(leaf) == size else leaf.new_empty(size, *leaf.shape[1:])
    places = [order.index(dim) for dim in range(leaf.ndim)]
    return leaf.new_empty([size, *(leaf.shape[dim] for dim in order[1:])]).permute(places)


def memory_order(leaf: Tensor | FileRows) -> list[int]:
    """Dimensions, those whose neighbours are farthest apart in memory first."""
    return sorted(range(leaf.ndim), key=leaf.stride, reverse=True)


def copy_rows_(into: Tensor | FileRows, rows: Tensor | FileRows) -> None:
    """Copy all rows, some at a time where one of both is in a file."""
    step = max(1, PIECE * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        into[start : start + step] = rows[start : start + step]


def zero_rows(rows: Tensor | FileRows) -> Tensor | FileRows:
    """The same rows, all zero."""
    step = max(1, PIECE * len(rows) // max(1, rows.nbytes))
    zeros = torch.zeros(1, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), step):
        rows[start : start + step] = zeros
    return rows


def _bytes_of(values: Tensor) -> memoryview:
    return (values.reshape(-1).view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)).numpy().data
