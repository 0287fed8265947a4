"""``prunus eval``"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Command:
    """Quality and sparsity of a model on held-out data; nothing is written.

    It may be a checkpoint of prunus train, a folder that prunus export or prunus prune wrote, or a Hugging Face folder.
    """

    path: tyro.conf.Positional[Path]  # a checkpoint.pt, one in pieces, the run folder that holds it, or a model's
    data: str | None = None  # other data than the run's own
    validation: Path | None = None  # other held-out file than the run's own; tokens (uint16) for a Hugging Face model
    eval_size: int = 0  # held-out windows or images, the first ones; 0 takes all
    length: int = 0  # tokens a window of a Hugging Face model; 0 takes 256, or the model's longest
    layers: bool = False  # print the sparsity of every layer


def run(command: Command) -> None:
    for name in ("eval_size", "length"):
        if getattr(command, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(command, name)}")
    from ..lab.checkpoint import checkpoint_of
    from ..lab.evaluated import evaluated

    quality, report, step = evaluated(command.path, command.data, command.validation, command.eval_size, command.length)
    if command.layers:
        print(report)
    found = checkpoint_of(command.path)
    print(
        f"{found if found.exists() else command.path}: {'' if step is None else f'step {step}, '}"
        f"held-out (--eval-size {command.eval_size}) "
        f"loss {quality.loss:.4f}, perplexity {quality.perplexity:.3f}, "
        f"accuracy {quality.accuracy:.2%}; {report.sparsity:.4%} of {report.num_prunable:,} prunable weights "
        f"and {report.sparsity_of_all:.4%} of all {report.num_parameters:,} are zero"
    )
