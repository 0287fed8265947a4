"""A picture of a pruned model, layer by layer: how sparse each is, and the error of its outputs."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from ..oneshot import Layer

WIDTH, HEIGHT, MARGIN = 14, 160, 46  # of a layer, of each of the two charts, and around them
COLOURS = {"sparsity": "#7a9e3f", "mask alone": "#c9c4bb", "repaired": "#8a1c4a"}


def picture(layers: Sequence[Layer]) -> str:
    """An SVG file: bars of the sparsity above, of the errors with the mask alone and after the repair below."""
    width = 2 * MARGIN + WIDTH * len(layers)
    errors = [error for layer in layers for error in (layer.mask_error, layer.error) if error is not None]
    top = max(errors, default=0) or 1.0
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 420)}" height="{2 * HEIGHT + 3 * MARGIN}" '
             'font-family="sans-serif" font-size="11">']  # fmt: skip
    parts += _axis("sparsity", MARGIN, "100 %", width)
    if errors:
        parts += _axis("relative error of the outputs: mask alone, repaired", HEIGHT + 2 * MARGIN, f"{top:.3g}", width)
    for i, layer in enumerate(layers):
        x = MARGIN + WIDTH * i
        said = f"{layer.name}: {layer.sparsity:.2%} zero"
        if layer.error is not None and layer.mask_error is not None:
            said += f", error {layer.mask_error:.4g} with the mask alone, {layer.error:.4g} repaired"
        elif layer.not_repaired:
            said += f", not repaired: {layer.not_repaired}"
        parts.append(f"<g><title>{escape(said)}</title>")
        parts.append(_bar(x, MARGIN + HEIGHT, layer.sparsity, WIDTH - 3, "sparsity"))
        if layer.error is not None and layer.mask_error is not None:
            parts.append(_bar(x, 2 * (MARGIN + HEIGHT), layer.mask_error / top, WIDTH - 3, "mask alone"))
            parts.append(_bar(x, 2 * (MARGIN + HEIGHT), layer.error / top, WIDTH - 3, "repaired"))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _axis(title: str, top: float, largest: str, width: float) -> list[str]:
    bottom = top + HEIGHT
    return [
        f'<text x="{MARGIN}" y="{top - 10}" font-weight="bold">{escape(title)}</text>',
        f'<text x="{MARGIN - 6}" y="{top + 8}" text-anchor="end">{largest}</text>',
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<line x1="{MARGIN}" y1="{bottom}" x2="{width - MARGIN}" y2="{bottom}" stroke="#888"/>',
    ]


def _bar(x: float, bottom: float, share: float, width: float, kind: str) -> str:
    height = HEIGHT * share
    return f'<rect x="{x}" y="{bottom - height:.1f}" width="{width}" height="{height:.1f}" fill="{COLOURS[kind]}"/>'
