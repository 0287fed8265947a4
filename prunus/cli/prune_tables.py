"""What ``prunus prune`` prints."""

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..lab.prune_profile import Profile
    from .prune import Command, Outcome


def print_result(command: "Command", outcome: "Outcome") -> None:
    """One table of the weights and one of the models."""
    result, rows, metric = outcome.result, outcome.rows, outcome.subject.metric
    layers = Table(title="what was pruned in each weight")
    for heading in ("weight", "shape", "proposed", "pruned", "sparsity", "no gradient", "not finite", "tau"):
        layers.add_column(heading, justify="left" if heading == "weight" else "right", no_wrap=True)
    for layer in result.layers:
        shape, tau = "x".join(map(str, layer.shape)), "" if layer.tau is None else f"{layer.tau:.4g}"
        counts = (f"{layer.num_candidates:,}", f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}")
        layers.add_row(layer.name, shape, *counts, str(layer.num_zero_gradient), str(layer.num_not_finite), tau)
    table = Table(title="on held-out data")
    for heading in ("model", "sparsity", metric):
        table.add_column(heading)
    for name, row in rows.items():
        table.add_row(name, f"{row['sparsity']:.4%}", f"{row[metric]:.4f}")
    console = _console()
    console.print(layers)
    console.print(table)
    if command.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    cost = f"{result.passes:,} passes and {result.forwards:,} forward passes of one sample"
    print(f"{command.out}: written; {command.model} was pruned in {result.seconds:.1f} s, {cost}")


def print_profile(profile: "Profile") -> None:
    """Where time and memory went, and what to change."""
    from ..lab.prune_profile import advice, table_rows

    table = Table(title="where time and memory went")
    for heading in ("what", "how much", "meaning"):
        table.add_column(heading, justify="right" if heading == "how much" else "left")
    for row in table_rows(profile):
        table.add_row(*row)
    _console().print(table)
    for line in advice(profile):
        print(line)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=160)
