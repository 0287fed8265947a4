"""Charts of a run as text, for a terminal: lines drawn with braille dots, layers as blocks. Loads no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

from .report.curves import Point, loss_at, metric_name, points, quality_at
from .report.numbers import count, percent, plain
from .report.read import Record, number
from .report.source import Source

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell by row and column
BLOCKS = " ▁▂▃▄▅▆▇█"
LABEL = 9  # columns left of a chart
Series = Sequence[tuple[float, float]]


def drawn(series: Series, width: int, height: int) -> list[str]:
    """A line through the points, in ``height`` rows of ``width`` braille cells; empty rows for no point."""
    cells = [[0] * width for _ in range(height)]
    xs, ys = _scaled([x for x, _ in series], 2 * width - 1), _scaled([y for _, y in series], 4 * height - 1)
    before = None
    for x, y in zip(xs, ys, strict=True):
        for column, row in _between(before or (x, y), (x, y)):
            up = 4 * height - 1 - row
            cells[up // 4][column // 2] |= DOTS[up % 4][column % 2]
        before = x, y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _scaled(values: Sequence[float], top: int) -> list[int]:
    """Whole numbers from 0 to ``top`` in proportion; equal values lie in the middle."""
    if not values:
        return []
    low, high = min(values), max(values)
    return [round(top * (value - low) / (high - low)) if high > low else top // 2 for value in values]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots from one point to the next."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def chart(title: str, series: Series, size: tuple[int, int], show: Callable[[float], str] = plain) -> list[str]:
    """A titled chart with its highest and lowest value at the side, and the last one in the title."""
    width, height = size
    if not series:
        return [title, *[" " * width] * (height - 1), f"{'nothing yet':^{width}}"]
    values = [y for _, y in series]
    labels = [show(max(values)), *[""] * (height - 2), show(min(values))]
    rows = drawn(series, max(4, width - LABEL - 1), height)
    return [f"{title}: {show(values[-1])}"] + [f"{la:>{LABEL}} {row}" for la, row in zip(labels, rows, strict=True)]


def run_charts(record: Record, width: int, height: int = 6) -> list[list[str]]:
    """Loss, quality and sparsity so far."""
    size = (width, height)
    quality = _xy(points([record], quality_at(record)))
    return [
        chart("training loss", _xy(points([record], loss_at)), size),
        chart(metric_name(record).lower(), quality, size),
        chart("sparsity", sparsities(record), size, percent),
    ]


def _xy(line: Sequence[Point]) -> list[tuple[float, float]]:
    """The points but for the first tenth of the run, which would flatten the rest."""
    return [(p.x, p.mean) for p in line if p.x >= line[-1].x / 10]


def sparsities(record: Record) -> list[tuple[float, float]]:
    """Steps and sparsities of the events, each kept until the next."""
    found: list[tuple[float, float]] = [(0.0, 0.0)]
    for event in record.events:
        value = number(event.get("sparsity")) or 0.0
        found += [(event["step"], found[-1][1]), (event["step"], value)]
    return [*found, (max(record.last_step, 1), found[-1][1])]


def layer_line(record: Record, width: int) -> str:
    """One block a layer, in the model's order: the fuller, the sparser. Empty where layers are not recorded."""
    by = next((by for line in reversed(record.evals) if (by := record.layer_sparsity(line))), {})
    if not by:
        return ""
    stride = -(-len(by) // max(1, width - 2 * LABEL - 10))
    values = list(by.values())[::stride]
    blocks = "".join(BLOCKS[round(8 * value)] for value in values)
    return f"{len(by)} layers, {percent(min(by.values()))} to {percent(max(by.values()))} {blocks}"


def status(record: Record) -> str:
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


def stopped(record: Record, folder: Path) -> str:
    """What is said of a run without an end that nobody trains any more."""
    study = folder.resolve().parent.parent
    mend = f"train --resume --out {folder}" if not (study / "study.json").is_file() else f"study --out {study}"
    done = f"step {record.last_step:,} of {record.total_steps:,}"
    return f"{record.name} was stopped before its end, at {done}; prunus {mend} continues it"


def running(source: Source) -> Record | None:
    """The run that goes on; of several the one that is the farthest. None is one that failed."""
    going = [cell.record for cell in source.cells if cell.record.is_open]
    return max(going, key=lambda record: record.last_step / max(1, record.total_steps), default=None)


def failures(source: Source) -> list[tuple[str, str]]:
    """Runs that failed, with why."""
    return [(cell.record.name, cell.record.failure) for cell in source.cells if cell.record.failure]


def plain_letters(line: str) -> str:
    """The line for a terminal without braille: stars for dots, and the eighths of a block as digits."""
    blocks = {block: str(eighths) for eighths, block in enumerate(BLOCKS) if eighths}
    return "".join(" " if c == "\u2800" else "*" if "\u2800" < c < "\u2900" else blocks.get(c, c) for c in line)
