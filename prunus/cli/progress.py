"""A progress bar for a training, with what is known so far beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..lab.trainer import Progress as Report


@contextmanager
def progress_bar(title: str, total: int) -> "Iterator[Report]":
    """A function to call after each step; outside a terminal it prints a line at each evaluation."""
    console = Console(stderr=True)
    known: dict[str, Any] = {}
    with _bar(console, 12) as bar:
        task = bar.add_task(title, total=total, known="")

        def report(step: int, values: dict[str, Any]) -> None:
            known.update(values)
            bar.update(task, completed=step, known=_line(known))
            if "eval" in values and not console.is_terminal:
                console.print(f"{title}: step {step}/{total}, {_line(known)}", highlight=False, soft_wrap=True)

        yield report


@contextmanager
def weights_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call after each weight that is done, with how many there are and its name."""
    console = Console(stderr=True)
    with _bar(console, 18) as bar:
        task = bar.add_task(title, total=None, known="")

        def report(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, known=name)

        yield report


def _line(known: dict[str, Any]) -> str:
    parts = [f"loss {known['loss']:.3f}"] if "loss" in known else []
    if "eval" in known:
        parts.append(f"held-out {known['eval']['loss']:.3f}")
        parts.append(f"sparsity {known['sparsity']:.1%}")
    return ", ".join(parts)


def _bar(console: Console, width: int) -> Progress:
    """A bar with a title of ``width``, shown only in a terminal."""
    columns = (
        TextColumn(f"{{task.description:{width}}}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[known]}"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def wide_console() -> Console:
    """The terminal as it is; a file gets lines that are not broken."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
