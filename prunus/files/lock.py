"""Locks on files and folders, which the system frees when their process ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder to work in; folders that are made for it go if they stay empty."""
    with without_empty_folders(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with try_lock(folder) as is_locked:
            if is_locked is False:
                raise ValueError(f"another process is working in {folder}; wait until it ends, or choose another place")
            yield


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Folders that are made for this one go if nothing was written."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def try_lock(path: Path, *, wait: bool = False) -> Iterator[bool | None]:
    """Whether this process has locked a file or folder; None where the system or the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_locked = True
        except BlockingIOError:
            is_locked = False
        except OSError:  # some network file systems
            is_locked = None
        yield is_locked
    finally:
        os.close(fd)
