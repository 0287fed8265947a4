"""Arms beside each other: quality over sparsity, differences with intervals, overlap of masks, time and memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from .cells import ArmRow, Source, mean_of
from .numbers import duration, fixed, memory, percent, plain, short_percent, signed, with_minus
from .panel import (
    GRID,
    INK,
    MUTED,
    PAPER,
    Mark,
    Number,
    NumberTable,
    Panel,
    Trace,
    arms_panel,
    axis,
    cell,
    dots,
    layout,
)
from .records import RunRecord

FAR = 10.0
Rows = Sequence[ArmRow]


def quality_panel(source: Source, marks: Mapping[str, Mark]) -> Panel:
    name = "Perplexity" if source.record.is_language else "Accuracy, %"
    traces: list[Trace] = []
    for place, arm in enumerate(sorted(source.arms, key=lambda arm: marks[arm].width)):
        own = [row for row in source.rows if row.arm == arm and row.mean is not None]
        dense = source.row(own[0].dense, 0.0) if own and own[0].sparsity else None
        if dense and dense.mean is not None:
            own = [dense, *own]  # a line begins where no weight is removed, in the same recipe
        if own:
            traces.append(_quality_trace(arm, own, marks[arm]))
            aside = 0.005 * (place - len(source.arms) / 2) if len(source.arms) < 10 else 0.0
            traces[-1]["x"] = [row.sparsity + aside * (row.sparsity > 0) for row in own]  # bars beside each other
    ended = [row for row in source.rows if row.mean is not None]
    frame = {"range": list(ends)} if (ends := frame_of(source)) else {}
    rows = [
        [
            row.arm,
            cell(row.sparsity, percent),
            cell(row.mean),
            cell(row.spread, lambda value: plain(value, 2)),
            cell(len(row.values), str),
        ]
        for row in sorted(ended, key=lambda row: (row.sparsity, row.mean or 0))
    ]
    return Panel(
        f"{name} against sparsity",
        traces,
        layout(
            axis("sparsity", tickformat=".0%", range=[-0.02, max(source.sparsities or [0.5]) + 0.04]),
            axis(name.lower(), **frame),
            hovermode="closest",
        ),
        NumberTable(f"{name} at the end", ["arm", "sparsity", "mean", "standard deviation", "seeds"], rows),
        height=380,
    )


def frame_of(source: Source) -> tuple[float, float] | None:
    """Quality that is shown: of all rows, without those that are far worse than the others of their sparsity."""
    sign, ends = source.record.metric.sign, []
    for sparsity in {row.sparsity for row in source.rows}:
        rows = [row for row in source.rows if row.sparsity == sparsity and row.mean is not None]
        middle = median(row.mean or 0 for row in rows) if rows else 0.0
        usual = median(abs((row.mean or 0) - middle) for row in rows) if rows else 0.0
        near = [row for row in rows if not sign * ((row.mean or 0) - middle) > FAR * usual > 0]
        ends += [(row.mean or 0) + side * (row.spread or 0) for row in near for side in (-1, 1)]
    pad = 0.06 * (max(ends) - min(ends)) if ends else 0.0
    return (min(ends) - pad, max(ends) + pad) if pad else None


def outside(source: Source) -> list[ArmRow]:
    low, high = frame_of(source) or (-math.inf, math.inf)
    return [row for row in source.rows if row.mean is not None and not low <= row.mean <= high]


def _quality_trace(arm: str, rows: Rows, mark: Mark) -> Trace:
    texts = []
    for row in rows:
        spread = f" ± {plain(row.spread, 2)} ({len(row.values)} seeds)" if row.spread is not None else " (one seed)"
        texts.append(f"{escape(row.arm)}, {short_percent(row.sparsity)}: {plain(row.mean)}{spread}")
    own = [row.arm == arm for row in rows]  # the dense point is drawn once
    bars = [(row.spread or 0) * mine for row, mine in zip(rows, own, strict=True)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(arm),
        "y": [row.mean for row in rows],
        "error_y": {"array": bars, "color": mark.colour, "thickness": 1.3, "width": 4},
        "line": {"color": mark.colour, "width": mark.width, "dash": mark.dash},
        "marker": {"color": mark.colour, "symbol": mark.symbol, "size": [(5 + 2 * mark.width) * mine for mine in own]},
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _grouped(source: Source, value: Callable[[ArmRow], float | None], sign: int = 1) -> list[list[ArmRow]]:
    """Rows that have the value, ordered by it: a list for each sparsity that has any."""
    groups = [[row for row in source.rows if row.sparsity == s and value(row) is not None] for s in source.sparsities]
    return [sorted(rows, key=lambda row: sign * (value(row) or 0)) for rows in groups if rows]


def difference_panels(source: Source, marks: Mapping[str, Mark]) -> list[Panel]:
    unit = "perplexity" if source.record.is_language else "accuracy, points"
    better = "left" if source.record.is_language else "right"
    panels = []
    for rows in _grouped(source, lambda row: row.difference, sign=-1):
        low, high = _extent(rows)
        labels = [_label(row) for row in rows]
        trace = dots(labels, [row.difference for row in rows], [marks.get(row.arm, Mark(MUTED)) for row in rows])
        trace |= {
            "error_x": {"array": [row.half_width or 0 for row in rows], "color": MUTED, "thickness": 1.5, "width": 0},
            "text": [f"{escape(row.arm)}: {escape(row.verdict)}" for row in rows],
            "hovertemplate": "%{text}<extra></extra>",
        }
        table = [
            (
                _against(row),
                Number(signed(row.difference, row.decimals), row.difference),
                Number(fixed(row.half_width, row.decimals), row.half_width),
                with_minus(row.verdict),
            )
            for row in rows
        ]
        panel = arms_panel(
            f"Difference at {short_percent(rows[0].sparsity)}; {better} is better",
            [trace],
            axis(unit, zeroline=True, zerolinecolor=INK, zerolinewidth=1, range=[low, high]),
            NumberTable("Paired differences", ["arm", "difference", "± (95 %)", "verdict"], table),
            [row.arm for row in rows],
            two_lines=any("<br>" in label for label in labels),
        )
        panel.layout["yaxis"]["showgrid"] = True
        panel.layout["annotations"] = [_beyond(r, low, high) for r in rows if not low <= (r.difference or 0) <= high]
        panels.append(panel)
    return panels


def _extent(rows: Rows) -> tuple[float, float]:
    """From the smallest to the largest interval, without random and what is as far away."""
    usual = median(abs(row.difference or 0) for row in rows)
    near = [row for row in rows if row.arm != "random" and not abs(row.difference or 0) > FAR * usual > 0] or rows
    ends = [0.0] + [(row.difference or 0) + side * (row.half_width or 0) for row in near for side in (-1, 1)]
    pad = 0.12 * (max(ends) - min(ends)) or 1.0
    return min(ends) - pad, max(ends) + pad


def _beyond(row: ArmRow, low: float, high: float) -> dict[str, Any]:
    """A label at the edge for an arm that lies outside the frame."""
    right = (row.difference or 0) > high
    text = f"{signed(row.difference)} →" if right else f"← {signed(row.difference)}"
    at = {"x": high if right else low, "xanchor": "right" if right else "left"}
    return at | {"y": _label(row), "text": text, "showarrow": False, "font": {"color": MUTED}, "bgcolor": PAPER}


def _against(row: ArmRow) -> str:
    if row.mixed:
        return f"{row.arm} – {row.against}, more differs"
    return row.arm if row.against in ("", "magnitude") else f"{row.arm} – {row.against}"


def _label(row: ArmRow) -> str:
    """Both arms on two lines; a recipe that they share is named once."""
    _, other, recipe = split_recipe(row.arm, row.against)
    said = f"{row.arm} – {other}, same recipe" if recipe else _against(row)
    return "<br>– ".join(escape(said).split(" – ", 1))


def split_recipe(arm: str, other: str) -> tuple[str, str, str]:
    """Two arms and the recipe that both names end with, as in "bitter7 lr 2e-3" and "magnitude lr 2e-3"."""
    (first, _, recipe), (second, _, same) = arm.partition(" "), other.partition(" ")
    return (first, second, recipe) if recipe and recipe == same else (arm, other, "")


def overlap_panels(source: Source, marks: Mapping[str, Mark]) -> list[Panel]:
    """How much of what an arm removed magnitude removed too: one panel a sparsity, chance as a line."""
    panels = []
    for rows in _grouped(source, lambda row: row.overlap):
        sparsity = rows[0].sparsity
        chance = sparsity / (2 - sparsity)  # expected for two independent masks
        values = {row.arm: row.overlap for row in rows}
        shown = [marks.get(row.arm, Mark(MUTED)) for row in rows]
        trace = dots([escape(row.arm) for row in rows], [row.overlap for row in rows], shown)
        trace["hovertemplate"] = "%{y}: %{x:.3f}<extra></extra>"
        cells = {arm: Number(fixed(value, 3), value) for arm, value in values.items()}
        panel = arms_panel(
            f"Overlap with magnitude at {short_percent(sparsity)}",
            [trace],
            axis("Jaccard overlap; dotted: chance", range=[0, 1.02]),
            NumberTable(f"Jaccard overlap; chance is {chance:.3f}", ["arm", "overlap"], [*map(list, cells.items())]),
            [row.arm for row in rows],
        )
        line = {"type": "line", "x0": chance, "x1": chance, "yref": "paper", "y0": 0, "y1": 1}
        panel.layout["shapes"] = [line | {"line": {"color": MUTED, "width": 1.2, "dash": "dot"}}]
        panels.append(panel)
    return panels


def memory_of(run: RunRecord) -> float | None:
    """Bytes at the peak; None until the run has ended."""
    own = (run.result or {}).get("peak_memory")
    mebibytes = run.more.get("peak_mib")
    return own or (mebibytes * 2**20 if isinstance(mebibytes, int | float) else None)


def cost_panels(source: Source) -> list[Panel]:
    warm = [cell for cell in source.cells if not cell.more.get("cold")] or source.cells
    peak = max((memory_of(cell) or 0 for cell in source.cells), default=0)
    unit = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    seconds = [(cell.arm, (cell.result or {}).get("seconds")) for cell in warm]
    memories = [(cell.arm, memory_of(cell)) for cell in source.cells]
    panels = [
        _cost("Training time", ("seconds", 1.0), duration, _by_arm(source, seconds)),
        _cost("Peak memory", unit, memory, _by_arm(source, memories)),
    ]
    return [panel for panel in panels if panel.table.rows]


def _by_arm(source: Source, values: Sequence[tuple[str, float | None]]) -> dict[str, list[float]]:
    by_arm = {arm: [value for name, value in values if name == arm and value] for arm in reversed(source.arms)}
    return {arm: own for arm, own in by_arm.items() if own}


def _cost(title: str, unit: tuple[str, float], show: Callable[..., str], found: Mapping[str, list[float]]) -> Panel:
    name, size = unit
    means = {arm: mean_of(values) or 0.0 for arm, values in found.items()}
    bars = {"type": "bar", "orientation": "h", "marker": {"color": GRID}, "hoverinfo": "skip", "width": 0.62}
    bars |= {"x": [mean / size for mean in means.values()], "y": [escape(arm) for arm in means]}
    every = [(arm, value) for arm, values in found.items() for value in values]
    points = dots([escape(arm) for arm, _ in every], [value / size for _, value in every], [Mark(MUTED)] * len(every))
    points["marker"]["size"] = 6
    points |= {"text": [f"{escape(arm)}: {show(value)}" for arm, value in every]}
    points |= {"hovertemplate": "%{text}<extra></extra>"}
    rows = [[arm, cell(mean / size), cell(len(found[arm]), str)] for arm, mean in means.items()]
    return arms_panel(
        title,
        [bars, points],
        axis(name, rangemode="tozero"),
        NumberTable(f"{title}, mean over runs", ["arm", name, "runs"], rows),
        list(means),
    )
