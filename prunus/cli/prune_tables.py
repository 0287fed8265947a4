"""What ``prunus prune`` prints."""

from typing import TYPE_CHECKING

from rich.table import Table

from .progress import wide_console

if TYPE_CHECKING:
    from ..lab.prune_profile import Profile
    from ..oneshot import Result
    from .prune import Command, Outcome


def print_result(command: "Command", outcome: "Outcome") -> None:
    """One table of the weights and one of the models."""
    result, rows, metric = outcome.result, outcome.rows, outcome.subject.metric
    layers = _layers(result, is_probed=command.probe != "none")
    table = Table(title="on held-out data")
    for heading in ("model", "sparsity", metric):
        table.add_column(heading)
    for name, row in rows.items():
        name = "as it came" if name == "dense" and row["sparsity"] else name
        table.add_row(name, f"{row['sparsity']:.4%}", f"{row[metric]:.4f}")
    console = wide_console()
    console.print(layers)
    console.print(table)
    if result.sparsity_before:
        print(_zero_already(command.sparsity, result))
    if command.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    cost = f"{result.passes:,} passes with gradients and {result.forwards:,} without, of one sample"
    print(f"{command.out}: written; {command.model} was pruned in {result.seconds:.1f} s, {cost}")


def _zero_already(asked: float, result: "Result") -> str:
    said = f"{result.sparsity_before:.4%} were zero already"
    if result.sparsity_before > asked:
        return f"{said}, more than the {asked:.4%} asked for; none comes back"
    if result.sparsity > asked:
        why = "the count holds for each row, layer or group of the scope, and none of them gets a zero back"
        return f"{said}; {result.sparsity:.4%} are zero now, not {asked:.4%}: {why}"
    return said


def _layers(result: "Result", *, is_probed: bool) -> Table:
    """A row a weight; what only the probe knows is left out without it."""
    table = Table(title="what was pruned in each weight")
    headings = ("weight", "shape", "proposed", "pruned", "sparsity", "no gradient", "not finite", "tau")
    for heading in headings if is_probed else ("weight", "shape", "pruned", "sparsity"):
        table.add_column(heading, justify="left" if heading == "weight" else "right", no_wrap=True)
    for layer in result.layers:
        shape, tau = "x".join(map(str, layer.shape)), "" if layer.tau is None else f"{layer.tau:.4g}"
        pruned = (f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}")
        if is_probed:
            more = (str(layer.num_zero_gradient), str(layer.num_not_finite), tau)
            table.add_row(layer.name, shape, f"{layer.num_candidates:,}", *pruned, *more)
        else:
            table.add_row(layer.name, shape, *pruned)
    return table


def print_profile(profile: "Profile") -> None:
    """Where time and memory went, and what to change."""
    from ..lab.prune_profile import advice, table_rows

    table = Table(title="where time and memory went")
    for heading in ("what", "how much", "meaning"):
        table.add_column(heading, justify="right" if heading == "how much" else "left")
    for row in table_rows(profile):
        table.add_row(*row)
    wide_console().print(table)
    for line in advice(profile):
        print(line)
