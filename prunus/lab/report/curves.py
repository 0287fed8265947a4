"""What happened during training: loss and quality, of one run or of arms side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

from .cells import ArmRow, Source, mean_of
from .numbers import number, percent, plain, short_percent
from .panel import MUTED, Mark, Number, NumberTable, Panel, Trace, axis, cell, layout
from .records import Json, RunRecord

MAX_POINTS, MAX_ROWS = 1500, 250
ACCENT = "var(--arm-1)"
Pick = Callable[[Json], float | None]


@dataclass(frozen=True)
class Point:
    """Mean over seeds at a step, with the smallest and the largest of them."""

    step: int
    x: float  # tokens or images
    mean: float
    low: float
    high: float


def loss_at(line: Json) -> float | None:
    return number(line.get("loss"))


def quality_at(record: RunRecord, metric: str | None = None) -> Pick:
    name, scale = metric or record.metric.name, 1.0 if metric else record.metric.scale

    def pick(line: Json) -> float | None:
        value = number(line["eval"].get(name)) if isinstance(line.get("eval"), dict) else None
        return None if value is None else value * scale

    return pick


def points(records: Sequence[RunRecord], pick: Pick) -> list[Point]:
    """One point for each step at which any of the runs has a number."""
    by_step: dict[int, list[float]] = {}
    for record in records:
        for line in record.lines:
            if (value := pick(line)) is not None:
                by_step.setdefault(line["step"], []).append(value)
    return [
        Point(step, step * records[0].per_step, mean_of(values) or 0.0, min(values), max(values))
        for step, values in sorted(by_step.items())
    ]


def at_most(items: Sequence[Any], limit: int) -> list[Any]:
    """Every n-th item so that no more than ``limit`` stay, the last one always."""
    stride = -(-len(items) // limit)
    return list(items) if stride <= 1 else [*items[:-1:stride], items[-1]]


def frame(series: Sequence[Sequence[Point]]) -> list[float] | None:
    """Range of y over the last three quarters of the run: what comes before would flatten the rest."""
    end = max((p.x for one in series for p in one), default=0)
    late = [p for one in series for p in one if p.x >= end / 4]
    if not late:
        return None
    low, high = min(p.low for p in late), max(p.high for p in late)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - pad, high + pad]


def metric_name(record: RunRecord) -> str:
    return "Held-out perplexity" if record.is_language else "Held-out accuracy, %"


def run_panels(record: RunRecord) -> list[Panel]:
    logged, held_out = points([record], loss_at), points([record], quality_at(record, "loss"))
    quality, name = points([record], quality_at(record)), metric_name(record)
    x = axis(record.unit, rangemode="tozero", unifiedhovertitle={"text": f"%{{x:,}} {record.unit}"})
    hover = "%{y:.4g}<extra>%{fullData.name}</extra>"
    shown = at_most(record.logs, MAX_ROWS)
    rows = [
        [*_place(line["step"], record), cell(line["loss"]), cell(line.get("lr"), partial(plain, digits=3))]
        for line in shown
    ]
    said = "Every line" if len(shown) == len(record.logs) else f"{len(shown)} of {len(record.logs)} lines"
    loss = Panel(
        "Loss",
        [
            line_trace("training", logged, Mark(MUTED, width=1.2), hover),
            line_trace("held-out", held_out, Mark(ACCENT, width=2.2), hover) | {"mode": "lines+markers"},
        ],
        layout(x, axis("loss, nats", range=frame([logged, held_out])), hovermode="x unified"),
        NumberTable(f"{said} of metrics.jsonl", ["step", record.unit, "training loss", "learning rate"], rows),
    )
    rows = [
        [
            *_place(line["step"], record),
            *(cell(line["eval"].get(key)) for key in ("loss", "perplexity", "accuracy")),
            cell(line.get("sparsity"), percent),
        ]
        for line in at_most(record.evals, MAX_ROWS)
    ]
    columns = ["step", record.unit, "held-out loss", "perplexity", "accuracy", "sparsity"]
    held_out_quality = Panel(
        name,
        [line_trace(name, quality, Mark(ACCENT, width=2.2), "%{y:.5g}<extra></extra>") | {"mode": "lines+markers"}],
        layout(x, axis(name.lower(), range=frame([quality])), hovermode="x unified"),
        NumberTable("Every evaluation on held-out data", columns, rows),
    )
    return [loss, held_out_quality]


def _place(step: int, record: RunRecord) -> list[Number]:
    return [cell(step, "{:,}".format), cell(step * record.per_step, "{:,}".format)]


def compared_panels(source: Source, marks: Mapping[str, Mark], what: str, far: Sequence[ArmRow]) -> list[Panel]:
    """Training loss, or quality, of all arms: one panel a sparsity, dense in each; ``far`` ones may leave the frame."""
    record = source.record
    pick, name = (loss_at, "Training loss") if what == "loss" else (quality_at(record), metric_name(record))
    made = []
    for sparsity in source.sparsities or [0.0]:
        runs = {arm: source.runs(arm, sparsity) or source.runs(arm, 0.0) for arm in source.arms}
        series = {arm: points(records, pick) for arm, records in runs.items() if records}
        near = series.keys() - {"random", *(row.arm for row in far if row.sparsity == sparsity)}
        panel = _compared(series, marks, name, record)
        panel.layout["yaxis"]["range"] = frame([series[arm] for arm in near])
        made.append(replace(panel, title=f"{name}, {short_percent(sparsity)} sparse") if sparsity else panel)
    every = [panel.layout["yaxis"]["range"] for panel in made if panel.layout["yaxis"]["range"]]
    for panel in made if every else []:  # one scale, so that panels can be compared
        panel.layout["yaxis"]["range"] = [min(low for low, _ in every), max(high for _, high in every)]
    return made


def _compared(series: Mapping[str, list[Point]], marks: Mapping[str, Mark], name: str, record: RunRecord) -> Panel:
    traces: list[Trace] = []
    for arm in sorted(series, key=lambda arm: marks[arm].width):  # grey ones below
        if marks[arm].width > 1:
            traces += _band(series[arm], marks[arm])
        spread = " (%{customdata[0]:.4g} to %{customdata[1]:.4g})" * any(p.low < p.high for p in series[arm])
        traces.append(line_trace(arm, series[arm], marks[arm], f"%{{y:.4g}}{spread}<extra>%{{fullData.name}}</extra>"))
    few = sum(mark.width > 1 for arm, mark in marks.items() if arm in series) == len(series) <= 6
    by_step = {arm: {p.step: p.mean for p in line} for arm, line in series.items()}
    steps = sorted({step for line in by_step.values() for step in line})
    rows = [
        [*_place(step, record), *(cell(line.get(step)) for line in by_step.values())]
        for step in at_most(steps, MAX_ROWS)
    ]
    return Panel(
        name,
        traces,
        layout(
            axis(record.unit, rangemode="tozero", unifiedhovertitle={"text": f"%{{x:,}} {record.unit}"}),
            axis("", range=None),
            hovermode="x unified" if few else "closest",
        ),
        NumberTable(f"{name}, mean over seeds", ["step", record.unit, *series], rows),
    )


def line_trace(name: str, line: Sequence[Point], mark: Mark, hover: str) -> Trace:
    shown = at_most(line, MAX_POINTS)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name),
        "x": [p.x for p in shown],
        "y": [p.mean for p in shown],
        "customdata": [[p.low, p.high] for p in shown],
        "line": {"color": mark.colour, "width": mark.width, "dash": mark.dash},
        "marker": {"size": 5, "color": mark.colour},
        "hovertemplate": hover,
    }


def _band(line: Sequence[Point], mark: Mark) -> list[Trace]:
    """The area between the smallest and the largest seed; nothing for one seed."""
    if all(p.low == p.high for p in line):
        return []
    shown = at_most(line, MAX_POINTS)
    common = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "line": {"width": 0}, "x": [p.x for p in shown]}
    return [
        common | {"y": [p.low for p in shown]},
        common | {"y": [p.high for p in shown], "fill": "tonexty", "fillcolor": f"{mark.colour}/0.14"},
    ]
