"""``prunus generate``"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from .console import print
from .shared_options import given


@dataclass(frozen=True)
class Command:
    """Generate text with a pruned model, with sparse layers where they are faster, and print the speed.

    PATH is a Hugging Face folder: in the small form of prunus export and save_model, or plain with zeros in it.
    """

    path: tyro.conf.Positional[Path]  # folder of the model
    prompt: str | None = None  # text to continue; the tokenizer in the folder reads it
    tokens: tuple[int, ...] | None = None  # token ids to continue, instead of --prompt; without a tokenizer, prints ids
    max_new_tokens: int = 64  # maximum number of new tokens; a text may end earlier
    batch: int = 1  # number of texts, 1 to 16; they differ only with --sample
    sample: bool = False  # draw tokens instead of taking the most likely one
    temperature: float = 1.0  # with --sample: above 1 is more random, below 1 less
    top_k: int | None = None  # with --sample: draw from the k most likely tokens
    top_p: float | None = None  # with --sample: draw from the likeliest tokens of this total probability
    seed: int | None = None  # with --sample: the same seed gives the same text
    device: str = "auto"  # cpu or cuda; auto: cuda if there is a GPU
    compile: bool = False  # torch.compile the blocks first, which takes seconds; helps on a GPU
    dense: bool = False  # keep all layers dense, for comparison
    least: float | None = None  # make layers sparse from this fraction of zeros on, without measuring


def run(command: Command) -> None:
    _check(command)
    import torch

    from ..export import load_model
    from ..export.huggingface import check_folder, quiet_transformers
    from ..lab.recipe import device_named
    from ..ops.machine import device_of
    from ..sparse import Decoder, SparseLinear, load_packed
    from ..trained.data import tokenizer_of

    device = device_of(device_named(command.device))
    if not command.path.exists():
        raise ValueError(f"there is no folder {command.path}")
    check_folder(command.path)
    tokenizer = tokenizer_of(command.path)
    ids = _prompt(command, tokenizer)
    with quiet_transformers():
        if command.dense:
            model = load_model(command.path, device)
        else:
            model = load_packed(command.path, device, vectors=command.batch, least=command.least)
    layers = [module for module in model.modules() if isinstance(module, (SparseLinear, torch.nn.Linear))]
    num_sparse = sum(isinstance(layer, SparseLinear) for layer in layers)
    decoder, prompts = Decoder(model, compile=command.compile), torch.tensor([ids] * command.batch)
    options: dict[str, Any] = {"do_sample": command.sample, "seed": command.seed}
    options |= {name: getattr(command, name) for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
    # before the clock starts: kernels are compiled and a graph is captured, or layers get the form that CPUs multiply
    num_first = command.max_new_tokens if device.type == "cuda" else min(2, command.max_new_tokens)
    decoder.generate(prompts, **options | {"max_new_tokens": num_first})
    started = time.perf_counter()
    texts = decoder.generate(prompts, **options).cpu()
    seconds = time.perf_counter() - started
    for text in texts.tolist():
        if tokenizer is None:
            print(" ".join(map(str, text)))
        else:
            print(*tokenizer.decode(text, skip_special_tokens=True).split("\n"))
    num = texts.shape[1] - len(ids)
    times = f" x {command.batch}" if command.batch > 1 else ""
    print(
        f"{num} tokens{times} in {seconds:.2f} s, {num * command.batch / seconds:,.1f} a second; "
        f"{num_sparse} of {len(layers)} linear layers sparse on {device}",
        file=sys.stderr,
    )


def _check(command: Command) -> None:
    if (command.prompt is None) == (command.tokens is None):
        raise ValueError("give --prompt with a text or --tokens with token ids, one of the two")
    if command.dense and command.least is not None:
        raise ValueError("--dense keeps all layers dense; leave off --least, or --dense")
    for flag in given(command, "temperature", "top_k", "top_p", "seed") if not command.sample else ():
        raise ValueError(f"{flag} says how tokens are drawn; add --sample, or leave it off")
    if not 1 <= command.batch <= 16:
        raise ValueError(f"--batch must be 1 to 16, got {command.batch}")


def _prompt(command: Command, tokenizer: Any | None) -> list[int]:
    if command.tokens is not None:
        ids = list(command.tokens)
    elif tokenizer is None:
        raise ValueError(f"{command.path} has no tokenizer that transformers can read; give token ids with --tokens")
    else:
        ids = tokenizer.encode(command.prompt)
    if not ids:
        raise ValueError("the prompt has no tokens; give a text, or the start token's id with --tokens")
    return ids
