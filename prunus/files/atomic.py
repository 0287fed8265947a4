"""Files and folders that appear only once they are complete and on the disk.

Everything is written beside its place under a name of its own, ``.NAME.HOST.PID.RANDOM.part``, and moved there at the
end. Writers of one path never meet, and the last one to end wins.

A killed writer leaves its part behind. Later writers in that folder remove it when it is old and its writer is gone.
A writer holds a lock on its part, which the system frees with the process: a part of this host that nobody locks goes
after an hour. Locks may not reach other hosts, and some file systems have none: such parts go after a day without a
change.
"""

import ctypes
import errno
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .lock import try_lock

HOUR = 3600.0
DAY = 24 * HOUR
HOST = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:32] or "host"
PART = re.compile(r"\..*\.(?P<host>[A-Za-z0-9-]+)\.\d+\.[0-9a-f]{8}\.part", re.DOTALL)
CURRENT_FOLDER, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def write_atomically(path: Path, write: Callable[[BinaryIO], object], previous: Path | None = None) -> None:
    """Write beside ``path`` and move it there: a reader sees the old file or the new one, never a part.

    The old file becomes ``previous`` if that is given, when the disk has the new one.
    """
    try:
        with part_file(path) as part:
            write(part)
            publish(part, path, previous=previous)
    except Exception as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps it
        if isinstance(cause, OSError) and cause.errno and (not cause.filename or is_part(Path(cause.filename))):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    sync(path.parent)


@contextmanager
def part_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside ``path`` to write and read; it is removed unless ``publish`` moved it."""
    part = part_name(path)
    with part.open("x+b") as file, try_lock(part):
        try:
            remove_abandoned(part.parent, os.fstat(file.fileno()).st_mtime)
            yield file
        finally:
            with suppress(OSError):  # a full disk again; Windows removes no file that is open
                file.close()
            part.unlink(missing_ok=True)


def publish(part: BinaryIO, path: Path, replace: bool = True, previous: Path | None = None) -> None:
    """Move a part to its place when the disk has it; without ``replace``, FileExistsError if a file is there."""
    part.flush()
    os.fsync(part.fileno())
    part.close()
    if previous is not None and path.exists():
        _give_second_name(path, previous)
    if not replace:
        try:
            os.link(part.name, path)  # os.replace would replace
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
    Path(part.name).replace(path)


def _give_second_name(path: Path, name: Path) -> None:
    """Name a file ``name`` too, so that there is no moment without a file at ``path``."""
    link = part_name(name)
    try:
        os.link(path, link)
    except OSError:  # a file system without links
        path.replace(name)
        return
    link.replace(name)
    link.unlink(missing_ok=True)  # rename does nothing if both are names of one file already


@contextmanager
def new_folder(path: Path, replace: bool = False, inside: Path | None = None) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` in one move; until then it lies beside it, or ``inside`` another one.

    A ``path`` that is not empty is refused at the start, or swapped for the new folder at the end with ``replace``.
    What another writer put there in between is swapped too.
    """
    try:
        path = path.resolve()  # through a link, as opening a file would
    except RuntimeError:
        raise ValueError(f"{path} is a symbolic link to itself; choose another place") from None
    if path.exists() and (not path.is_dir() or (not replace and any(path.iterdir()))):
        raise ValueError(f"{path} is there and not empty; remove it, or choose another place")
    part = part_name(inside / path.name if inside else path)
    part.mkdir(parents=True)
    with try_lock(part):
        try:
            remove_abandoned(part.parent, part.stat().st_mtime)
            yield part
            for inner in [*part.rglob("*"), part]:
                sync(inner)
            _move_folder(part, path)
            sync(path.parent)
        except OSError as error:
            if error.errno and str(error.filename).startswith(str(part)):  # a name that is gone when it is read
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)


def part_name(path: Path) -> Path:
    """A name that no other writer has, for what becomes ``path``."""
    name = path.name.encode()[:150].decode(errors="ignore")  # file systems allow 255 bytes in all
    return path.with_name(f".{name}.{HOST}.{os.getpid()}.{os.urandom(4).hex()}.part")


def is_part(path: Path) -> bool:
    return PART.fullmatch(path.name) is not None


def remove_abandoned(folder: Path, now: float) -> None:
    """Remove parts in a folder whose writers are gone; ``now`` is the time by the clock of its file system."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if (part := PART.fullmatch(path.name)) and _is_abandoned(path, part["host"], now):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_abandoned(path: Path, host: str, now: float) -> bool:
    age = now - max(inner.lstat().st_mtime for inner in (path, *path.rglob("*")))
    if age < HOUR or path.is_symlink():
        return age > DAY
    with try_lock(path) as is_locked:
        return is_locked is not False and age > (HOUR if is_locked and host == HOST else DAY)


def _move_folder(part: Path, path: Path) -> None:
    """Move a complete folder to ``path``; one that is there is swapped and removed."""
    replaced = [part]
    while True:
        try:
            part.replace(path)  # nothing or an empty folder is there
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _exchange(part, path):
            break
        replaced.append(part_name(path).with_suffix(".replaced"))
        with suppress(FileNotFoundError):  # another writer may have moved it away
            path.replace(replaced[-1])
    for folder in replaced:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one move, where the system and the file system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return rename(CURRENT_FOLDER, os.fsencode(first), CURRENT_FOLDER, os.fsencode(second), EXCHANGE) == 0


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder, where the system can say so."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.EBADF):  # no such thing here, as on Windows
            raise
