"""The page of a folder that ``prunus prune`` wrote, and its picture: sparsity and error of every layer."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ..schema import AMOUNT, ANY, SHARE, TEXT, Maybe, Named, Spec, read_checked
from .numbers import duration, memory
from .records import number

PICTURE = "layers.svg"  # in the folder of a pruned model
PRUNED: Spec = {
    "rows": Named({"sparsity": SHARE}),
    "layers": [{"name": TEXT, "sparsity": SHARE, "mask_error": ANY, "error": ANY, "not_repaired": Maybe(TEXT)}],
    "settings": {"model": TEXT},
    "seconds": AMOUNT,
    "peak_bytes": AMOUNT,
}
BAR, GAP, HEIGHT, MARGIN = 9, 8, 150, 50  # width of a layer, space between blocks, height of a chart, space around
COLOURS = {"sparsity": "#7a9e3f", "mask alone": "#d9c8a9", "repaired": "#8a1c4a"}


def pruned_page(folder: Path) -> str:
    """The figures of a pruned model and its picture, as one page that needs nothing beside it."""
    found = read_checked(folder / "result.json", PRUNED)
    rows, layers = found.get("rows", {}), found.get("layers", [])
    if not all({"name", "sparsity"} <= layer.keys() for layer in layers):
        raise ValueError(f"{folder / 'result.json'}: a layer lacks its name or its sparsity")
    metric = next((name for row in rows.values() for name in row if name != "sparsity"), "metric")
    style = resources.files("prunus.lab.report").joinpath("style.css").read_text(encoding="utf-8")
    cells = [(name, f"{row.get('sparsity', 0):.2%}", _plain(row.get(metric))) for name, row in rows.items()]
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    sparsity = max((row.get("sparsity", 0) for row in rows.values()), default=0)
    title = escape(str(found.get("settings", {}).get("model", folder.name)))
    cost = f"{duration(found.get('seconds', 0))}, {memory(found.get('peak_bytes', 0))} at the peak"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Prunus report</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="eyebrow">Prunus report · pruned model <b>{title}</b></p>
<h1>{sparsity:.0%} of the weights are zero</h1>
<p class="lede">Pruned in {escape(cost)}.</p>
</header>
<main>
<section><h2>On held-out data</h2>
<div class="scroll"><table><thead><tr><th>model</th><th>sparsity</th><th>{escape(metric)}</th></tr></thead>
<tbody>{"".join(f"<tr>{line}</tr>" for line in lines)}</tbody></table></div></section>
<section><h2>Layer by layer</h2><div class="scroll">
{picture(layers)}</div></section>
</main>
</body>
</html>
"""


def _plain(value: Any) -> str:
    return "not finite" if number(value) is None else f"{value:.4f}"


def picture(layers: Sequence[Mapping[str, Any]]) -> str:
    """An SVG file: bars of the sparsity above, of the errors with the mask alone and after the repair below."""
    places, labels, x, block = [], [], MARGIN, None
    for layer in layers:
        digits = re.search(r"\d+", layer["name"])
        if (here := digits and digits.group()) != block or not places:
            x += GAP if places else 0
            labels.append((x, here or layer["name"].split(".")[0]))
            block = here
        places.append(x)
        x += BAR + 1
    pairs = [[number(layer.get(kind)) for kind in ("mask_error", "error")] for layer in layers]
    errors = [error for pair in pairs for error in pair if error is not None]
    width, height = max(x + MARGIN // 2, 460), (2 if errors else 1) * (HEIGHT + MARGIN) + MARGIN // 2
    top = _round_up(max(errors, default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="10" style="background: white">'
    ]
    charts = [("sparsity of each layer", 1.0, {}), ("relative error of its outputs", top, COLOURS)]
    for (title, largest, legend), above in zip(charts[: 2 if errors else 1], (0, HEIGHT + MARGIN), strict=False):
        parts += _axes(title, largest, above + MARGIN, x, legend)
        parts += [f'<text x="{at}" y="{above + MARGIN + HEIGHT + 12}">{escape(text)}</text>' for at, text in labels]
    for at, layer, (before, after) in zip(places, layers, pairs, strict=True):
        said = f"{layer['name']}: {layer['sparsity']:.2%} zero"
        bars = [("sparsity", layer["sparsity"], MARGIN + HEIGHT)]
        if before is not None and after is not None:
            said += f", error {before:.4g} with the mask alone, {after:.4g} repaired"
            both = {"mask alone": before, "repaired": after}
            bars += [(kind, error / top, 2 * (MARGIN + HEIGHT)) for kind, error in both.items()]
        if layer.get("not_repaired"):
            said += f", not repaired: {layer['not_repaired']}"
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
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten."""
    if not 0 < value < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))
