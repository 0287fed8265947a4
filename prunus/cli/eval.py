"""``prunus eval``"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Command:
    """Quality and sparsity of a checkpoint on held-out data; nothing is written."""

    checkpoint: tyro.conf.Positional[Path]  # a checkpoint.pt, one in pieces, or the run folder that holds it
    data: str | None = None  # other data than the run's own
    validation: Path | None = None  # other held-out file than the run's own
    eval_size: int = 0  # held-out windows or images, the first ones; 0 takes all
    layers: bool = False  # print the sparsity of every layer


def run(command: Command) -> None:
    if command.eval_size < 0:
        raise ValueError(f"--eval-size must be at least 0, which takes all, got {command.eval_size}")
    from ..lab.checkpoint import checkpoint_of
    from ..lab.trainer import evaluated

    path = checkpoint_of(command.checkpoint)
    quality, report, step = evaluated(path, command.data, command.validation, command.eval_size)
    if command.layers:
        print(report)
    print(
        f"{path}: step {step}, held-out (--eval-size {command.eval_size}) "
        f"loss {quality.loss:.4f}, perplexity {quality.perplexity:.3f}, "
        f"accuracy {quality.accuracy:.2%}; {report.sparsity:.4%} of {report.num_prunable:,} prunable weights "
        f"and {report.sparsity_of_all:.4%} of all {report.num_parameters:,} are zero"
    )
