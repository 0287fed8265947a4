"""``prunus doctor``"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .console import Terminal, escaped, print_json

if TYPE_CHECKING:
    from ..doctor import Diagnosis, TensorReport

PIPED = 240  # columns of a file or a pipe: one line a layer
NOTES = 12  # columns that notes need at least, folded
COLUMNS: dict[str, Literal["left", "right"]] = {
    "tensor": "left",
    "shape": "right",
    "zeros": "right",
    "pattern": "left",
    "dead r/c": "right",
}
SHOWN = 40  # findings printed; --json has all


@dataclass(frozen=True)
class Command:
    """Check that a pruned model is intact; writes nothing and runs no code from its files.

    Exit code 0: the model is healthy; 1: it is not, and findings are listed; 2: it could not be read. The zeros are
    compared with --sparsity and --pattern; without these, the sparsity and pattern found are only reported.
    """

    path: tyro.conf.Positional[Path]  # model folder, .safetensors file, checkpoint, or distributed checkpoint
    sparsity: float | None = None  # exact fraction of the prunable weights that should be zero
    pattern: str | None = None  # where this fraction should hold: global, layer, row, or N:M such as 2:4
    masks: Path | None = None  # .safetensors file or checkpoint with masks, to tell pruned weights from other zeros
    include: tuple[str, ...] = ()  # globs of weight names that are pruned besides linear and convolution weights
    exclude: tuple[str, ...] = ()  # globs of weight names that should be dense; overrides --include and --only
    only: tuple[str, ...] = ()  # globs of weight names: no others are pruned
    allow: tuple[str, ...] = ()  # kinds of findings to allow, such as too-sparse or excluded
    strict: bool = False  # report dead rows and columns as findings (exit code 1), not warnings
    json: bool = False  # print only one JSON object


def run(command: Command) -> None:
    from ..doctor import examine

    options = {field.name: getattr(command, field.name) for field in fields(command)}
    is_json = options.pop("json")
    diagnosis = examine(options.pop("path"), **options)
    if is_json:
        print_json(diagnosis.to_json())
    else:
        _show(diagnosis)
    if not diagnosis.is_healthy:
        raise SystemExit(1)


def _show(diagnosis: "Diagnosis") -> None:
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=PIPED)
    layers = [layer for layer in diagnosis.layers if len(layer.shape) > 1 or layer.num_not_finite]
    if layers:
        _print_layers(layers, console)
    if hidden := len(diagnosis.layers) - len(layers):
        console.print(f"and {hidden} vector{'s' if hidden > 1 else ''}, such as biases and norms", style="dim")
    for findings, style in ((diagnosis.findings, "bold red"), (diagnosis.warnings, "bold yellow")):
        for finding in findings[:SHOWN]:
            console.print(Text.assemble((f"{finding.kind}  ", style), (escaped(finding.where), "bold")))
            for line in (finding.what, finding.todo):
                console.print(Padding(line, (0, 0, 0, 4), expand=False))
        if len(findings) > SHOWN:
            console.print(f"and {len(findings) - SHOWN} more; --json lists all")
    for note in diagnosis.notes:
        console.print(f"note: {note}", style="dim")
    console.print(diagnosis.verdict, style="bold green" if diagnosis.is_healthy else "bold red", soft_wrap=True)


def _print_layers(layers: "Sequence[TensorReport]", console: Terminal) -> None:
    """A table, or two lines a layer where it would cut a name: the name, and its numbers below it."""
    rows = [_cells(layer) for layer in layers]
    width = sum(max(map(len, column)) + 2 for column in zip(COLUMNS, *(row[:-1] for row in rows), strict=True))
    faults = [layer.num_not_finite or layer.num_came_back for layer in layers]
    styles = ["red" if bad else "" if one.is_prunable else "dim" for bad, one in zip(faults, layers, strict=True)]
    if width + NOTES > console.width:
        for (name, *cells, dead, notes), style in zip(rows, styles, strict=True):
            console.print(name, style=style, overflow="fold")
            cells += [f"dead {dead}" if dead else "", notes]
            console.print("  " + "  ".join(cell for cell in cells if cell))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in COLUMNS.items():
        table.add_column(name, justify=side, no_wrap=True)
    table.add_column("notes", overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*row, style=style)
    console.print(table)


def _cells(layer: "TensorReport") -> tuple[str, ...]:
    from ..doctor.findings import share

    name = layer.name.removesuffix(".weight")  # the module's, so that the line stays short
    num_dead = (layer.num_dead_rows, layer.num_dead_columns)
    dead = f"{num_dead[0]:,}/{num_dead[1]:,}" if any(num_dead) else ""
    notes = [] if layer.is_prunable else [layer.role]
    notes += [f"{layer.num_not_finite:,} not finite"] if layer.num_not_finite else []
    notes += [f"{layer.num_came_back:,} came back"] if layer.num_came_back else []
    cells = escaped(name), "x".join(map(str, layer.shape)) or "scalar", share(layer.num_zeros, layer.num)
    return *cells, layer.pattern, dead, ", ".join([*notes, *layer.notes])
