"""Only regular files are opened: the reader of a pipe waits for a writer, and a device may have no end."""

import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """ValueError for a pipe, a socket or a device; of a path where nothing is, its reader says so."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is a pipe, a socket or a device, not a regular file; copy its content into a file")


def check_regular_files(folder: Path) -> None:
    """The same for all that lies in a folder which a library will read."""
    for path in sorted(folder.iterdir()):
        check_regular(path)
