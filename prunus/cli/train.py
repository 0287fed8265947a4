"""``prunus train``"""

import os

from ..lab.run import Run

Command = Run


def run(command: Run) -> None:
    if command.resume:
        from ..lab.tracking import read_run

        command = command.continuing(read_run(command.out))
    command.check_launch()
    from ..lab.trainer import train
    from .progress import progress_bar

    if os.environ.get("RANK", "0") != "0":  # the first rank speaks for all
        train(command)
        return
    with progress_bar(command.score if command.score != "none" else "dense", command.total_steps) as report:
        result = train(command, report)
    print(
        f"{command.out}: {result.sparsity:.4%} of {result.num_prunable:,} prunable weights are zero; "
        f"held-out (--eval-size {command.eval_size}) "
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.3f}, accuracy {result.accuracy:.2%}; "
        f"{result.steps} steps (budget x {result.budget_scale:g}) in {result.seconds:.1f} s"
    )
