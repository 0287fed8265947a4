"""A report for people: one table, then the findings, then the verdict."""

import os

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .report import Layer, Report, percent, shape_text

WIDE = 80  # columns from which a layer's name and its numbers share a line
PIPED = 140
SHOWN = 40  # findings printed; the machine-readable form has all


def console() -> Console:
    """Standard output; into a file or a pipe, wide enough for one line a layer."""
    made = Console(highlight=False)
    is_told = made.is_terminal or "COLUMNS" in os.environ
    return made if is_told else Console(highlight=False, width=PIPED)


def show(report: Report, console: Console) -> None:
    """Print the table, the findings, the notes, and last the verdict."""
    layers = [layer for layer in report.layers if len(layer.shape) > 1 or layer.num_not_finite]
    if layers:
        console.print(_table(layers) if console.width >= WIDE else _lines(layers))
    hidden = len(report.layers) - len(layers)
    if hidden:
        console.print(Text(f"and {hidden} vector{'s' if hidden > 1 else ''}: biases, norms and the like", style="dim"))
    for finding in report.findings[:SHOWN]:
        head = Text.assemble((f"{finding.kind}  ", "bold red"), (finding.where, "bold"))
        console.print(head, Padding(Text(f"{finding.what}\n{finding.todo}"), (0, 0, 0, 4), expand=False))
    if len(report.findings) > SHOWN:
        console.print(f"and {len(report.findings) - SHOWN} more; --json lists all")
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))
    console.print(Text(report.verdict, style="bold green" if report.is_healthy else "bold red"))


def _table(layers: list[Layer]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold", ratio=3)
    for name in ("shape", "zeros"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("pattern", no_wrap=True)
    table.add_column("dead r/c", justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold", ratio=2)
    for layer in layers:
        cells = [_name(layer), shape_text(layer.shape), percent(layer.num_zeros, layer.num), layer.pattern]
        table.add_row(*map(Text, [*cells, _dead(layer), _notes(layer)]), style=_style(layer))
    return table


def _lines(layers: list[Layer]) -> Group:
    """Two lines a layer, for a narrow terminal: the name, and its numbers below it."""
    rows = []
    for layer in layers:
        cells = [shape_text(layer.shape), percent(layer.num_zeros, layer.num), layer.pattern]
        cells += [f"dead {_dead(layer)}" if _dead(layer) else "", _notes(layer)]
        rows += [Text(_name(layer), style=_style(layer), overflow="fold"), Text("  " + "  ".join(filter(None, cells)))]
    return Group(*rows)


def _name(layer: Layer) -> str:
    """The module's name where the tensor is its weight: the line stays short."""
    return layer.name.removesuffix(".weight")


def _dead(layer: Layer) -> str:
    if not layer.num_dead_rows and not layer.num_dead_columns:
        return ""
    return f"{layer.num_dead_rows:,}/{layer.num_dead_columns:,}"


def _notes(layer: Layer) -> str:
    own = [layer.role] if not layer.is_prunable else []
    if layer.num_not_finite:
        own.append(f"{layer.num_not_finite:,} not finite")
    if layer.num_came_back:
        own.append(f"{layer.num_came_back:,} came back")
    return ", ".join([*own, *layer.notes])


def _style(layer: Layer) -> str:
    return "red" if layer.num_not_finite or layer.num_came_back else "" if layer.is_prunable else "dim"
