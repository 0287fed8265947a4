"""Who trains in a run folder: the process that holds its lock, which the system frees when the process dies."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 4  # for an instant the folder may be held by a look at it


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder, made if it is not there, from other trainings."""
    folder.mkdir(parents=True, exist_ok=True)
    with _tried(folder, TRIES) as is_ours:
        if is_ours is False:
            raise ValueError(f"another process trains in {folder}; wait for its end, or choose another --out")
        yield


def is_free(folder: Path) -> bool:
    """Whether it is certain that nobody trains in a folder, as far as this machine's locks reach."""
    with _tried(folder, 1) as is_ours:
        return is_ours is True


@contextmanager
def _tried(folder: Path, tries: int) -> Iterator[bool | None]:
    """Whether this process holds the folder meanwhile; None where folders cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows locks no folders
        yield None
        return

    def locked() -> bool | None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems lock no folders
            return None
        return True

    fd = os.open(folder, os.O_RDONLY)
    try:
        is_ours = locked()
        while is_ours is False and (tries := tries - 1):
            time.sleep(0.05)
            is_ours = locked()
        yield is_ours
    finally:
        os.close(fd)
