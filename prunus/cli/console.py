"""What commands print with: lines, tables and bars in which text from files stays text.

Names and messages in files may hold anything: sequences that rewrite the screen, line breaks that fake a line,
marks that reverse the direction of text. Commands print through this module, which shows such characters as escapes.
"""

import builtins
import json
import logging
import re
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..lab.trainer import Progress as Report

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Unicode's format characters that scripts are written with, and that act on nothing: soft hyphen, zero-width space,
# joiner and non-joiner, signs of Arabic, Syriac and Kaithi numbers
LETTERS = frozenset(
    "\u00ad\u200b\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
)


def escaped(text: str) -> str:
    r"""The text with every character that could act on the terminal written out: ``\x1b``, ``\n``, ``\u202e``."""
    if text.isprintable():
        return text
    shown = (c.isprintable() or c in LETTERS or unicodedata.category(c) == "Zs" for c in text)  # of any script
    return "".join(
        c if is_text else c.encode("unicode_escape").decode() for c, is_text in zip(text, shown, strict=True)
    )


def print(*lines: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Print each text as one line; an object that is no text, such as a report, may have several."""
    for line in lines:
        parts = [line] if isinstance(line, str) else str(line).split("\n")
        builtins.print(*map(escaped, parts), sep="\n", file=file, flush=flush)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def escaped_messages(who: str) -> Iterator[None]:
    """Escape what libraries log and warn of, which may quote files; our own warnings are a line that ``who`` begins."""
    create, form, show = logging.getLogRecordFactory(), warnings.formatwarning, warnings.showwarning

    def created(*args: Any, **options: Any) -> logging.LogRecord:
        record = create(*args, **options)
        with suppress(TypeError, ValueError, KeyError):  # a message that does not fit its arguments
            record.msg, record.args = _escaped_lines(record.getMessage()), None
        return record

    def formed(*args: Any, **options: Any) -> str:
        return _escaped_lines(form(*args, **options))

    def shown(message: Any, category: Any, filename: str, *rest: Any, **options: Any) -> None:
        if Path(filename).is_relative_to(Path(__file__).parents[1]):
            print(f"{who}: {message}", file=sys.stderr)
        else:
            show(message, category, filename, *rest, **options)

    logging.setLogRecordFactory(created)
    warnings.formatwarning, warnings.showwarning = formed, shown  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        logging.setLogRecordFactory(create)
        warnings.formatwarning, warnings.showwarning = form, show


def print_traceback(_: Any, error: BaseException, trace: Any) -> None:
    builtins.print(_escaped_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def _escaped_lines(text: str) -> str:
    return "\n".join(map(escaped, COLOURS.sub("", text).split("\n")))


class Terminal(Console):
    """A console that takes text as it is: no markup, no emoji codes, nothing that acts on the terminal."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, highlight: bool = False) -> None:
        super().__init__(stderr=stderr, width=width, highlight=highlight, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):  # what was no plain string has not been escaped yet
            yield segment if segment.control else segment._replace(text=_escaped_lines(segment.text))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for main to end the command, with the exit code of all commands


def wide_console() -> Terminal:
    """The terminal as it is; a file gets lines that are not broken."""
    console = Terminal(highlight=True)
    return console if console.is_terminal else Terminal(highlight=True, width=200)


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[str] = ()) -> Table:
    """A table whose first column, and those with the headings ``texts``, are text and the others numbers."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        is_text = not number or heading in texts
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress_bar(title: str, total: int, *, is_alone: bool = True) -> "Iterator[Report]":
    """A function to call after each step; it prints lines outside a terminal, and where others print to it too."""
    from ..oneshot.progress import progress_line

    known, is_terminal = dict[str, Any](), Terminal(stderr=True).is_terminal
    shows_lines = not (is_terminal and is_alone)
    with progress_line(False if is_terminal and not is_alone else None, title) as report_line:

        def report(step: int, values: dict[str, Any]) -> None:
            known.update(values)
            parts = [f"loss {known['loss']:.3f}"] if "loss" in known else []
            if "eval" in known:
                parts += [f"held-out {known['eval']['loss']:.3f}", f"sparsity {known['sparsity']:.1%}"]
            if "eval" in values and shows_lines:
                print(f"{title}: step {step}/{total}, {', '.join(parts)}", file=sys.stderr)
            elif report_line:
                report_line(step, total, ", ".join([f"step {step}/{total}", *parts]))

        yield report
