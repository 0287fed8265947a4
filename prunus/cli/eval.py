"""``prunus eval``"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from .console import print
from .shared_options import Flag, StartToken, TokenType, check_not_negative, given, size_in_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ..lab.trainer import Training
    from ..sparsity_report import SparsityReport
    from ..trained.data import Rows
    from ..trained.quality import Quality


@dataclass(frozen=True)
class Command:
    """Measure quality and sparsity on held-out data, or how many programming problems a model solves.

    PATH is a checkpoint of prunus train, a folder from prunus export or prunus prune, a Hugging Face folder, or a
    .gguf file. The command writes nothing but the file of --answers.
    """

    path: tyro.conf.Positional[Path]  # checkpoint.pt, sharded checkpoint, run folder, or model folder
    data: str | None = None  # for a run of prunus train: other data than it was trained on
    validation: Path | None = None  # held-out file to use instead of the training run's
    tokens: Path | None = None  # held-out token ids, instead of --text: a .u16, .bin, .u32 or .npy file
    text: Path | None = None  # held-out text: a file or a folder, which the model's tokenizer reads
    batches: Path | None = None  # .npz file of named inputs (and labels), one row per sample, instead of --text
    dense: Path | None = None  # dense model's folder, to compare outputs with if there are no labels
    token_type: TokenType = "auto"  # type of raw token files; auto: uint32 for .u32, else uint16
    start_token: StartToken = "auto"  # begin windows with the start token; auto: for text, if the tokenizer adds it
    eval_windows: int | None = None  # how many held-out windows; 0: all; default: 128, all of --batches, or as trained
    length: int = 0  # tokens per window of a Hugging Face model; 0: 256, at most the model's maximum
    memory: str | None = None  # main memory for activations, such as 4GB; the rest goes to a file
    every_layer: Flag = False  # print the sparsity of every layer
    problems: Path | None = None  # programming problems in HumanEval's form (.jsonl, .jsonl.gz), instead of data
    run_code: Flag = False  # allow --problems to run the programs that the model writes
    answers: Path | None = None  # .jsonl file to keep answers and verdicts in; a repeated command skips those there
    samples: int = 0  # number of problems, spread evenly; 0: all
    batch: int = 8  # problems answered at a time, 1 to 16
    max_new_tokens: int = 1024  # maximum number of tokens in an answer
    device: str = "auto"  # cpu or cuda; auto: cuda if there is a GPU


OF_FOLDERS = ("tokens", "text", "batches", "dense", "token_type", "start_token", "memory", "device")
OF_PROBLEMS = ("run_code", "answers", "samples", "batch", "max_new_tokens")


def run(command: Command) -> None:
    check_not_negative(command, "eval_windows", "length", "samples")
    if command.problems is not None:
        others = {option.name for option in fields(command)} - {"path", "problems", "device", *OF_PROBLEMS}
        for flag in given(command, *sorted(others)):
            raise ValueError(f"{flag} does not go with --problems, which measures pass@1 alone; leave it off")
        from .answering import solve

        print(f"{command.path}: {solve(command)}")
        return
    for flag in given(command, *OF_PROBLEMS):
        raise ValueError(f"{flag} is for programming problems; give them with --problems, or leave it off")
    from ..eligible import eligible
    from ..lab.checkpoint import checkpoint_of
    from ..sparsity_report import report
    from ..trained.data import folder_and_file

    if not command.path.exists():
        raise ValueError(
            f"there is no file or folder {command.path}; give a model folder, a run folder or a checkpoint"
        )
    if command.path.suffix == ".safetensors":
        raise ValueError(f"{command.path} is a file of weights; give its folder, which has config.json too")
    found = checkpoint_of(command.path)
    is_gguf = folder_and_file(command.path)[1] is not None
    if is_gguf or (not found.exists() and (command.path / "config.json").is_file()):
        for flag in given(command, "data", "validation"):
            kind = f"is for runs of prunus train, but {command.path} is a Hugging Face model"
            raise ValueError(f"{flag} {kind}: give --tokens, --text or --batches")
        path = command.path
        figures, counted, held_out = _of_folder(command)
    else:
        for flag in given(command, *OF_FOLDERS) if found.exists() else ():
            raise ValueError(f"{flag} is for Hugging Face models, but {command.path} is a run; leave off {flag}")
        path = found if found.exists() else command.path
        if command.length:
            which = f"leave it off: {command.path} has the length of its training"
            raise ValueError(f"--length is for Hugging Face models; {which}")
        training, quality, step = evaluated(command.path, command.data, command.validation, command.eval_windows)
        figures = f"step {step}, {quality.in_words(of_text=training.data.shape.kind == 'tokens')}"
        counted = report(training.model, eligible(training.model, **training.run.choice))
        held_out = training.held_out
    if command.every_layer:
        print(counted)
    print(
        f"{path}: {figures} on {held_out}; "
        f"{counted.sparsity:.4%} of {counted.num_prunable:,} prunable weights "
        f"and {counted.sparsity_of_all:.4%} of all {counted.num_parameters:,} are zero"
    )


def evaluated(
    path: Path, data: str | None = None, validation: Path | None = None, eval_windows: int | None = None
) -> "tuple[Training, Quality, int]":
    """The model of a run, its quality on its own held-out data or another's, and its step; without ``eval_windows``
    on as much as in its training.
    """
    from ..lab.arithmetic import fixed_arithmetic
    from ..lab.checkpoint import checkpoint_of, load_checkpoint
    from ..lab.run import Run
    from ..lab.trained_run import described, load_exported
    from ..lab.trainer import Training
    from ..oneshot.progress import progress_line

    checkpoint = checkpoint_of(path)
    if not checkpoint.exists() and (path / "run.json").is_file() and any(path.glob("*.safetensors")):
        (run, step, _), weights = described(path), load_exported(path).state_dict()
    else:
        if path.is_dir() and not checkpoint.exists():
            raise ValueError(
                f"{path} has no checkpoint of prunus, no config.json and no run.json; give a run or a model"
            )
        state = load_checkpoint(checkpoint)
        run, step, weights = Run.from_json(state["run"]), state["step"], state["model"]
    run = replace(run, eval_size=run.eval_size if eval_windows is None else eval_windows, compile=False)
    if data is not None:
        run = replace(run, data=data, validation=None)
    training = Training(run if validation is None else replace(run, validation=validation), trains=False)
    training.load_weights(weights)
    with fixed_arithmetic(training.run), progress_line(None, "evaluate") as show:
        return training, training.evaluate(show), step


def _of_folder(command: Command) -> "tuple[str, SparsityReport, str]":
    """Figures of a Hugging Face model, which has no data of its own."""
    from torch import Tensor

    from ..eligible import eligible
    from ..lab.recipe import device_named
    from ..oneshot.disk_offload import LIMITS, disk_offload_of
    from ..sparsity_report import report
    from ..trained.data import Arrays, check_batches, is_causal, read_batches
    from ..trained.quality import held_out_of, metric_of, token_quality

    given = [name for name in ("tokens", "text", "batches") if getattr(command, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{command.path} is a Hugging Face model, which needs --tokens, --text or --batches with held-out data, "
            f"got {' and '.join(f'--{name}' for name in given) or 'none'}"
        )
    if command.batches is not None and command.length:
        raise ValueError("--length is for text and tokens; leave it off: samples of --batches have their own")
    memory = None if command.memory is None else size_in_bytes(command.memory)
    arrays = None if command.batches is None else read_batches(command.batches)
    device = device_named(command.device)
    model = _opened(command.path, device)
    if memory is not None:
        LIMITS[model] = memory, None
    if command.batches is not None and arrays is not None:
        rows = Arrays(check_batches(command.batches, arrays, model))
        samples, held_out = held_out_of(rows, command.eval_windows)
    else:
        samples, held_out = _windows(command, model)
    disk = disk_offload_of(model)
    found = report(model, eligible(model)) if disk is None else report(model, eligible(model), holding=disk.holding)
    if isinstance(samples, Tensor):
        return token_quality(model, samples).in_words(of_text=True), found, held_out
    if "labels" not in samples and command.dense is None and not is_causal(model):
        raise ValueError("without labels, outputs are compared with the dense model's; give its folder as --dense")
    metric, measure = metric_of(model if command.dense is None else _opened(command.dense, device), samples)
    return f"{metric} {measure(model):.4f}", found, held_out


def _opened(path: Path, device: str) -> Any:
    from ..export.huggingface import load_any_model
    from ..oneshot.model_folder import opened_folder
    from ..trained.data import folder_and_file

    folder, file = folder_and_file(path)
    return load_any_model(folder, "auto", file).to(device) if file else opened_folder(folder, device)


def _windows(command: Command, model: Any) -> "tuple[Tensor | Rows, str]":
    from ..trained.data import folder_and_file, read_token_file, windows_of
    from ..trained.quality import held_out_of

    path = command.text or command.tokens
    assert path is not None
    folder, gguf_file = folder_and_file(command.path)
    file = read_token_file(path, folder, command.token_type, gguf_file, is_text=command.text is not None)
    print(*file.notes)
    (windows,) = windows_of([file], model, command.length, command.start_token)
    return held_out_of(windows, command.eval_windows)
