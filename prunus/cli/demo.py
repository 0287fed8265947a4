"""``prunus demo``"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..lab.run import Run, ScoreName
from .console import Terminal, print, progress_bar

if TYPE_CHECKING:
    from ..lab.trainer import Result

ARMS: dict[str, ScoreName] = {"dense": "none", "magnitude": "magnitude", "bitter7": "bitter7"}


@dataclass(frozen=True)
class Command:
    """Train a small byte-level GPT on Python's own source three times with equal budgets, and compare.

    The arms differ in the score alone: same initial weights, same batches in the same order, same
    learning rates, same held-out files.
    """

    steps: int = 600  # optimizer steps an arm
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    seed: int = 0  # initial weights and order of the data
    out: Path = Path("runs/demo")  # folder of the three runs


def run(command: Command) -> None:
    from ..lab.trainer import train

    base = Run(
        model="gpt2-tiny",
        data="stdlib",
        sparsity=command.sparsity,
        steps=command.steps,
        eval_every=command.steps,
        save_every=0,
        seed=command.seed,
    )
    folder = _fresh(command.out)
    results = {}
    for arm, score in ARMS.items():
        with progress_bar(arm, base.total_steps) as report:
            results[arm] = train(replace(base, score=score, out=folder / arm), report)
    _print_table(results, folder)


def _fresh(folder: Path) -> Path:
    """``folder``, or the first of folder-2, folder-3, ... that does not exist: nothing is overwritten."""
    number, free = 2, folder
    while free.exists():
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free


def _print_table(results: "dict[str, Result]", folder: Path) -> None:
    from rich.table import Table

    table = Table(title="A byte-level GPT on Python's own source: equal budgets, one seed")
    table.add_column("arm")
    for heading in ("perplexity a byte", "zeros in prunable", "prunable", "all weights", "steps", "seconds"):
        table.add_column(heading, justify="right")
    for arm, result in results.items():
        table.add_row(
            arm,
            f"{result.perplexity:.3f}",
            f"{result.sparsity:.4%}",
            f"{result.num_prunable:,}",
            f"{result.num_parameters:,}",
            f"{result.steps:,}",
            f"{result.seconds:.1f}",
        )
    Terminal(highlight=True).print(table)
    print(f"Perplexity is on held-out files, sparsity is counted from the zeros. The runs are in {folder}.")
    print("One seed shows that it works, not which score is better.")
