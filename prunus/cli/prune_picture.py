"""A picture of a pruned model, layer by layer: how sparse each is, and the error of its outputs."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from ..oneshot import Layer

BAR, GAP, HEIGHT, MARGIN = 9, 8, 150, 50  # width of a layer, space between blocks, height of a chart, space around
COLOURS = {"sparsity": "#7a9e3f", "mask alone": "#d9c8a9", "repaired": "#8a1c4a"}


def picture(layers: "Sequence[Layer]") -> str:
    """An SVG file: bars of the sparsity above, of the errors with the mask alone and after the repair below."""
    places, labels, x, block = [], [], MARGIN, None
    for layer in layers:
        number = re.search(r"\d+", layer.name)
        if (here := number and number.group()) != block or not places:
            x += GAP if places else 0
            labels.append((x, here or layer.name.split(".")[0]))
            block = here
        places.append(x)
        x += BAR + 1
    errors = [error for layer in layers for error in (layer.mask_error, layer.error) if error is not None]
    width, height = max(x + MARGIN // 2, 460), (2 if errors else 1) * (HEIGHT + MARGIN) + MARGIN // 2
    top = _round_up(max(errors, default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="10" style="background: white">'
    ]
    charts = [("sparsity of each layer", 1.0, {}), ("error of its outputs, relative to what they are", top, COLOURS)]
    for (title, largest, legend), above in zip(charts[: 2 if errors else 1], (0, HEIGHT + MARGIN), strict=False):
        parts += _axes(title, largest, above + MARGIN, x, legend)
        parts += [f'<text x="{at}" y="{above + MARGIN + HEIGHT + 12}">{escape(text)}</text>' for at, text in labels]
    for at, layer in zip(places, layers, strict=True):
        said = f"{layer.name}: {layer.sparsity:.2%} zero"
        bars = [("sparsity", layer.sparsity, MARGIN + HEIGHT)]
        if layer.error is not None and layer.mask_error is not None:
            said += f", error {layer.mask_error:.4g} with the mask alone, {layer.error:.4g} repaired"
            both = {"mask alone": layer.mask_error, "repaired": layer.error}
            bars += [(kind, error / top, 2 * (MARGIN + HEIGHT)) for kind, error in both.items()]
        if layer.not_repaired:
            said += f", not repaired: {layer.not_repaired}"
        parts.append(f"<g><title>{escape(said)}</title>")
        for kind, share, bottom in bars:
            size = f'y="{bottom - HEIGHT * share:.1f}" width="{BAR}" height="{HEIGHT * share:.1f}"'
            parts.append(f'<rect x="{at}" {size} fill="{COLOURS[kind]}"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _axes(title: str, largest: float, top: float, right: float, legend: dict[str, str]) -> list[str]:
    """Title, lines with their values, and what the colours of the bars mean."""
    found = [f'<text x="{MARGIN}" y="{top - 12}" font-size="12" font-weight="bold">{escape(title)}</text>']
    for quarter in range(5):
        y, value = top + HEIGHT * (1 - quarter / 4), largest * quarter / 4
        label = f"{value:.0%}" if largest == 1 and not legend else f"{value:.3g}"
        found.append(f'<text x="{MARGIN - 6}" y="{y + 3}" text-anchor="end" fill="#555">{label}</text>')
        found.append(f'<path d="M{MARGIN} {y}H{right}" stroke="{"#ddd" if quarter else "#555"}"/>')
    at = MARGIN + 7 * len(title)
    for kind in ("mask alone", "repaired") if legend else ():
        found.append(f'<circle cx="{at}" cy="{top - 16}" r="4" fill="{legend[kind]}"/>')
        found.append(f'<text x="{at + 8}" y="{top - 12}">{kind}</text>')
        at += 80
    return found


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    if not 0 < value < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
