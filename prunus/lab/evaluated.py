"""Quality and sparsity of a model on disk, whichever of our commands wrote it."""

from dataclasses import replace
from pathlib import Path

from ..eligible import eligible
from ..summary import Report, report
from .checkpoint import checkpoint_of, load_checkpoint
from .evaluate import Quality
from .exported import described, load_exported
from .recipe import device_named
from .run import Run
from .trained_model import check_vocabulary, longest_window, side_by_side, token_ids, token_quality
from .trainer import Training


def evaluated(
    path: Path, data: str | None = None, validation: Path | None = None, eval_size: int = 0, length: int = 0
) -> tuple[Quality, Report, int | None]:
    """Quality and sparsity on the run's own held-out data or another's, and the step where it is known.

    A Hugging Face model has no data of its own: it takes ``validation``, in windows of ``length`` tokens.
    """
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
        training.model.load_state_dict(load_exported(path, training.device).state_dict())
    else:
        if path.is_dir() and not checkpoint.exists():
            raise ValueError(f"{path} has no checkpoint of prunus, no config.json and no run.json of prunus export")
        state = load_checkpoint(checkpoint)
        step, run = state["step"], Run.from_json(state["run"])
        training = _training(run, data, validation, eval_size)
        training.load(state)
    return training.evaluate(), report(training.model, eligible(training.model, run.include, run.exclude)), step


def _training(run: Run, data: str | None, validation: Path | None, eval_size: int) -> Training:
    run = replace(run, eval_size=eval_size, compile=False)
    if data is not None:
        run = replace(run, data=data, validation=None)
    return Training(run if validation is None else replace(run, validation=validation))


def _of_tokens(folder: Path, validation: Path, eval_size: int, length: int) -> tuple[Quality, Report]:
    from ..export import load_model

    tokens = token_ids(validation)
    model = load_model(folder, device_named("auto"))
    check_vocabulary(validation, tokens, model)
    windows = side_by_side(tokens, length or longest_window(model), eval_size)
    return token_quality(model, windows), report(model, eligible(model))
