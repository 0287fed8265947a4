"""What ``prunus study`` prints: the plan, and the table of what is known."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..lab.study.folder import Folder
from ..lab.study.keys import key_of, num_examples
from ..lab.study.plan import Plan
from ..lab.study.table import HEADINGS, cells_of, notes_of, title_of
from .progress import wide_console


def print_table(values: Mapping[str, Any]) -> None:
    """One line an arm and sparsity, then what failed or does not count."""
    console = wide_console()
    table = Table(title=title_of(values))
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number in (0, len(HEADINGS) - 1) else "right")
    before = None
    for row in values["rows"]:
        if before is not None and row["sparsity"] != before:
            table.add_section()
        before = row["sparsity"]
        table.add_row(*map(escape, cells_of(row)))  # names of arms are no markup
    console.print(table)
    for note in notes_of(values):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def print_plan(folder: Folder, plan: Plan) -> None:
    """Every computation of the plan, with its tokens, whether it is done, and what is left in all."""
    from ..lab.study.runner import estimate

    done, damaged = (folder.finished(), folder.damaged()) if folder.exists else ({}, {})
    table = Table(title=escape(f"{folder.path}: hash {plan.hash}"))
    for heading in ("run", "arms", "steps", "examples", "state"):
        table.add_column(heading, justify="right" if heading in ("steps", "examples") else "left")
    left, seconds, unknown = 0, 0.0, False
    for owner in dict.fromkeys(plan.owners.values()):
        run = plan.run_of(owner)
        sharing = [cell.arm for cell, first in plan.owners.items() if first == owner]
        state = "done" if key_of(run) in done else "damaged" if key_of(run) in damaged else "to do"
        table.add_row(
            escape(owner.folder),
            escape(", ".join(sharing)),
            f"{run.total_steps:,}",
            f"{num_examples(run):,}",
            state,
        )
        if state == "to do":
            left += num_examples(run)
            expected = estimate(folder, run, cold=False) if folder.exists else None
            seconds, unknown = seconds + (expected or 0.0), unknown or expected is None
    wide_console().print(table)
    tokens = f" = {left * plan.base.context:,} tokens" if plan.base.model.startswith("gpt2") else ""
    time = "no run is done yet on this machine to judge the time by" if unknown else f"at most {seconds:,.0f} s"
    print(f"left to do: {left:,} examples{tokens}; {time}")


def num_left(folder: Folder, plan: Plan) -> int:
    """Runs of the plan that neither ended nor failed."""
    ended, owners = folder.ended(), set(plan.owners.values())
    return sum(key_of(plan.run_of(cell)) not in ended and not folder.failure(cell) for cell in owners)
