"""Folders that are whole or not there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..files import flushed


def part_of(path: Path) -> Path:
    """Where a file or folder stands until it is whole."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` in one move; one that is in use is refused."""
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
