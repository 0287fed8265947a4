"""Charts of reports and results, as figures of matplotlib, which is loaded when one is drawn."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any  # matplotlib is optional, and slow to load

PICTURE = "layers.svg"  # in the folder of a pruned model
UNITS = {"neurons": "neurons", "heads": "head groups"}  # of a shrunk model, by kind
GREEN, GREY, SAND, PLUM = "#7a9e3f", "#c9c5bb", "#d9c8a9", "#8a1c4a"


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ValueError("a chart needs matplotlib: pip install 'prunus[plot]'")


def check_picture(path: Path) -> None:
    """ValueError unless a chart can be written to ``path``."""
    check_matplotlib()
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"a chart must end in .svg or .png, got {path}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder, or its folder does not exist")


def layers_chart(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """Bars of the sparsity of each layer, or of the units it lost; below them its errors, where it was repaired."""
    units = [text for kind, text in UNITS.items() if any(layer.get("kind") == kind for layer in layers)]
    title = f"{' and '.join(units)} removed from each layer" if units else "sparsity of each layer"
    old, new = ("old values", "solved anew") if units else ("mask alone", "repaired")
    errors = {"mask_error": (old, SAND), "error": (new, PLUM)}
    known = [place for place, layer in enumerate(layers) if all(finite(layer.get(key)) is not None for key in errors)]
    size = min(max(6.0, 0.12 * len(layers)), 40.0), 4.4 if known else 2.4
    figure, (above, *below) = _axes(*size, [title, "relative error of its outputs"][: 2 if known else 1])
    above.bar(range(len(layers)), [layer["sparsity"] for layer in layers], 0.9, color=GREEN)
    above.set_ylim(0, 1)
    above.yaxis.set_major_formatter("{x:.0%}")
    for axes in below:
        for key, (label, colour) in errors.items():
            axes.bar(known, [layers[place][key] for place in known], 0.9, color=colour, label=label)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0)
    names = [_block(layer["name"]) for layer in layers]
    starts = [place for place, name in enumerate(names) if place == 0 or name != names[place - 1]]
    above.set_xticks(starts, [names[place] for place in starts], parse_math=False)
    return figure


def _block(name: str) -> str:
    """The number of a layer's block, or the first part of its name."""
    digits = re.search(r"\d+", name)
    return digits.group() if digits else name.split(".")[0][:12]


def trials_chart(trials: Sequence[tuple[float, float, bool]], dense: float) -> Figure:
    """The metric of each trial (sparsity, metric, whether it was accepted) over its sparsity; a line for ``dense``."""
    figure, (axes,) = _axes(5.0, 2.6, ["metric over sparsity"])
    axes.axhline(dense, color="black", linewidth=1, label="dense")
    for accepted, colour, label in ((True, GREEN, "accepted"), (False, GREY, "undone")):
        points = [trial[:2] for trial in trials if trial[2] is accepted and finite(trial[1]) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=colour, label=label)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.legend(fontsize="small")
    return figure


def recovery_chart(points: Sequence[tuple[int, float | None]], levels: Mapping[str, Any], metric: str) -> Figure:
    """The metric of each point (tokens, metric) over its tokens, with a line for each level; only finite ones."""
    figure, (axes,) = _axes(5.0, 2.6, [f"held-out {metric} over tokens"])
    from matplotlib.ticker import EngFormatter

    for (name, level), colour in zip(levels.items(), ("black", PLUM), strict=False):
        if finite(level) is not None:
            axes.axhline(level, color=colour, linewidth=1, label=name)
    shown = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    axes.plot([x for x, _ in shown], [y for _, y in shown], "o-", color=GREEN, markersize=4, label="recovered")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.legend(fontsize="small")
    return figure


def _axes(width: float, height: float, titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    check_matplotlib()
    from matplotlib import figure

    drawn = figure.Figure((width, height), layout="constrained")
    columns = drawn.subplots(len(titles), sharex=True, squeeze=False)
    for (axes,), title in zip(columns, titles, strict=True):
        axes.set_title(title, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#dddddd")
    return drawn, [axes for (axes,) in columns]


def svg(figure: Figure, title: str = "Chart of Prunus") -> str:
    """A figure as SVG, with text that can be searched; the same figure gives the same text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": "prunus", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    text = file.getvalue()
    return re.sub(r"[ \t]+\n", "\n", text[text.index("<svg") :])


def save(figure: Figure, path: Path) -> None:
    check_picture(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=200, metadata={"Software": None})


def layers_svg(layers: Sequence[Mapping[str, Any]]) -> str:
    """The chart of layers as SVG, or nothing where matplotlib is not installed."""
    return svg(layers_chart(layers)) if find_spec("matplotlib") else ""


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def notebook_html(title: str, chart: Callable[[], Figure], columns: Sequence[str], rows: Sequence[Sequence]) -> str:
    """What a notebook shows of a result: a few lines, the chart, and a table that opens where it is short."""
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    picture = f'<div style="overflow-x: auto">{svg(chart())}</div>' if find_spec("matplotlib") else ""
    return (
        f'<p style="white-space: pre-line">{escape(title)}</p>{picture}'
        f"<details{' open' * (len(rows) <= 12)}><summary>{len(rows)} rows</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
    )
