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
    """Let a pruned model learn from the dense one; its zeros stay exactly where they are.

    It reads text, tokens or named arrays, and learns the teacher's predictions on them. The last tenth of the data, or
    the data of --eval-text, is held out to measure both. Killed, the same command goes on from its last checkpoint.
    On several GPUs: torchrun --nproc-per-node 8 -m prunus recover ...
    """

    model: tyro.conf.Positional[Path]  # Hugging Face folder of the pruned model
    teacher: Path  # folder or .gguf file of the dense model
    out: Path  # folder to write; it must not exist
    text: Path | None = None  # text to learn from: a file, or a folder of files
    tokens: Path | None = None  # in place of text: tokens (.u16, .bin, .u32 or .npy)
    batches: Path | None = None  # in place of text: named arrays (.npz), a row a sample, with labels if there are any
    eval_text: Path | None = None  # held-out text
    eval_tokens: Path | None = None  # held-out tokens
    eval_batches: Path | None = None  # held-out arrays
    budget: str = "20M"  # tokens to learn from in all, or samples of arrays: 500k, 20M, 1B
    lr: float | None = None  # learning rate; without it by three short trials
    hard: float = 0.0  # weight of the text's cross-entropy beside the teacher's predictions
    train: tuple[str, ...] = ()  # patterns of the parameters that learn, and no others
    length: int = 0  # tokens per window; 0 takes 512, or the model's longest
    batch: int = 0  # windows or samples per pass; 0 takes about 8,192 tokens on a GPU, 2,048 on a CPU, or 32 samples
    step_tokens: int = 0  # tokens (or samples) of a step; 0 takes 49,152 (128), fewer where the budget is small
    eval_windows: int | None = None  # held-out windows; 0 takes all, by default 128 of tokens
    token_type: TokenType = "auto"  # of raw token files; auto goes by their names
    start_token: StartToken = "auto"  # open every window with it; auto: as the tokenizer does to text
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # under torchrun; auto is ddp
    offload_teacher: Flag = False  # keep the teacher in main memory, one block at a time on the device
    compile: Flag = False  # compile the blocks of both models
    bf16: bool | None = None  # products in bfloat16; by default on GPUs that have them
    seed: int = 0  # order of the windows
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a GPU where there is one

    @property
    def unfinished(self) -> Path:
        """The folder for checkpoints, until the result is in its place."""
        return self.out.with_name(f".{self.out.name}.unfinished")


def run(command: Command) -> None:
    settings = plain(asdict(command))
    if is_written(command.out / "recovery.json", command.unfinished, settings):  # killed after the result was in place
        shutil.rmtree(command.unfinished, ignore_errors=True)
        print(f"{command.out}: was written already")
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
    """Refuse options that make no sense before anything is loaded."""
    number_of(command.budget)
    check_new_folder(command.out)
    if not (command.model / "config.json").is_file():
        raise ValueError(f"{command.model} is no Hugging Face folder: it has no config.json; give a pruned model's")
    is_gguf = command.teacher.suffix == ".gguf" and command.teacher.is_file()
    if not is_gguf and not (command.teacher / "config.json").is_file():
        raise ValueError(f"--teacher {command.teacher} is neither a Hugging Face folder nor a .gguf file")
    if command.teacher.resolve() == command.model.resolve():
        raise ValueError(f"--teacher {command.teacher} is the pruned model itself; give the dense one")
    check_not_negative(command, "length", "batch", "step_tokens", "eval_windows")
    if command.parallel != "auto" and "RANK" not in os.environ:
        raise ValueError(f"--parallel {command.parallel} is for several processes: torchrun ... -m prunus recover")


def _arguments(command: Command) -> Any:
    """Settings of the Trainer, which joins the processes that torchrun started."""
    from ..lab.recipe import device_named
    from ..recovery.training_options import training_arguments

    more: dict[str, Any] = {"fsdp": True, "fsdp_config": {}} if command.parallel == "fsdp" else {}
    how = (command.unfinished, device_named(command.device), command.bf16, command.seed)
    return training_arguments(*how, ddp_timeout=DAY, **more)


def _loaded(command: Command, args: Any) -> "tuple[TrainedModel, nn.Module]":
    """Student with its data, and teacher; both read text by the same tokenizer."""
    from ..export.huggingface import load_any_model
    from ..trained.data import TokenCache, tokenizer_of
    from ..trained.model import ModelSource, load_trained

    folder, file = command.teacher, None
    if folder.suffix == ".gguf":
        folder, file = folder.parent, folder.name
    if command.text is not None:
        own, other = tokenizer_of(command.model), tokenizer_of(folder, file)
        if own is not None and other is not None and own.get_vocab() != other.get_vocab():
            sizes = f"{len(own):,} and {len(other):,}"
            raise ValueError(
                f"{command.model} and {command.teacher} have different tokenizers, of {sizes} tokens: a student learns "
                "from the model that it was pruned from"
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
