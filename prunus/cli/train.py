"""``prunus train``"""

import os
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from ..lab.run import Run, read_run
from .console import Terminal, print, progress_bar


@dataclass(frozen=True)
class Command:
    live: bool = False  # in a terminal, the charts of prunus watch while it trains, in place of a bar
    run: Annotated[Run, tyro.conf.arg(name="")] = field(default_factory=Run)


Command.__doc__ = Run.__doc__


def run(command: Command) -> None:
    asked = command.run
    if asked.resume:
        asked = asked.continuing(read_run(asked.out))
    asked.check_launch()
    _train(asked, live=command.live)


def _train(asked: Run, *, live: bool) -> None:
    from ..lab.trainer import train
    from .watch import live_charts

    if os.environ.get("RANK", "0") != "0":  # only the first rank reports
        train(asked)
        return
    bar = progress_bar(asked.score if asked.score != "none" else "dense", asked.total_steps)
    with live_charts(asked.out) if live and Terminal(stderr=True).is_terminal else bar as report:
        result = train(asked, report)
    print(
        f"{asked.out}: {result.sparsity:.4%} of {result.num_prunable:,} prunable weights are zero; "
        f"held-out (--eval-size {asked.eval_size}) "
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.3f}, accuracy {result.accuracy:.2%}; "
        f"{result.steps} steps (budget x {result.budget_scale:g}) in {result.seconds:.1f} s"
    )
