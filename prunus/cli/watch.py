"""``prunus watch`` and ``prunus report``: the charts of runs as text and as a page. Loads no torch.

In a terminal lines are drawn with braille dots, and layers as blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from ..files.lock import is_free
from ..lab.report.cells import Source, read_source
from ..lab.report.curves import Point, loss_at, metric_name, points, quality_at
from ..lab.report.numbers import count, percent, plain
from ..lab.report.records import RunRecord, number
from .console import Terminal, print

if TYPE_CHECKING:
    from ..lab.trainer import Progress

QUIET = 60.0  # seconds without a new line before that is mentioned
SILENCE = "nothing new for {:.0f} s: it may have been interrupted"
GRACE = 10.0  # seconds without a training process before a run counts as stopped: it may be about to go on
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell by row and column
BLOCKS = " ▁▂▃▄▅▆▇█"
LABEL = 9  # columns left of a chart
Series = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ReportCommand:
    """One HTML page of a run, a study or a folder of runs; it opens from disk and loads nothing from elsewhere."""

    folder: tyro.conf.Positional[Path]  # run folder, study folder, or a folder of run folders
    out: Path | None = None  # where to write the page; without it report.html in the folder


def run_report(command: ReportCommand) -> None:
    from ..lab.report.page import write_report

    page = write_report(command.folder, command.out)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB; open it in a browser")


@dataclass(frozen=True)
class Command:
    """Show the charts of a run or a study in the terminal while it trains; end when it ends.

    The folder is only read. Outside a terminal a line is printed at each evaluation. If a run stops before its end,
    the last line says how to continue it, and the exit code is 1.
    """

    folder: tyro.conf.Positional[Path]  # run folder, study folder, or a folder of run folders
    every: float = 1.0  # seconds between updates
    once: bool = False  # show the current state and end


def run(command: Command) -> None:
    if not command.every > 0:
        raise ValueError(f"--every must be a number of seconds above 0, got {command.every}")
    console = Terminal()
    if command.once:
        console.print(_view(read_source(command.folder), console, 0))
        return
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for source, quiet in _looks(command):
                live.update(_view(source, console, quiet), refresh=True)
    else:
        source = _follow(command)
    if source.num_open > 0:
        print(stopped(source.record, command.folder), flush=True)
        raise SystemExit(1)


def _looks(command: Command) -> Iterator[tuple[Source, float]]:
    """What the folder holds and for how many seconds nothing was new, look by look.

    It ends when the run does, or when no process has trained it for too long; of studies the latter is not known.
    """
    num_lines, since = -1, time.monotonic()
    trained = since
    while True:
        source = read_source(command.folder)
        num_before, num_lines = num_lines, sum(len(cell.record.lines) for cell in source.cells)
        since = since if num_lines == num_before else time.monotonic()
        yield source, time.monotonic() - since
        is_abandoned = source.kind == "run" and time.monotonic() - trained > GRACE
        if source.num_open <= 0 or is_abandoned:
            return
        time.sleep(command.every)
        if not is_free(command.folder):
            trained = time.monotonic()


def _follow(command: Command) -> Source:
    """One line for each evaluation and each failure that is new, as logs want it; returns what was seen last."""
    num_evals, failed, mentioned = dict[str, int](), set[str](), 0.0
    for source, quiet in _looks(command):
        mentioned = min(mentioned, quiet)
        if quiet - mentioned > QUIET:
            print(SILENCE.format(quiet), flush=True)
            mentioned = quiet
        for record in (cell.record for cell in source.cells):
            if len(record.evals) > num_evals.get(record.name, 0):
                num_evals[record.name] = len(record.evals)
                print(f"{record.name}: {_status(record)}", flush=True)
            if record.failure and record.name not in failed:
                failed.add(record.name)
                print(f"{record.name} failed: {record.failure}", flush=True)
    return source


def stopped(record: RunRecord, folder: Path) -> str:
    """The line about a run without an end that no process trains any more."""
    study = folder.resolve().parent.parent
    command = f"train --resume --out {folder}" if not (study / "study.json").is_file() else f"study --out {study}"
    done = f"step {record.last_step:,} of {record.total_steps:,}"
    return f"{record.name} was stopped before its end, at {done}; prunus {command} continues it"


@contextmanager
def live_charts(folder: Path) -> "Iterator[Progress]":
    """A function to call after each step of the training in ``folder``; drawing takes a twentieth of the time."""
    console, due = Terminal(stderr=True), 0.0
    with Live(console=console, auto_refresh=False) as live:

        def draw() -> None:
            nonlocal due
            began = time.monotonic()
            live.update(_view(read_source(folder), console, 0), refresh=True)
            due = began + max(1.0, 20 * (time.monotonic() - began))

        yield lambda step, values: draw() if time.monotonic() >= due else None
        draw()


def _view(source: Source, console: Console, quiet: float) -> RenderableType:
    """All that is shown; ``quiet`` are the seconds since anything was new."""
    record = source.record if source.kind == "run" else running(source)
    parts: list[RenderableType] = [] if source.kind == "run" else [_table(source)]
    if record:
        parts += [Styled(record.name, "bold"), *_charts(record, console)]
    failed = [cell.record for cell in source.cells if cell.record.failure]
    parts += [Styled(f"{record.name} failed: {record.failure}", "red") for record in failed]
    if quiet > QUIET:
        parts.append(Styled(SILENCE.format(quiet), "yellow"))
    return Group(*parts)


def running(source: Source) -> RunRecord | None:
    """The run that goes on; of several the one that is farthest."""
    going = [cell.record for cell in source.cells if cell.record.is_open]
    return max(going, key=lambda record: record.last_step / max(1, record.total_steps), default=None)


def _table(source: Source) -> RenderableType:
    """Quality by arm and seed, which runs failed, and how far those are that go on."""
    seeds = sorted({cell.seed for cell in source.cells})
    table = Table(title=source.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold")
    for heading in ("sparsity", *(f"seed {seed}" for seed in seeds)):
        table.add_column(heading, justify="right")
    for arm, sparsity in dict.fromkeys((cell.arm, cell.sparsity) for cell in source.cells):
        known = {c.seed: _state(c.record) for c in source.cells if (c.arm, c.sparsity) == (arm, sparsity)}
        table.add_row(arm, f"{sparsity:.6g}", *(known.get(seed, "") for seed in seeds))
    return table


def _state(record: RunRecord) -> str:
    if record.has_diverged:
        return "diverged"
    if record.result is not None:
        return plain(record.quality)
    return "failed" if record.failure else f"{record.last_step / max(1, record.total_steps):.0%} done"


def _charts(record: RunRecord, console: Console) -> list[RenderableType]:
    """How far the run is, then loss, quality and sparsity beside each other where there is room, then its layers."""
    columns = 3 if console.width >= 120 else 2 if console.width >= 80 else 1
    show = (lambda line: line) if "utf" in console.encoding else plain_letters
    size = (min(60, (console.width - 3 * (columns - 1)) // columns), 6)
    charts = {
        "blue": chart("training loss", _later(points([record], loss_at)), size),
        "green": chart(metric_name(record).lower(), _later(points([record], quality_at(record))), size),
        "yellow": chart("sparsity", sparsities(record), size, percent),
    }
    cells = [Text("\n".join(map(show, lines)), style=style, no_wrap=True) for style, lines in charts.items()]
    grid = Table.grid(padding=(0, 3, 0, 0))
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    layers = show(layer_line(record, console.width))
    return [Text(_status(record)), grid, *([Text(layers, style="cyan", no_wrap=True)] if layers else [])]


def _status(record: RunRecord) -> str:
    """How far a run is, in a line."""
    done, total = record.last_step, record.total_steps
    parts = [f"step {done:,} of {total:,}", f"{count(done * record.per_step)} {record.unit}"]
    if record.logs and loss_at(record.logs[-1]) is None:
        return ", ".join([*parts, "diverged: its loss is not finite"])
    for pick, name in ((loss_at, "loss"), (quality_at(record), record.metric)):
        if line := points([record], pick):
            parts.append(f"{name} {plain(line[-1].mean)}")
    if record.events:
        parts.append(f"sparsity {percent(number(record.events[-1].get('sparsity')))}")
    return ", ".join(parts)


def _later(line: Sequence[Point]) -> list[tuple[float, float]]:
    """The points but for the first tenth of the run, which would flatten the rest."""
    return [(p.x, p.mean) for p in line if p.x >= line[-1].x / 10]


def sparsities(record: RunRecord) -> list[tuple[float, float]]:
    """Steps and sparsities of the events, each kept until the next."""
    found: list[tuple[float, float]] = [(0.0, 0.0)]
    for event in record.events:
        value = number(event.get("sparsity")) or 0.0
        found += [(event["step"], found[-1][1]), (event["step"], value)]
    return [*found, (max(record.last_step, 1), found[-1][1])]


def chart(title: str, series: Series, size: tuple[int, int], show: Callable[[float], str] = plain) -> list[str]:
    """A titled chart with its highest and lowest value at the side, and the last one in the title."""
    width, height = size
    if not series:
        return [title, *[" " * width] * (height - 1), f"{'nothing yet':^{width}}"]
    values = [y for _, y in series]
    labels = [show(max(values)), *[""] * (height - 2), show(min(values))]
    rows = drawn(series, max(4, width - LABEL - 1), height)
    return [f"{title}: {show(values[-1])}"] + [f"{la:>{LABEL}} {row}" for la, row in zip(labels, rows, strict=True)]


def drawn(series: Series, width: int, height: int) -> list[str]:
    """A line through the points, in ``height`` rows of ``width`` braille cells; empty rows for no point."""
    cells = [[0] * width for _ in range(height)]
    xs, ys = _scaled([x for x, _ in series], 2 * width - 1), _scaled([y for _, y in series], 4 * height - 1)
    before = None
    for end in zip(xs, ys, strict=True):
        start = before or end
        num_dots = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for i in range(num_dots + 1):
            column, row = (round(a + (b - a) * i / num_dots) for a, b in zip(start, end, strict=True))
            down = 4 * height - 1 - row
            cells[down // 4][column // 2] |= DOTS[down % 4][column % 2]
        before = end
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _scaled(values: Sequence[float], top: int) -> list[int]:
    """Whole numbers from 0 to ``top`` in proportion; equal values lie in the middle."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [round(top * (value - low) / (high - low)) if high > low else top // 2 for value in values]


def layer_line(record: RunRecord, width: int) -> str:
    """One block a layer, in the model's order: the fuller, the sparser. Empty where layers are not recorded."""
    by = next((by for line in reversed(record.evals) if (by := record.layer_sparsity(line))), {})
    if not by:
        return ""
    stride = -(-len(by) // max(1, width - 2 * LABEL - 10))
    blocks = "".join(BLOCKS[round(8 * value)] for value in list(by.values())[::stride])
    return f"{len(by)} layers, {percent(min(by.values()))} to {percent(max(by.values()))} {blocks}"


def plain_letters(line: str) -> str:
    """The line for a terminal without braille: stars for dots, and the eighths of a block as digits."""
    blocks = {block: str(eighths) for eighths, block in enumerate(BLOCKS) if eighths}
    return "".join(" " if c == "\u2800" else "*" if "\u2800" < c < "\u2900" else blocks.get(c, c) for c in line)
