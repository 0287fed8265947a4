"""Where the zeros are: a heat map of sparsity by layer, over the steps of a run or over arms."""

from collections.abc import Mapping, Sequence
from html import escape

from .numbers import percent, short_percent
from .panel import Number, Panel, Table, axis, layout
from .read import Record
from .source import Source, mean_of

LETTER, ROOM = 7, 160  # pixels: of a letter, and of the columns together on a narrow page
Grid = Mapping[str, Mapping[str, float]]  # column -> layer -> sparsity


def run_map(record: Record) -> Panel | None:
    """Sparsity of every layer at every evaluation; None where it was not recorded."""
    found = {f"{line['step']:,}": by for line in record.evals if (by := record.layer_sparsity(line))}
    return _map("Sparsity by layer over steps", "step", found, scale=(0.0, 1.0)) if found else None


def compared_maps(source: Source) -> list[Panel]:
    """Sparsity of every layer at the end by arm, mean over seeds: one panel a sparsity."""
    made = []
    for sparsity in source.sparsities:
        columns = {arm: by for arm in source.arms if (by := _at_the_end(source.runs(arm, sparsity)))}
        if columns:
            title = f"Sparsity by layer, {short_percent(sparsity)} in all"
            made.append(_map(title, "", columns))
    return made


def _at_the_end(records: Sequence[Record]) -> dict[str, float]:
    """Mean over seeds at the last evaluation."""
    found = [by for record in records if record.evals and (by := record.layer_sparsity(record.evals[-1]))]
    return {layer: mean_of([by.get(layer) for by in found]) or 0.0 for layer in (found[0] if found else ())}


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
    last = list(columns.values())[-1]
    ends = sorted(last, key=lambda layer: last[layer])
    said = f"{shortened(ends[0])} {percent(last[ends[0]])} to {shortened(ends[-1])} {percent(last[ends[-1]])}"
    return Panel(
        title,
        f"Heat map of {len(layers)} layers by {len(columns)} columns; in the last column from {said}.",
        [trace],
        layout(
            axis(what, type="category", showgrid=False),
            axis("", type="category", autorange="reversed", showgrid=False, tickmode="linear", dtick=1),
            hovermode="closest",
        ),
        _table(title, layers, columns),
        height=15 * len(layers) + 80 + (0 if what else _below(columns)),
    )


def _below(columns: Grid) -> int:
    """Pixels that the names of the columns take below the map where they are too long to lie beside each other."""
    longest = LETTER * max(map(len, columns))
    return longest if longest * len(columns) > ROOM else 0


def _table(title: str, layers: Sequence[str], columns: Grid) -> Table:
    rows = [
        [shortened(layer), *(Number(percent(by.get(layer), 2), by.get(layer)) for by in columns.values())]
        for layer in layers
    ]
    return Table(title, ["layer", *columns], rows)


def shortened(layer: str) -> str:
    """A layer's name as people say it: the weight of blocks.0.mlp.up is 0.mlp.up."""
    return layer.removesuffix(".weight").removeprefix("blocks.").removeprefix("transformer.h.")
