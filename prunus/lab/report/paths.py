"""The path that sparsity takes during training, of one run or of arms side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from .curves import MAX_ROWS, count_cell, number_cell, thinned
from .numbers import percent
from .panel import INK, Mark, Number, Panel, Table, Trace, axis, layout
from .read import Record, number


def shared_paths(records: Mapping[str, Record]) -> dict[tuple[tuple[int, float], ...], list[str]]:
    """Arms by the path that their sparsity took."""
    paths: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for arm, record in records.items():
        paths.setdefault(_path(record), []).append(arm)
    return paths


def sparsity_panel(records: Mapping[str, Record], marks: Mapping[str, Mark], title: str = "") -> Panel:
    """Sparsity over steps: asked for at events as a line, counted from the zeros at evaluations as points.

    Arms that took the same path are one line.
    """
    paths = shared_paths(records)
    traces: list[Trace] = []
    rows: list[list[str | Number]] = []
    for path, arms in paths.items():
        mark, name = path_mark(arms, marks), ", ".join(arms)
        traces += _path_traces(path, records[arms[0]], mark, name)
        rows += [[name, count_cell(step), number_cell(share, _exact)] for step, share in path[1:-1]]
    has_events = any(record.events for record in records.values())
    what = "asked for at every event" if has_events else "counted at every evaluation"
    said = "; ".join(f"{', '.join(arms)}: {percent(path[-1][1])} at step {path[-1][0]}" for path, arms in paths.items())
    return Panel(
        f"Sparsity over steps{title}",
        f"Sparsity over steps, at the end: {said}.",
        traces,
        layout(axis("step", rangemode="tozero"), axis("", tickformat=".0%", rangemode="tozero"), hovermode="closest"),
        Table(f"Sparsity {what}", ["arm", "step", "sparsity"], thinned(rows, MAX_ROWS)),
    )


def path_mark(arms: Sequence[str], marks: Mapping[str, Mark]) -> Mark:
    """Ink for the path that most arms take, magnitude among them; else the look of the first arm with a colour."""
    if len(arms) > 1 and "magnitude" in arms:
        return Mark(INK)
    return replace(max((marks[arm] for arm in arms), key=lambda mark: mark.width), dash="solid")


def _path(record: Record) -> tuple[tuple[int, float], ...]:
    """What events asked for, or what was counted where the folder does not hold them."""
    known = [(event["step"], number(event.get("sparsity")) or 0.0) for event in record.events] or _counted(record)
    last = known[-1][1] if known else 0.0
    return ((0, 0.0), *known, (max(record.last_step, 1), last))


def _counted(record: Record) -> list[tuple[int, float]]:
    return [(line["step"], line["sparsity"]) for line in record.evals if number(line.get("sparsity")) is not None]


def _path_traces(path: Sequence[tuple[int, float]], record: Record, mark: Mark, name: str) -> list[Trace]:
    counted = _counted(record)
    line = {"color": mark.colour, "width": mark.width, "dash": mark.dash, "shape": "hv"}
    asked: Trace = {"type": "scatter", "mode": "lines", "line": line, "name": escape(name)}
    asked |= {"x": [step for step, _ in path], "y": [share for _, share in path]}
    asked |= {"hovertemplate": "%{y:.2%} asked<extra>%{fullData.name}</extra>"}
    return [
        *([asked] if record.events else []),
        {"type": "scatter", "mode": "markers", "name": escape(name), "x": [step for step, _ in counted]}
        | {"y": [share for _, share in counted], "marker": {"size": 6, "color": mark.colour, "symbol": mark.symbol}}
        | {"hovertemplate": "%{y:.4%} counted<extra>%{fullData.name}</extra>"},
    ]


def _exact(value: float | None) -> str:
    return percent(value, 2)
