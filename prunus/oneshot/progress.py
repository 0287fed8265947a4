"""Progress of a long call: a bar that renews itself in a terminal or a notebook, and elsewhere a line now and then."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]  # steps done, steps in all, and what is being done
QUIET = {"bar": 1.0, "lines": 5.0}  # seconds at the start without either: what is short needs none
PAUSE = 0.1  # seconds from one bar to the next, at least
LINES = 10  # of a whole call
BAR = 20  # characters


class Meter:
    """Counts the steps of a call: a layer that is done, a sample that was read for a score, an epoch of tuning."""

    def __init__(self) -> None:
        self.begin(None, 0)

    def begin(self, report: Progress | None, total: int) -> None:
        self.report, self.total, self.num_done, self.phase = report, total, 0, ""
        self._goal, self._counts_samples = total, False

    def show(self, phase: str) -> None:
        self.phase = phase
        if self.report is not None:
            self.report(self.num_done, self.total, phase)

    def step(self, phase: str, num: int = 1) -> None:
        self.num_done = min(self.num_done + num, self._goal)
        self.show(phase)

    def finish(self) -> None:
        if self.num_done < self.total:
            self.step(self.phase, self.total)

    def sampled(self, num: int) -> None:
        """A pass has gone over ``num`` samples, which are steps of some parts."""
        if self._counts_samples:
            self.step(self.phase, num)

    @contextmanager
    def part(self, phase: str, num: int, *, of_samples: bool = False) -> Iterator[None]:
        """What takes ``num`` steps, however many of them it counts itself."""
        before = self._goal, self._counts_samples
        self._goal, self._counts_samples = min(self.num_done + num, self.total), of_samples
        self.show(phase)
        try:
            yield
            self.num_done = self._goal
        finally:
            self._goal, self._counts_samples = before


@contextmanager
def progress_line(progress: Progress | bool | None, title: str) -> Iterator[Progress | None]:
    """The function that reports progress: the one given, none for False, else one that shows it."""
    if callable(progress):
        yield progress
        return
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    is_notebook = any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)
    out = sys.stdout if is_notebook else sys.stderr
    if progress is False or out is None:
        yield None
        return
    shown = _Bar(title) if is_notebook or out.isatty() else _Lines(title)

    def show(num_done: int, total: int, phase: str) -> None:
        out.write(shown(num_done / max(1, total), phase if phase.isprintable() else ascii(phase)))
        out.flush()

    try:
        yield show
    finally:
        out.write(shown.end)


class _Left:
    """How long a call will still take, by what it did since the first report: one that goes on begins in the middle."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def __call__(self, now: float, share: float) -> str:
        began, before = self.first = self.first or (now, share)
        return f"about {_clock((now - began) * (1 - share) / (share - before))} left, " if before < share < 1 else ""


class _Bar:
    """A text that replaces the one before it in its line."""

    def __init__(self, title: str) -> None:
        self.title, self.began, self.last, self.width = title, time.monotonic(), 0.0, 0
        self.left = _Left()

    def __call__(self, share: float, phase: str) -> str:
        now = time.monotonic()
        left = self.left(now, share)
        if now - self.began < QUIET["bar"] or (now - self.last < PAUSE and share < 1):
            return ""
        bar = ("=" * round(BAR * share)).ljust(BAR)
        text = f"{self.title}: [{bar}] {share:.0%}, {left}{phase}"
        text = text[: shutil.get_terminal_size().columns - 1]
        before, self.last, self.width = self.width, now, len(text)
        return f"\r{text.ljust(before)}"

    @property
    def end(self) -> str:
        return "\n" if self.width else ""


class _Lines:
    """A line whenever a tenth more is done, for files and pipes."""

    end = ""

    def __init__(self, title: str) -> None:
        self.title, self.began, self.last, self.left = title, time.monotonic(), -1, _Left()

    def __call__(self, share: float, phase: str) -> str:
        now, number = time.monotonic(), int(LINES * share)
        seconds, left = now - self.began, self.left(now, share)
        if seconds < QUIET["lines"] or number == self.last:
            return ""
        self.last = number
        return f"{self.title}: {share:.0%} after {_clock(seconds)}, {left}{phase}\n"


def _clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"
