"""Sparsity over the steps of a run, and by layer as a heat map: of one run, or of arms side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape

from .cells import Source, mean_of
from .curves import MAX_ROWS, at_most
from .numbers import number, percent, short_percent
from .panel import INK, Mark, Number, NumberTable, Panel, Trace, axis, cell, layout
from .records import RunRecord

LETTER, ROOM = 7, 160  # pixels: of a letter, and of the columns together on a narrow page
two_decimals = partial(percent, decimals=2)
Grid = Mapping[str, Mapping[str, float]]  # column -> layer -> sparsity


def run_map(record: RunRecord) -> Panel | None:
    columns = {f"{line['step']:,}": by for line in record.evals if (by := record.layer_sparsity(line))}
    return _map("Sparsity by layer over steps", "step", columns, scale=(0.0, 1.0)) if columns else None


def compared_maps(source: Source) -> list[Panel]:
    made = []
    for sparsity in source.sparsities:
        columns = {}
        for arm in source.arms:
            ended = [record.layer_sparsity(record.evals[-1]) for record in source.runs(arm, sparsity) if record.evals]
            if known := [by for by in ended if by]:
                columns[arm] = {layer: mean_of([by.get(layer) for by in known]) or 0.0 for layer in known[0]}
        if columns:
            made.append(_map(f"Sparsity by layer, {short_percent(sparsity)} in all", "", columns))
    return made


def _map(title: str, what: str, columns: Grid, scale: tuple[float, float] | None = None) -> Panel:
    layers = list(dict.fromkeys(layer for by in columns.values() for layer in by))
    names = [shortened(layer) for layer in layers]
    values = [value for by in columns.values() for value in by.values()]
    low, high = scale or (min(values), max(values))
    trace = {
        "type": "heatmap",
        "x": [escape(column) for column in columns],
        "y": [escape(name) for name in names],
        "z": [[columns[column].get(layer) for column in columns] for layer in layers],
        "zmin": low,
        "zmax": max(high, low + 0.01),
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)],
        "colorbar": {"tickformat": ".0%", "thickness": 10, "len": 1, "outlinewidth": 0, "ticklen": 0},
        "hovertemplate": f"%{{y}}<br>{what} %{{x}}: %{{z:.2%}}<extra></extra>",
    }
    rows = [[shortened(layer), *(cell(by.get(layer), two_decimals) for by in columns.values())] for layer in layers]
    longest = LETTER * max(map(len, columns))  # too long to lie beside each other, names of columns stand upright
    return Panel(
        title,
        [trace],
        layout(
            axis(what, type="category", showgrid=False),
            axis("", type="category", autorange="reversed", showgrid=False, tickmode="linear", dtick=1),
            hovermode="closest",
        ),
        NumberTable(title, ["layer", *columns], rows),
        height=15 * len(layers) + 80 + (0 if what or longest * len(columns) <= ROOM else longest),
    )


def shortened(layer: str) -> str:
    """A layer's name as people say it: the weight of blocks.0.mlp.up is 0.mlp.up."""
    return layer.removesuffix(".weight").removeprefix("blocks.").removeprefix("transformer.h.")


def shared_paths(records: Mapping[str, RunRecord]) -> dict[tuple[tuple[int, float], ...], list[str]]:
    paths: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for arm, record in records.items():
        known = [(event["step"], number(event.get("sparsity")) or 0.0) for event in record.events] or _counted(record)
        last = known[-1][1] if known else 0.0
        paths.setdefault(((0, 0.0), *known, (max(record.last_step, 1), last)), []).append(arm)
    return paths


def sparsity_panel(records: Mapping[str, RunRecord], marks: Mapping[str, Mark], title: str = "") -> Panel:
    """Sparsity over steps: a line is what was asked for of all arms on the same path, points were counted."""
    paths = shared_paths(records)
    traces: list[Trace] = []
    rows: list[list[str | Number]] = []
    for path, arms in paths.items():
        mark, name = path_mark(arms, marks), ", ".join(arms)
        traces += _path_traces(path, records[arms[0]], mark, name)
        rows += [[name, cell(step, "{:,}".format), cell(share, two_decimals)] for step, share in path[1:-1]]
    has_events = any(record.events for record in records.values())
    what = "asked for at every event" if has_events else "counted at every evaluation"
    return Panel(
        f"Sparsity over steps{title}",
        traces,
        layout(axis("step", rangemode="tozero"), axis("", tickformat=".0%", rangemode="tozero"), hovermode="closest"),
        NumberTable(f"Sparsity {what}", ["arm", "step", "sparsity"], at_most(rows, MAX_ROWS)),
    )


def path_mark(arms: Sequence[str], marks: Mapping[str, Mark]) -> Mark:
    """Ink for the path that most arms take, magnitude among them; else the look of the first arm with a colour."""
    if len(arms) > 1 and "magnitude" in arms:
        return Mark(INK)
    return replace(max((marks[arm] for arm in arms), key=lambda mark: mark.width), dash="solid")


def _counted(record: RunRecord) -> list[tuple[int, float]]:
    return [(line["step"], line["sparsity"]) for line in record.evals if number(line.get("sparsity")) is not None]


def _path_traces(path: Sequence[tuple[int, float]], record: RunRecord, mark: Mark, name: str) -> list[Trace]:
    counted = _counted(record)
    line = {"color": mark.colour, "width": mark.width, "dash": mark.dash, "shape": "hv"}
    target: Trace = {"type": "scatter", "mode": "lines", "line": line, "name": escape(name)}
    target |= {"x": [step for step, _ in path], "y": [share for _, share in path]}
    target |= {"hovertemplate": "%{y:.2%} asked<extra>%{fullData.name}</extra>"}
    return [
        *([target] if record.events else []),
        {"type": "scatter", "mode": "markers", "name": escape(name), "x": [step for step, _ in counted]}
        | {"y": [share for _, share in counted], "marker": {"size": 6, "color": mark.colour, "symbol": mark.symbol}}
        | {"hovertemplate": "%{y:.4%} counted<extra>%{fullData.name}</extra>"},
    ]
