"""The page of a folder that ``prunus prune`` wrote."""

from html import escape
from importlib import resources
from pathlib import Path

from ...plot import layers_svg
from ..schema import AMOUNT, ANY, SHARE, TEXT, Maybe, Named, Spec, read_checked
from .numbers import duration, memory, number

PRUNED: Spec = {
    "rows": Named({"sparsity": SHARE}),
    "layers": [{"name": TEXT, "sparsity": SHARE, "mask_error": ANY, "error": ANY, "not_repaired": Maybe(TEXT)}],
    "settings": {"model": TEXT},
    "seconds": AMOUNT,
    "peak_bytes": AMOUNT,
}


def is_pruned(folder: Path) -> bool:
    """Whether ``prunus prune`` wrote a folder; exported ones have a configuration, and no figures."""
    return (folder / "config.json").is_file() and (folder / "result.json").is_file()


def pruned_page(folder: Path) -> str:
    """The figures of a pruned model and its picture, as one page that needs nothing beside it."""
    result = read_checked(folder / "result.json", PRUNED)
    rows, layers = result.get("rows", {}), result.get("layers", [])
    if not all({"name", "sparsity"} <= layer.keys() for layer in layers):
        raise ValueError(f"{folder / 'result.json'}: a layer lacks its name or its sparsity")
    metric = next((name for row in rows.values() for name in row if name != "sparsity"), "metric")
    style = resources.files("prunus.lab.report").joinpath("style.css").read_text(encoding="utf-8")
    figures = {
        name: "not finite" if number(row.get(metric)) is None else f"{row[metric]:.4f}" for name, row in rows.items()
    }
    cells = [(name, f"{row.get('sparsity', 0):.2%}", figures[name]) for name, row in rows.items()]
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    sparsity = max((row.get("sparsity", 0) for row in rows.values()), default=0)
    title = escape(str(result.get("settings", {}).get("model", folder.name)))
    cost = f"{duration(result.get('seconds', 0))}, {memory(result.get('peak_bytes', 0))} at the peak"
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
{layers_svg(layers)}</div></section>
</main>
</body>
</html>
"""
