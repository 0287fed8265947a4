"""``prunus doctor``"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..doctor import Layer, Report

PIPED = 240  # columns of a file or a pipe: one line a layer
NOTES = 12  # columns that notes need at least, folded
HEADS = ("tensor", "shape", "zeros", "pattern", "dead r/c")
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right", "right", "left", "right")
SHOWN = 40  # findings printed; the machine-readable form has all


@dataclass(frozen=True)
class Command:
    """Check what a pruned model promises; nothing is written, nothing in its files is executed.

    Exit code 0 if the model is healthy, 1 with a list if it is not, 2 if it could not be read. A
    training checkpoint says itself what was asked for; of other models it is told with --sparsity
    and --pattern, and without them the pattern that is found is reported.
    """

    path: tyro.conf.Positional[Path]  # model folder, safetensors file, checkpoint, or distributed checkpoint
    sparsity: float | None = None  # fraction of the prunable weights that should be zero, exactly
    pattern: str | None = None  # what it holds for: global, layer, row, or N:M such as 2:4
    masks: Path | None = None  # safetensors or checkpoint with the masks, to tell pruned weights from live zeros
    include: tuple[str, ...] = ()  # patterns of weights that are pruned beside linear and convolution weights
    exclude: tuple[str, ...] = ()  # patterns of weights that should be dense
    allow: tuple[str, ...] = ()  # kinds of findings that are meant: dead-rows, too-sparse, ...
    json: bool = False  # print one JSON object and nothing else


def run(command: Command) -> None:
    from ..doctor import examine

    report = examine(
        command.path,
        sparsity=command.sparsity,
        pattern=command.pattern,
        masks=command.masks,
        include=command.include,
        exclude=command.exclude,
        allow=command.allow,
    )
    if command.json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        _show(report, _console())
    if not report.is_healthy:
        raise SystemExit(1)


def _console() -> Console:
    """Standard output, wide where it is no terminal and nobody said how wide it is."""
    made = Console(highlight=False)
    is_told = made.is_terminal or "COLUMNS" in os.environ
    return made if is_told else Console(highlight=False, width=PIPED)


def _show(report: "Report", console: Console) -> None:
    """Print the table, the findings, the notes, and last the verdict."""
    layers = [layer for layer in report.layers if len(layer.shape) > 1 or layer.num_not_finite]
    if layers:
        console.print(_table(layers) if _width(layers) <= console.width else _lines(layers))
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
    console.print(Text(report.verdict, style="bold green" if report.is_healthy else "bold red"), soft_wrap=True)


def _table(layers: "list[Layer]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in zip(HEADS, SIDES, strict=True):
        table.add_column(name, justify=side, no_wrap=True)
    table.add_column("notes", overflow="fold")
    for layer in layers:
        table.add_row(*map(Text, [*_cells(layer), _notes(layer)]), style=_style(layer))
    return table


def _width(layers: "list[Layer]") -> int:
    """Columns that a table needs without cutting a name."""
    rows = [HEADS, *(_cells(layer) for layer in layers)]
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) + NOTES


def _cells(layer: "Layer") -> tuple[str, ...]:
    from ..doctor.findings import percent

    zeros, shape = percent(layer.num_zeros, layer.num), "x".join(map(str, layer.shape)) or "scalar"
    return _name(layer), shape, zeros, layer.pattern, _dead(layer)


def _lines(layers: "list[Layer]") -> Group:
    """Two lines a layer, for a narrow terminal: the name, and its numbers below it."""
    rows = []
    for layer in layers:
        _, *cells, dead = _cells(layer)
        cells += [f"dead {dead}" if dead else "", _notes(layer)]
        rows += [Text(_name(layer), style=_style(layer), overflow="fold"), Text("  " + "  ".join(filter(None, cells)))]
    return Group(*rows)


def _name(layer: "Layer") -> str:
    """The module's name where the tensor is its weight: the line stays short."""
    return layer.name.removesuffix(".weight")


def _dead(layer: "Layer") -> str:
    if not layer.num_dead_rows and not layer.num_dead_columns:
        return ""
    return f"{layer.num_dead_rows:,}/{layer.num_dead_columns:,}"


def _notes(layer: "Layer") -> str:
    own = [layer.role] if not layer.is_prunable else []
    if layer.num_not_finite:
        own.append(f"{layer.num_not_finite:,} not finite")
    if layer.num_came_back:
        own.append(f"{layer.num_came_back:,} came back")
    return ", ".join([*own, *layer.notes])


def _style(layer: "Layer") -> str:
    return "red" if layer.num_not_finite or layer.num_came_back else "" if layer.is_prunable else "dim"
