"""Files and folders that appear only once they are complete."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside ``path`` and move it there: a reader sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)  # leave no part behind on a full disk
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps it
        if isinstance(cause, OSError) and cause.errno and not cause.filename:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    flushed(path.parent)


def flushed(file_or_folder: Path) -> None:
    """Wait until the disk has it."""
    fd = os.open(file_or_folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def part_of(path: Path) -> Path:
    """Where a file or folder is until it is complete."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` in one move; a ``path`` that is not empty is refused."""
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there and not empty; remove it, or choose another place")
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)  # what an interrupted save left
    part.mkdir(parents=True)
    try:
        yield part
        for file in part.iterdir():
            flushed(file)
        flushed(part)
        part.replace(path)
        flushed(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
