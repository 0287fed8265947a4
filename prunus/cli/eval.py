"""``prunus eval``"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from .console import print

if TYPE_CHECKING:
    from ..eligible import SparsityReport
    from ..lab.evaluate import Quality
    from ..lab.run import Run
    from ..lab.trainer import Training


@dataclass(frozen=True)
class Command:
    """Quality and sparsity of a model on held-out data; nothing is written.

    It may be a checkpoint of prunus train, a folder that prunus export or prunus prune wrote, or a Hugging Face folder.
    """

    path: tyro.conf.Positional[Path]  # a checkpoint.pt, a sharded one, the run folder that holds it, or a model's
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


def evaluated(
    path: Path, data: str | None = None, validation: Path | None = None, eval_size: int = 0, length: int = 0
) -> "tuple[Quality, SparsityReport, int | None]":
    """Quality and sparsity on the run's own held-out data or another's, and the step where it is known.

    A Hugging Face model has no data of its own: it takes ``validation``, in windows of ``length`` tokens.
    """
    from ..eligible import eligible, report
    from ..lab.arithmetic import fixed_arithmetic
    from ..lab.checkpoint import checkpoint_of, load_checkpoint
    from ..lab.exported_model import described, load_exported
    from ..lab.run import Run

    checkpoint = checkpoint_of(path)
    if not checkpoint.exists() and (path / "config.json").is_file():
        if data is not None or validation is None:
            unread = "" if data is None else "; --data is for runs of prunus"
            raise ValueError(f"{path} is a Hugging Face model, which needs --validation with a file of tokens{unread}")
        return *_of_tokens(path, validation, eval_size, length), None
    if length:
        raise ValueError(f"--length is for Hugging Face models; {path} has the context that it was trained with")
    if not checkpoint.exists() and (path / "run.json").is_file() and any(path.glob("*.safetensors")):
        run, step, _ = described(path)
        training = _training(run, data, validation, eval_size)
        training.load_weights(load_exported(path, training.device).state_dict())
    else:
        if path.is_dir() and not checkpoint.exists():
            raise ValueError(f"{path} has no checkpoint of prunus, no config.json and no run.json of prunus export")
        state = load_checkpoint(checkpoint)
        step, run = state["step"], Run.from_json(state["run"])
        training = _training(run, data, validation, eval_size)
        training.load(state)
    with fixed_arithmetic(training.run):
        quality = training.evaluate()
    return quality, report(training.model, eligible(training.model, run.include, run.exclude)), step


def _training(run: "Run", data: str | None, validation: Path | None, eval_size: int) -> "Training":
    from ..lab.trainer import Training

    run = replace(run, eval_size=eval_size, compile=False)
    if data is not None:
        run = replace(run, data=data, validation=None)
    return Training(run if validation is None else replace(run, validation=validation))


def _of_tokens(folder: Path, validation: Path, eval_size: int, length: int) -> "tuple[Quality, SparsityReport]":
    from ..eligible import eligible, report
    from ..export import load_model
    from ..lab.recipe import device_named
    from ..lab.trained_model import check_vocabulary, longest_window, side_by_side, token_ids, token_quality

    tokens = token_ids(validation)
    model = load_model(folder, device_named("auto"))
    check_vocabulary(validation, tokens, model)
    windows = side_by_side(tokens, length or longest_window(model), eval_size)
    return token_quality(model, windows), report(model, eligible(model))
