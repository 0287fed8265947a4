"""Parts of a picture: an SVG that carries both of its themes, so that it can be read wherever it is shown."""

import math
from collections.abc import Iterator, Sequence
from html import escape

WIDTH = 680
COLOURS = {  # class: light, dark
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#30363d"),
    "plum": ("#8a1c4a", "#f0709f"),
    "rose": ("#c2557f", "#d98aa9"),
    "moss": ("#57741f", "#a3c65c"),
    "sand": ("#8b6a2b", "#d8b26a"),
    "slate": ("#4a6280", "#8fb0d6"),
}


def svg(height: int, title: str, parts: Sequence[str]) -> str:
    """A whole file; every line of ``parts`` is one element."""
    themes = [
        "".join(f".{name}{{fill:{pair[i]}}}.s-{name}{{stroke:{pair[i]}}}" for name, pair in COLOURS.items())
        for i in (0, 1)
    ]
    lines = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">
<title id="title">{escape(title)}</title>
<style>
text{{font:15px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.h{{font-size:18px;font-weight:600}}.b{{font-weight:600}}.small{{font-size:13px}}.no-fill{{fill:none}}
{themes[0]}
@media (prefers-color-scheme:dark){{{themes[1]}}}
</style>
<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>
{lines}
</svg>
"""


def text(x: float, y: float, words: str, classes: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" class="no-fill s-{colour}" stroke-width="{width}"{dashed}/>'


def dot(x: float, y: float, colour: str, radius: float = 3.5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{colour}"/>'


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, moved down as far as is needed for ``gap`` between neighbours."""
    found, last = [0.0] * len(places), -math.inf
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        last = found[index] = max(places[index], last + gap)
    return found


def ticks(low: float, high: float) -> Iterator[float]:
    """1, 3, 10, 30, ... between two numbers."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (value for value in (10.0**power, 3 * 10.0**power) if low <= value <= high)
