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
    shown = _Shown(title, is_notebook or out.isatty())

    def show(num_done: int, total: int, phase: str) -> None:
        out.write(shown(num_done / max(1, total), phase if phase.isprintable() else ascii(phase)))
        out.flush()

    try:
        yield show
    finally:
        out.write("\n" if shown.width else "")


class _Shown:
    """A bar that replaces the one before it in its line, or a line whenever a tenth more is done.

    The time that is left goes by what this call did since its first report: one that goes on begins in the middle.
    """

    def __init__(self, title: str, is_bar: bool) -> None:
        self.title, self.is_bar, self.began = title, is_bar, time.monotonic()
        self.first: tuple[float, float] | None = None
        self.last, self.num_tenths, self.width = 0.0, -1, 0

    def __call__(self, share: float, phase: str) -> str:
        now = time.monotonic()
        began, before = self.first = self.first or (now, share)
        if before < share < 1:
            phase = f"about {_clock((now - began) * (1 - share) / (share - before))} left, {phase}"
        return self._bar(now, share, phase) if self.is_bar else self._line(now, share, phase)

    def _bar(self, now: float, share: float, phase: str) -> str:
        if now - self.began < QUIET["bar"] or (now - self.last < PAUSE and share < 1):
            return ""
        text = f"{self.title}: [{('=' * round(BAR * share)).ljust(BAR)}] {share:.0%}, {phase}"
        text = text[: shutil.get_terminal_size().columns - 1]
        before, self.last, self.width = self.width, now, len(text)
        return f"\r{text.ljust(before)}"

    def _line(self, now: float, share: float, phase: str) -> str:
        num_tenths = int(LINES * share)
        if now - self.began < QUIET["lines"] or num_tenths == self.num_tenths:
            return ""
        self.num_tenths = num_tenths
        return f"{self.title}: {share:.0%} after {_clock(now - self.began)}, {phase}\n"


def _clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"
