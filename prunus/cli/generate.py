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
    """Write text with a pruned model, its layers kept sparse where that is faster here, and say how fast it was.

    The model is a Hugging Face folder: small, as prunus export and save_model write it, or plain with zeros in it.
    """

    path: tyro.conf.Positional[Path]  # folder of the model
    prompt: str | None = None  # text that goes on, read by the tokenizer in the folder
    tokens: tuple[int, ...] | None = None  # or token ids; then ids are printed where the folder has no tokenizer
    max_new_tokens: int = 64  # at most; a text may end before
    batch: int = 1  # texts at a time, 1 to 16; with --sample they differ
    sample: bool = False  # draw tokens, in place of taking the most likely one
    temperature: float = 1.0  # sample: above 1 is wilder, below 1 tamer
    top_k: int | None = None  # sample: among the k most likely tokens alone
    top_p: float | None = None  # sample: among the most likely tokens of this probability alone
    seed: int | None = None  # sample: the same seed draws the same text
    device: str = "auto"  # cpu or cuda; auto takes cuda where there is one
    compile: bool = False  # have torch compile the blocks before the clock starts, for seconds; pays on a GPU
    dense: bool = False  # keep all layers dense, to compare
    least: float | None = None  # keep layers sparse that have this share of zeros or more, without measuring


def run(command: Command) -> None:
    _check(command)
    import torch

    from ..export import load_model
    from ..export.huggingface import quiet_transformers
    from ..lab.recipe import device_named
    from ..ops.machine import device_of
    from ..sparse import Decoder, SparseLinear, load_packed
    from ..trained.data import tokenizer_of

    device = device_of(device_named(command.device))
    if not command.path.exists():
        raise ValueError(f"there is no folder {command.path}")
    tokenizer = tokenizer_of(command.path) if command.path.is_dir() else None
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
        raise ValueError("give --prompt with a text, or --tokens with token ids")
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
        raise ValueError(f"{command.path} has no tokenizer that transformers reads; give the prompt as --tokens")
    else:
        ids = tokenizer.encode(command.prompt)
    if not ids:
        raise ValueError("the prompt has no tokens; give a text, or the start token's id with --tokens")
    return ids
