"""What ``prunus shrink`` prints: what was removed, sizes and speed, errors by layer, and the models compared."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..export.card import SIZES
from ..oneshot import ExpertLayer, ShrinkResult
from ..oneshot.shrink_result import ShrunkLayer
from ..recovery import Recovery
from ..trained.model import TrainedModel
from ..trained.speed import Speed
from .console import print, wide_console

WORST = 5  # layers that are shown unless all are


@dataclass(frozen=True)
class Outcome:
    """A model that was shrunk, and the figures."""

    model: TrainedModel
    result: ShrinkResult
    rows: dict[str, dict[str, float]]  # parameters, sparsity and metric of each model
    speed: Speed | None = None
    recovery: Recovery | None = None


def print_result(outcome: Outcome, *, every_layer: bool) -> None:
    """Tables of sizes, layers and experts that lost something, and models."""
    result, console = outcome.result, wide_console()
    print(f"Removed: {', '.join(result.removed)}.")
    console.print(_sizes(outcome))
    if result.layers:
        console.print(_layers(result.layers, every_one=every_layer))
    if result.experts:
        console.print(_experts(result.experts, every_one=every_layer))
    console.print(_models(outcome))
    print(*result.notes)


def _table(title: str, *headings: str) -> Table:
    """A table whose first column is text and the others numbers."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    return table


def _sizes(outcome: Outcome) -> Table:
    before, after = outcome.result.before, outcome.result.after
    table = _table("size", "", "dense", "shrunk", "ratio")
    for key, text in SIZES.items():
        dense, shrunk = getattr(before, key), getattr(after, key)
        table.add_row(text, f"{dense:,}", f"{shrunk:,}", f"{shrunk / max(1, dense):.3f}")
    if (speed := outcome.speed) is not None:
        dense, shrunk = (speed.per_second[name] for name in ("dense", "shrunk"))
        table.add_row(f"{speed.unit} a second", f"{dense:,.1f}", f"{shrunk:,.1f}", f"{shrunk / dense:.3f}")
    return table


def _layers(layers: Sequence[ShrunkLayer], *, every_one: bool) -> Table:
    """The layers with the largest errors, or all in their order."""
    shown = list(layers) if every_one else sorted(layers, key=lambda layer: -(layer.error or 0.0))[:WORST]
    which = "each layer" if len(shown) == len(layers) else f"the {WORST} worst layers (--every-layer shows all)"
    headings = ("layer", "units", "stay", "error, old values", "error")
    table = _table(f"relative error of the outputs of {which}", *headings)
    for layer in shown:
        errors = ("" if error is None else f"{error:.4f}" for error in (layer.mask_error, layer.error))
        units = {"heads": "head groups"}.get(layer.kind, layer.kind)
        table.add_row(layer.name, units, f"{len(layer.kept):,} of {layer.num:,}", *errors)
    return table


def _experts(layers: Sequence[ExpertLayer], *, every_one: bool) -> Table:
    """Which experts of each layer went, by their importance; ``every_one`` shows that of the others too."""
    table = Table(title="removed experts (importance: router weight times norm of output, mean over tokens)")
    for heading in ("layer", "number", "removed", "importance of those that stay"):
        table.add_column(heading, justify="right" if heading == "number" else "left")

    def listed(layer: ExpertLayer, numbers: Sequence[int]) -> str:
        return ", ".join(f"{number} ({layer.importance[number]:.4g})" for number in numbers)

    for layer in layers:
        stay = [layer.importance[number] for number in layer.kept]
        shown = listed(layer, layer.kept) if every_one else f"{min(stay):.4g} to {max(stay):.4g}"
        number = f"{len(layer.dropped)} of {len(layer.importance)}"
        table.add_row(layer.name, number, listed(layer, layer.dropped), shown)
    return table


def _models(outcome: Outcome) -> Table:
    rows, metric = outcome.rows, outcome.model.metric
    sparse = ["sparsity"] if any(row["sparsity"] for row in rows.values()) else []
    table = _table("on held-out data", "model", "parameters", *sparse, metric)
    for name, row in rows.items():
        shares = [f"{row['sparsity']:.4%}"] if sparse else []
        table.add_row(name, f"{row['parameters']:,}", *shares, f"{row[metric]:.4f}")
    return table
