"""Progress of a long call: one line that renews itself in a terminal or a notebook, and nothing elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]  # weights done, weights in all, and the name of the last one done
QUIET = 1.0  # seconds at the start without a line: what is short needs none
PAUSE = 0.1  # seconds from one line to the next, at least


def is_watched() -> bool:
    """Whether somebody sees a line that renews itself: in a terminal or a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


@contextmanager
def progress_line(progress: Progress | bool | None, title: str) -> Iterator[Progress | None]:
    """The function to call after each weight: the one given, or for True one that shows a line.

    None stands for True where somebody is watching, and for False elsewhere.
    """
    if callable(progress):
        yield progress
        return
    if not (is_watched() if progress is None else progress):
        yield None
        return
    out = sys.stdout if _is_notebook() else sys.stderr
    began = last = time.monotonic()
    width = 0

    def show(num_done: int, total: int, name: str) -> None:
        nonlocal last, width
        now = time.monotonic()
        if now - began < QUIET or (now - last < PAUSE and num_done < total):
            return
        last, left = now, round((now - began) * (total - num_done) / max(1, num_done))
        name = name if name.isprintable() else ascii(name)
        text = f"{title}: {num_done} of {total} weights, {left // 60}:{left % 60:02} left, {name}"
        text = text[: shutil.get_terminal_size().columns - 1]
        out.write(f"\r{text.ljust(width)}")
        out.flush()
        width = len(text)

    try:
        yield show
    finally:
        if width:
            out.write("\n")
