"""What arms cost: time and peak memory."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from .numbers import duration, memory, plain
from .panel import BAR, GRID, LONG, MUTED, Mark, Number, Panel, Table, axis, dots, layout
from .source import Cell, Source, mean_of


def seconds_of(cell: Cell) -> float | None:
    return (cell.record.result or {}).get("seconds")


def memory_of(cell: Cell) -> float | None:
    """Bytes at the peak; older folders do not know it."""
    own = (cell.record.result or {}).get("peak_memory")
    mebibytes = cell.more.get("peak_mib")
    return own or (mebibytes * 2**20 if isinstance(mebibytes, int | float) else None)


def cost_panels(source: Source) -> list[Panel]:
    """Time and peak memory by arm: a bar for the mean, a point for every run."""
    warm = [cell for cell in source.cells if not cell.more.get("cold")] or source.cells
    peak = max((memory_of(cell) or 0 for cell in source.cells), default=0)
    size, letter = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    panels = [
        _cost("Training time", ("seconds", 1.0, duration), seconds_of, (source, warm)),
        _cost("Peak memory", (letter, size, memory), memory_of, (source, source.cells)),
    ]
    return [panel for panel in panels if panel.table.rows]


def _cost(
    title: str,
    unit: tuple[str, float, Callable[[float | None], str]],
    of: Callable[[Cell], float | None],
    what: tuple[Source, Sequence[Cell]],
) -> Panel:
    (name, size, show), (source, cells) = unit, what
    found = {arm: [v for cell in cells if cell.arm == arm and (v := of(cell))] for arm in reversed(source.arms)}
    found = {arm: values for arm, values in found.items() if values}
    means = {arm: mean_of(values) or 0.0 for arm, values in found.items()}
    bars = {"type": "bar", "orientation": "h", "marker": {"color": GRID}, "hoverinfo": "skip", "width": 0.62}
    bars |= {"x": [mean / size for mean in means.values()], "y": [escape(arm) for arm in means]}
    every = [(arm, value) for arm, values in found.items() for value in values]
    points = dots([escape(arm) for arm, _ in every], [value / size for _, value in every], [Mark(MUTED)] * len(every))
    points["marker"]["size"] = 6
    points |= {"text": [f"{escape(arm)}: {show(value)}" for arm, value in every]}
    points |= {"hovertemplate": "%{text}<extra></extra>"}
    words = "; ".join(f"{arm} {show(mean)}" for arm, mean in reversed(means.items()))
    return Panel(
        title,
        f"{title} by arm, mean over runs: {words or 'not recorded'}.",
        [bars, points],
        layout(axis(name, rangemode="tozero"), axis("", type="category", dtick=1), hovermode="closest"),
        Table(f"{title}, mean over runs", ["arm", name, "runs"], [_cost_row(a, means, found, size) for a in means]),
        height=80 + BAR * len(means),
        is_wide=any(len(arm) > LONG for arm in means),
    )


def _cost_row(
    arm: str, means: Mapping[str, float], found: Mapping[str, Sequence[float]], size: float
) -> list[str | Number]:
    value, runs = means[arm] / size, len(found[arm])
    return [arm, Number(plain(value), value), Number(str(runs), runs)]
