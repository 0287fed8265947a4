"""``prunus train``"""

import os
import sys

from ..lab.run import Run, read_run
from .console import print, progress_bar

Command = Run


def run(run: Run) -> None:
    if run.resume:
        run = run.continuing(read_run(run.out))
    run.check_launch()
    from ..lab.interruption import Interrupted
    from ..lab.trainer import train
    from ..trained.quality import Quality

    is_first = os.environ.get("RANK", "0") == "0"  # only the first rank reports
    try:
        if not is_first:
            train(run)
            return
        with progress_bar(run.score if run.score != "none" else "dense", run.total_steps) as report:
            result = train(run, report)
    except Interrupted as stop:
        if is_first:
            print(f"prunus train: {stop}", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    quality = Quality(result.loss, result.accuracy).in_words(of_text=bool(result.tokens))
    size = run.eval_size
    held_out = f"held-out data (its first {size:,}; --eval-size 0 takes all)" if size else "all held-out data"
    print(
        f"{run.out}: {result.sparsity:.4%} of {result.num_prunable:,} prunable weights are zero; "
        f"{quality} on {held_out}; "
        f"{result.steps} steps (budget x {result.budget_scale:g}) in {result.seconds:.1f} s"
    )
