"""Charts of reports and results: SVG drawn here, so that nothing need be installed; Pillow makes a PNG of it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

NARROW, WIDE, WIDTH = 9, 40, 380  # bars of a layer, and of the chart that they share where there are few
GAP, HEIGHT, MARGIN = 8, 150, 50  # space between blocks, height of a chart, space around
COLOURS = {"sparsity": "#7a9e3f", "mask alone": "#d9c8a9", "repaired": "#8a1c4a"}
ACCEPTED, REJECTED, INK, SOFT, RULE = "#7a9e3f", "#c9c5bb", "#000", "#555", "#ddd"
PICTURE = "layers.svg"  # in the folder of a pruned model
SHARPNESS = 2  # pixels of a PNG for one of the drawing


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    colour: str
    text: str = ""  # shown under the mouse

    def svg(self) -> str:
        size = f'x="{self.x}" y="{self.y:.1f}" width="{self.width}" height="{self.height:.1f}"'
        return f'<rect {size} fill="{self.colour}"><title>{escape(self.text)}</title></rect>'

    def draw(self, image: Any) -> None:
        corners = (self.x, self.y, self.x + self.width, self.y + self.height)
        image.rectangle([round(SHARPNESS * at) for at in corners], fill=self.colour)


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: str
    text: str = ""

    def svg(self) -> str:
        place = f'cx="{self.x:.1f}" cy="{self.y:.1f}" r="4"'
        return f'<circle {place} fill="{self.colour}"><title>{escape(self.text)}</title></circle>'

    def draw(self, image: Any) -> None:
        corners = (self.x - 4, self.y - 4, self.x + 4, self.y + 4)
        image.ellipse([SHARPNESS * at for at in corners], fill=self.colour)


@dataclass(frozen=True)
class Line:
    start: tuple[float, float]
    end: tuple[float, float]
    colour: str

    def svg(self) -> str:
        (x, y), (to_x, to_y) = self.start, self.end
        return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{self.colour}"/>'

    def draw(self, image: Any) -> None:
        image.line([SHARPNESS * at for at in (*self.start, *self.end)], fill=self.colour, width=SHARPNESS)


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    size: int = 10

    def svg(self) -> str:
        look = f'text-anchor="{self.anchor}" fill="{self.colour}" font-size="{self.size}"'
        return f'<text x="{self.x}" y="{self.y:.1f}" {look}>{escape(self.text)}</text>'

    def draw(self, image: Any) -> None:
        from PIL import ImageFont

        font, place = ImageFont.load_default(SHARPNESS * self.size), (SHARPNESS * self.x, SHARPNESS * self.y)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[self.anchor]
        image.text(place, self.text, fill=self.colour, font=font, anchor=anchor)


@dataclass(frozen=True, repr=False)
class Chart:
    """A drawing that notebooks show; ``save`` writes it to an .svg or a .png file."""

    width: float
    height: float
    shapes: Sequence[Bar | Dot | Line | Text]

    def __repr__(self) -> str:
        return f'Chart({self.width:.0f} x {self.height:.0f}; save("chart.svg") writes it)'

    @property
    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        look = 'font-family="system-ui, sans-serif" font-size="10" style="background: white"'
        shapes = [shape.svg() for shape in self.shapes]
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>', *shapes, "</svg>\n"])

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | PathLike[str]) -> None:
        path = Path(path)
        check_picture(path)
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg, encoding="utf-8")
            return
        from PIL import Image, ImageDraw

        picture = Image.new("RGB", (round(SHARPNESS * self.width), round(SHARPNESS * self.height)), "white")
        for shape in self.shapes:
            shape.draw(ImageDraw.Draw(picture))
        picture.save(path)


def check_picture(path: Path) -> None:
    """ValueError unless a chart can be written to ``path``."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"a chart is written as .svg or .png, got {path}")
    if path.suffix.lower() == ".png" and find_spec("PIL") is None:
        raise ValueError(f"{path} takes Pillow: pip install pillow, or write an .svg, which needs nothing")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder, or its folder is not there")


def layers_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Bars of the sparsity of each layer; below them those of its errors, where it was repaired."""
    places, labels, x, block = [], [], MARGIN, None
    bar = max(NARROW, min(WIDE, WIDTH // max(1, len(layers))))
    for layer in layers:
        digits = re.search(r"\d+", layer["name"])
        if (here := digits and digits.group()) != block or not places:
            x += GAP if places else 0
            labels.append((x, here or layer["name"].split(".")[0]))
            block = here
        places.append(x)
        x += bar + 1
    pairs = [[finite(layer.get(kind)) for kind in ("mask_error", "error")] for layer in layers]
    errors = [error for pair in pairs for error in pair if error is not None]
    top = _round_up(max(errors, default=1.0))
    shapes: list[Bar | Dot | Line | Text] = []
    charts = [("sparsity of each layer", 1.0, ()), ("relative error of its outputs", top, ("mask alone", "repaired"))]
    for (title, largest, legend), above in zip(charts[: 2 if errors else 1], (0, HEIGHT + MARGIN), strict=False):
        shapes += _frame(title, (0.0, largest), above + MARGIN, x, is_share=not legend)
        shapes += [Text(at, above + MARGIN + HEIGHT + 12, text) for at, text in labels]
        for number, kind in enumerate(legend):
            at = MARGIN + 7 * len(title) + 80 * number
            shapes += [Dot(at, above + MARGIN - 16, COLOURS[kind]), Text(at + 8, above + MARGIN - 12, kind)]
    for at, layer, (before, after) in zip(places, layers, pairs, strict=True):
        text = f"{layer['name']}: {layer['sparsity']:.2%} zero"
        bars = [("sparsity", layer["sparsity"], MARGIN + HEIGHT)]
        if before is not None and after is not None:
            text += f", error {before:.4g} with the mask alone, {after:.4g} repaired"
            both = {"mask alone": before, "repaired": after}
            bars += [(kind, error / top, 2 * (MARGIN + HEIGHT)) for kind, error in both.items()]
        if layer.get("not_repaired"):
            text += f", not repaired: {layer['not_repaired']}"
        if layer.get("dense"):
            text += f", dense: {layer['dense']}"
        for kind, share, bottom in bars:
            shapes.append(Bar(at, bottom - HEIGHT * share, bar, HEIGHT * share, COLOURS[kind], text))
    return Chart(max(x + MARGIN // 2, 460), (2 if errors else 1) * (HEIGHT + MARGIN) + MARGIN // 2, shapes)


def trials_chart(trials: Sequence[tuple[float, float, bool]], dense: float) -> Chart:
    """The metric of each trial (sparsity, metric, whether it was accepted) over its sparsity; a line for ``dense``."""
    known = [trial for trial in trials if finite(trial[1]) is not None]
    values = [dense, *(metric for _, metric, _ in known)]
    low, high = min(values), max(values)
    pad = 0.1 * (high - low) or abs(high) or 1.0
    low, high, right = low - pad if low < 0 else max(0.0, low - pad), high + pad, MARGIN + WIDTH
    shapes = _frame("metric over sparsity", (low, high), MARGIN, right)

    def place(sparsity: float, metric: float) -> tuple[float, float]:
        return MARGIN + (right - MARGIN) * sparsity, MARGIN + HEIGHT * (high - metric) / (high - low)

    shapes += [Text(place(s / 4, low)[0], MARGIN + HEIGHT + 12, f"{s / 4:.0%}", "middle", SOFT) for s in range(5)]
    level = place(0, dense)[1]
    shapes += [Line((MARGIN, level), (right, level), INK), Text(right, level - 4, "dense", "end")]
    for sparsity, metric, accepted in known:
        text = f"{sparsity:.2%} zero: {metric:.4g}, {'accepted' if accepted else 'taken back'}"
        shapes.append(Dot(*place(sparsity, metric), ACCEPTED if accepted else REJECTED, text))
    return Chart(right + MARGIN // 2, HEIGHT + 2 * MARGIN - MARGIN // 2, shapes)


def _frame(title: str, span: tuple[float, float], top: float, right: float, *, is_share: bool = False) -> list:
    """Title, and lines with their values."""
    found: list[Bar | Dot | Line | Text] = [Text(MARGIN, top - 12, title, size=12)]
    for quarter in range(5):
        y, value = top + HEIGHT * (1 - quarter / 4), span[0] + (span[1] - span[0]) * quarter / 4
        found.append(Text(MARGIN - 6, y + 3, f"{value:.0%}" if is_share else f"{value:.3g}", "end", SOFT))
        found.append(Line((MARGIN, y), (right, y), RULE if quarter else SOFT))
    return found


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten."""
    if not 0 < value < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def notebook_html(title: str, chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """What a notebook shows of a result: a few lines, the chart, and a table that opens where it is short."""
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<p style="white-space: pre-line">{escape(title)}</p><div style="overflow-x: auto">{chart.svg}</div>'
        f"<details{' open' * (len(rows) <= 12)}><summary>{len(rows)} rows</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
    )
