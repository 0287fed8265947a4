"""``prunus recover``"""

import os
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from .console import print
from .shared_options import (
    Flag,
    StartToken,
    TokenType,
    check_new_folder,
    check_not_negative,
    is_written,
    number_of,
    plain,
)

if TYPE_CHECKING:
    from torch import nn

    from ..trained.model import TrainedModel

OF_DATA = ("text", "tokens", "batches", "eval_text", "eval_tokens", "eval_batches", "token_type", "start_token")
OF_DATA += ("length", "eval_windows", "seed")
DAY = 24 * 3600  # seconds that ranks wait for the first one, which tokenises


@dataclass(frozen=True)
class Command:
    """Train a pruned model to match the dense one; its zeros stay exactly where they are.

    The model learns the teacher's predictions on text, tokens or named arrays. Both are measured on the last tenth of
    the data, or on --eval-text. If the command is killed, repeat it: it continues from its last checkpoint.
    On several GPUs: torchrun --nproc-per-node 8 -m prunus recover ...
    """

    model: tyro.conf.Positional[Path]  # Hugging Face folder of the pruned model
    teacher: Path  # dense model: Hugging Face folder or .gguf file
    out: Path  # new folder to write
    text: Path | None = None  # text to train on: a file or folder
    tokens: Path | None = None  # training token ids, instead of --text (.u16, .bin, .u32 or .npy)
    batches: Path | None = None  # .npz file of named inputs (and labels), one row per sample, instead of --text
    eval_text: Path | None = None  # held-out text file or folder
    eval_tokens: Path | None = None  # held-out token ids
    eval_batches: Path | None = None  # held-out .npz file
    budget: str = "20M"  # tokens (or samples) to train on in total: 500k, 20M, 1B
    lr: float | None = None  # learning rate; default: from short trials, or 0.001 below 300 steps
    hard: float = 0.0  # weight of the data's cross-entropy, added to the teacher loss
    train: tuple[str, ...] = ()  # globs of parameter names: train no others
    length: int = 0  # tokens per window; 0: 512, at most the model's maximum
    batch: int = 0  # windows or samples per pass; 0: about 8,192 tokens (on a CPU 2,048) or 32 samples
    step_tokens: int = 0  # tokens (or samples) per optimizer step; 0: 49,152 (128), fewer for a small budget
    eval_windows: int | None = None  # held-out windows; 0: all; default: 128, for --batches all
    token_type: TokenType = "auto"  # type of raw token files; auto: uint32 for .u32, else uint16
    start_token: StartToken = "auto"  # begin windows with the start token; auto: for text, if the tokenizer adds it
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # under torchrun: replicate or shard the model; auto: ddp
    offload_teacher: Flag = False  # keep the teacher in main memory, one block at a time on the device
    compile: Flag = False  # torch.compile the blocks of both models
    bf16: bool | None = None  # train with bfloat16 autocast; default: on GPUs that have it
    seed: int = 0  # seed for the order of the windows
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one

    @property
    def unfinished(self) -> Path:
        return self.out.with_name(f".{self.out.name}.unfinished")


def run(command: Command) -> None:
    settings = plain(asdict(command))
    if is_written(command.out / "recovery.json", command.unfinished, settings):  # killed after the result was in place
        shutil.rmtree(command.unfinished, ignore_errors=True)
        print(f"{command.out}: already written")
        return
    check(command)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers, between ours
    from ..files.lock import lock_folder
    from ..recovery.folder import write_recovered
    from .recovering import batch_options, recovered

    args = _arguments(command)
    is_first = args.process_index == 0
    made = not command.unfinished.exists()
    with lock_folder(command.unfinished) if is_first else nullcontext():
        try:
            trained, teacher = _loaded(command, args)
            if is_first and trained.note:
                print(trained.note)
            sizes = {name: getattr(command, name) for name in ("length", "batch", "step_tokens")}
            options = batch_options(command.budget, trained, args, **sizes)
            recovery = recovered(command, trained, teacher, args, options)
        except ValueError:
            if made and is_first and not any(command.unfinished.glob("checkpoint-*")):
                shutil.rmtree(command.unfinished, ignore_errors=True)
            raise
        where = {"source": command.model, "unfinished": command.unfinished}
        write_recovered(command.out, trained.model, recovery, settings=settings, **where)
    if is_first:
        print(*str(recovery).splitlines(), f"{command.out}: written")


def check(command: Command) -> None:
    number_of(command.budget)
    check_new_folder(command.out)
    if not (command.model / "config.json").is_file():
        raise ValueError(
            f"{command.model} is not a Hugging Face folder: it has no config.json; give the folder of a pruned model"
        )
    is_gguf = command.teacher.suffix == ".gguf" and command.teacher.is_file()
    if not is_gguf and not (command.teacher / "config.json").is_file():
        raise ValueError(
            f"--teacher {command.teacher} is neither a Hugging Face folder nor a .gguf file; give the dense model"
        )
    if command.teacher.resolve() == command.model.resolve():
        raise ValueError(f"--teacher {command.teacher} is the pruned model itself; give the dense one")
    check_not_negative(command, "length", "batch", "step_tokens", "eval_windows")
    if command.parallel != "auto" and "RANK" not in os.environ:
        raise ValueError(f"--parallel {command.parallel} needs torchrun --nproc-per-node N -m prunus recover ...")


def _arguments(command: Command) -> Any:
    from ..lab.recipe import device_named
    from ..recovery.recover import training_arguments

    more: dict[str, Any] = {"fsdp": True, "fsdp_config": {}} if command.parallel == "fsdp" else {}
    how = (command.unfinished, device_named(command.device), command.bf16, command.seed)
    return training_arguments(*how, ddp_timeout=DAY, **more)


def _loaded(command: Command, args: Any) -> "tuple[TrainedModel, nn.Module]":
    """Student with its data, and teacher; both read text by the same tokenizer."""
    from ..export.huggingface import load_any_model
    from ..trained.data import TokenCache, folder_and_file, tokenizer_of
    from ..trained.model import ModelSource, load_trained

    folder, file = folder_and_file(command.teacher)
    if command.text is not None:
        own, other = tokenizer_of(command.model), tokenizer_of(folder, file)
        if own is not None and other is not None and own.get_vocab() != other.get_vocab():
            sizes = f"{len(own):,} and {len(other):,}"
            raise ValueError(
                f"{command.model} and {command.teacher} have different tokenizers, of {sizes} tokens: as --teacher, "
                "give the model that was pruned"
            )
    cache = TokenCache(command.unfinished, number_of(command.budget) * 10 // 9)
    known = {name: getattr(command, name) for name in OF_DATA}
    device = "cpu" if args.fsdp else str(args.device)
    source = ModelSource(str(command.model), **known, samples=1, at_most=True, cache=cache, device=device)
    with args.main_process_first(local=False):
        if command.text is not None:
            cache.read(command.text, command.model, None)
    teacher = load_any_model(folder, "auto", file)
    return load_trained(source), teacher
