"""Files that are whole or not there."""

import os
from collections.abc import Callable
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
        part.unlink(missing_ok=True)  # a full disk is not to be filled by parts
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save says its own on top of it
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
