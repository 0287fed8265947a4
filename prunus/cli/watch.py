"""``prunus watch``"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..lab.report.read import Record
    from ..lab.report.source import Source
    from ..lab.trainer import Progress

QUIET = 60.0  # seconds without a line before a word is said about it
GRACE = 10.0  # seconds without anybody who trains before a run is said to be stopped: it may be about to go on


@dataclass(frozen=True)
class Command:
    """The charts of a run or a study in the terminal while it goes on; ends when it ends.

    Reads the folder and changes nothing. Outside a terminal it prints a line at each evaluation. A run that was stopped
    before its end is told, with exit code 1.
    """

    folder: tyro.conf.Positional[Path]  # run folder, study folder, or a folder of run folders
    every: float = 1.0  # seconds from one look to the next
    once: bool = False  # show what is there now and end


def run(command: Command) -> None:
    from rich.console import Console

    if command.every <= 0:
        raise ValueError(f"every is a number of seconds above 0, got {command.every}")
    console = Console(highlight=False)
    if command.once:
        from ..lab.report.source import read_source

        console.print(_view(read_source(command.folder), console, 0))
        return
    source = _watch(command, console) if console.is_terminal else _follow(command)
    if source.num_open > 0:
        from ..lab.live import stopped

        print(stopped(source.record, command.folder), flush=True)
        raise SystemExit(1)


def _watch(command: Command, console: "Console") -> "Source":
    """Charts until the end, or until nobody trains any more; what was seen last."""
    from rich.live import Live

    from ..files.lock import is_free
    from ..lab.report.source import read_source

    source, since = read_source(command.folder), time.monotonic()
    trained = since
    with Live(_view(source, console, 0), console=console, auto_refresh=False) as live:
        while source.num_open > 0 and not _is_left(source, trained):
            time.sleep(command.every)
            if not is_free(command.folder):
                trained = time.monotonic()
            new = read_source(command.folder)
            if _num_lines(new) != _num_lines(source):
                since = time.monotonic()
            source = new
            live.update(_view(source, console, time.monotonic() - since), refresh=True)
    return source


def _is_left(source: "Source", trained: float) -> bool:
    """Whether nobody trains a run any more, who was last seen to do so at ``trained``; of studies that is not known."""
    return source.kind == "run" and time.monotonic() - trained > GRACE


@contextmanager
def live_charts(folder: Path) -> "Iterator[Progress]":
    """A function to call after each step of the training in ``folder``; drawing takes a twentieth of the time."""
    from rich.console import Console
    from rich.live import Live

    from ..lab.report.source import read_source

    console, due = Console(stderr=True, highlight=False), 0.0
    with Live(console=console, auto_refresh=False) as live:

        def draw() -> None:
            nonlocal due
            began = time.monotonic()
            live.update(_view(read_source(folder), console, 0), refresh=True)
            due = began + max(1.0, 20 * (time.monotonic() - began))

        yield lambda step, values: draw() if time.monotonic() >= due else None
        draw()


def _num_lines(source: "Source") -> int:
    return sum(len(cell.record.lines) for cell in source.cells)


def _follow(command: Command) -> "Source":
    """One line for each evaluation and each failure that is new, as logs want it; else as ``_watch``."""
    from ..files.lock import is_free
    from ..lab.live import status
    from ..lab.report.source import read_source

    seen: dict[str, int] = {}
    failed: set[str] = set()
    num_lines, since = -1, time.monotonic()
    trained = since
    while True:
        source = read_source(command.folder)
        if _num_lines(source) != num_lines:
            num_lines, since = _num_lines(source), time.monotonic()
        elif time.monotonic() - since > QUIET:
            print(_silence(time.monotonic() - since), flush=True)
            since = time.monotonic()
        for cell in source.cells:
            record = cell.record
            if len(record.evals) > seen.get(record.name, 0):
                seen[record.name] = len(record.evals)
                print(f"{record.name}: {status(record)}", flush=True)
            if record.failure and record.name not in failed:
                failed.add(record.name)
                print(f"{record.name} failed: {record.failure}", flush=True)
        if source.num_open <= 0 or _is_left(source, trained):
            return source
        time.sleep(command.every)
        if not is_free(command.folder):
            trained = time.monotonic()


def _view(source: "Source", console: "Console", quiet: float) -> "RenderableType":
    """All that is shown; ``quiet`` are the seconds since anything was new."""
    from rich.console import Group
    from rich.text import Text

    from ..lab.live import failures, running

    record = source.record if source.kind == "run" else running(source)
    parts: list[RenderableType] = [] if source.kind == "run" else [_table(source)]
    if record:
        parts += [Text(record.name, style="bold"), *_charts(record, console)]
    parts += [Text(f"{name} failed: {why}", style="red") for name, why in failures(source)]
    if quiet > QUIET:
        parts.append(Text(_silence(quiet), style="yellow"))
    return Group(*parts)


def _silence(seconds: float) -> str:
    return f"nothing new for {seconds:.0f} s: it may have been interrupted"


def _charts(record: "Record", console: "Console") -> "list[RenderableType]":
    """Charts beside each other where there is room, else below each other."""
    from rich.table import Table
    from rich.text import Text

    from ..lab.live import layer_line, plain_letters, run_charts, status

    columns = 3 if console.width >= 120 else 2 if console.width >= 80 else 1
    show = (lambda line: line) if "utf" in console.encoding else plain_letters
    width = min(60, (console.width - 3 * (columns - 1)) // columns)
    grid = Table.grid(padding=(0, 3, 0, 0))
    cells = [
        Text("\n".join(map(show, lines)), style=style, no_wrap=True)
        for lines, style in zip(run_charts(record, width), ("blue", "green", "yellow"), strict=True)
    ]
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    layers = show(layer_line(record, console.width))
    return [Text(status(record)), grid, *([Text(layers, style="cyan", no_wrap=True)] if layers else [])]


def _table(source: "Source") -> "RenderableType":
    """Quality by arm and seed, which runs failed, and how far those are that go on."""
    from rich.table import Table
    from rich.text import Text

    seeds = sorted({cell.seed for cell in source.cells})
    table = Table(title=Text(source.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("arm")
    for heading in ("sparsity", *(f"seed {seed}" for seed in seeds)):
        table.add_column(heading, justify="right")
    for arm, sparsity in dict.fromkeys((cell.arm, cell.sparsity) for cell in source.cells):
        known = {c.seed: _state(c.record) for c in source.cells if (c.arm, c.sparsity) == (arm, sparsity)}
        table.add_row(Text(arm), f"{sparsity:.6g}", *(known.get(seed, "") for seed in seeds))
    return table


def _state(record: "Record") -> str:
    from ..lab.report.numbers import plain
    from ..lab.report.source import scale_of

    if record.has_diverged:
        return "diverged"
    if record.result is not None:
        return plain(record.quality and record.quality * scale_of(record))
    if record.failure:
        return "failed"
    return f"{record.last_step / max(1, record.total_steps):.0%} done"
