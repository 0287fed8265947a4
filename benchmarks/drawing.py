"""What all pictures share: colours for light and dark pages, a figure with a title, and axes without a frame."""

import math
import re
from collections.abc import Sequence
from typing import Literal

from prunus.plot import Axes, Figure, check_matplotlib, svg

COLOURS = {  # light: dark
    (PAPER := "#ffffff"): "#0d1117",
    (INK := "#1f2328"): "#e6edf3",
    (SOFT := "#59636e"): "#9198a1",
    (LINE := "#d1d9e0"): "#30363d",
    (PLUM := "#8a1c4a"): "#f0709f",
    (ROSE := "#c2557f"): "#d98aa9",
    (MOSS := "#57741f"): "#a3c65c",
    (SAND := "#8b6a2b"): "#d8b26a",
    (SLATE := "#4a6280"): "#8fb0d6",
}
SMALL = 8.5  # points


def themed(figure: Figure, title: str) -> str:
    """A figure as SVG that is readable on light and dark pages: in the dark its colours are those of ``COLOURS``."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in COLOURS.items()
        for kind in ("fill", "stroke")
    )
    text = svg(figure, title)
    text = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.2f}", text)  # machines round the rest differently
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    return text.replace("</style>", f"@media (prefers-color-scheme:dark){{{rules}}}</style>", 1)


def new_figure(height: float, title: str, about: str, below: str = "") -> Figure:
    """A figure with a title, what it shows, and a note at its foot."""
    check_matplotlib()
    from matplotlib import figure

    drawn = figure.Figure((6.8, height), facecolor=PAPER)
    drawn.text(0.035, 1 - 0.26 / height, title, color=INK, fontsize=13, fontweight="bold")
    drawn.text(0.035, 1 - 0.50 / height, about, color=SOFT)
    for place, line in enumerate(reversed(below.splitlines())):
        drawn.text(0.035, (0.14 + 0.145 * place) / height, line, color=SOFT, fontsize=SMALL)
    return drawn


def new_axes(figure: Figure, box: tuple[float, float, float, float], grid: Literal["x", "y"] | None = "y") -> Axes:
    """Axes at a place in inches, left, bottom, width and height: without a frame, but with lines of a grid."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height), facecolor="none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=SOFT)
    axes.minorticks_off()
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=LINE)
    else:
        axes.set(xticks=[], yticks=[])
    return axes


def log_ticks(low: float, high: float) -> list[float]:
    """1, 3, 10, 30, ... between two numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for value in (10.0**power, 3 * 10.0**power) if low <= value <= high]


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, moved up as far as is needed for ``gap`` between neighbours."""
    moved, last = [0.0] * len(places), -math.inf
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        last = moved[index] = max(places[index], last + gap)
    return moved
