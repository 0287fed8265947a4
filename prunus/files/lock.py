"""Locks on files and folders, which the system frees when their process ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 4  # ``is_free`` locks a folder for an instant


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder to work in, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with try_lock(folder, TRIES) as is_locked:
        if is_locked is False:
            raise ValueError(f"another process works in {folder}; wait for its end, or choose another --out")
        yield


def is_free(folder: Path) -> bool:
    """Whether it is certain that nobody trains in a folder, as far as this machine's locks reach."""
    with try_lock(folder) as is_locked:
        return is_locked is True


@contextmanager
def try_lock(path: Path, tries: int = 1) -> Iterator[bool | None]:
    """Whether this process has locked a file or folder; None where the system or the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return

    def locked() -> bool | None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems
            return None
        return True

    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        is_locked = locked()
        while is_locked is False and (tries := tries - 1):
            time.sleep(0.05)
            is_locked = locked()
        yield is_locked
    finally:
        os.close(fd)
