"""How ``prunus eval --problems`` asks a model for programs, runs them, and keeps what is finished."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..export.huggingface import check_folder, load_any_model, quiet_transformers
from ..files.json_file import strict_json, to_json
from ..files.regular import check_regular
from ..lab.recipe import device_named
from ..oneshot.progress import progress_line
from ..ops.machine import device_of
from ..ops.wide_products import wide_products
from ..sparse import Decoder
from ..trained.data import (
    TokenFile,
    check_vocabulary,
    folder_and_file,
    is_causal,
    spread,
    text_config,
    tokenizer_of,
)
from ..trained.problems import ASK, Problem, chat_prompt, read_problems, wilson
from ..trained.run_code import CONFINEMENT, check_confinement, run_programs
from .console import print

OF_MODEL = (".json", ".jinja", ".model", ".safetensors", ".gguf", ".txt")  # files that say what a model writes


def solve(command: Any) -> str:
    if not command.run_code:
        raise ValueError(f"--problems runs programs that the model writes, {CONFINEMENT}; add --run-code to allow it")
    if not 1 <= command.batch <= 16 or command.max_new_tokens < 1:
        raise ValueError(
            f"--batch must be 1 to 16 and --max-new-tokens at least 1, got {command.batch} and {command.max_new_tokens}"
        )
    problems = read_problems(command.problems)
    problems = [problems[place] for place in spread(len(problems), command.samples)]
    if folder_and_file(command.path)[1] is None:
        check_folder(command.path)
    answers = Answers(command.answers, lambda: settings_of(command.path, command.problems, command.max_new_tokens))
    if left := [problem for problem in problems if problem.task_id not in answers.passed]:
        if note := check_confinement():
            print(note)
        _answer(command, left, answers)
    num, total = sum(answers.passed[problem.task_id] for problem in problems), len(problems)
    low, high = wilson(num, total)
    interval = f"{num} of {total}; 95 % interval {low:.3f} to {high:.3f}"
    return f"pass@1 {num / total:.3f} ({interval}) on {command.problems.name}"


class Answers:
    """Whether each finished problem has passed, and the file that keeps it: settings, then a line for each problem."""

    def __init__(self, path: Path | None, settings: Callable[[], dict[str, Any]]) -> None:
        self.path, self.passed = path, dict[str, bool]()
        if path is None:
            return
        check_regular(path)
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK) or path.is_dir():
            raise ValueError(f"{path} cannot be written; --answers takes a .jsonl file in a folder that is there")
        self.settings = settings()
        if path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        *lines, torn = path.read_bytes().split(b"\n")
        first = to_json({"settings": self.settings}).encode()
        try:
            if not lines and not first.startswith(torn):
                raise ValueError
            settings, *rows = map(strict_json, lines or [first])
            before = settings["settings"]
            self.passed = {row["task_id"]: {"passed": True, "failed": False}[row["verdict"]] for row in rows}
            changed = [name for name in self.settings if before[name] != self.settings[name]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not a file of answers, or is damaged; choose another --answers") from None
        if changed:
            differs = " and ".join(changed)
            raise ValueError(f"{path} holds answers of a run that differs in {differs}; choose another --answers")
        os.truncate(path, path.stat().st_size - len(torn))  # the line that a killed command was writing

    def add(self, problem: Problem, answer: str, why: str) -> None:
        self.passed[problem.task_id] = not why
        if self.path is None:
            return
        row = {"task_id": problem.task_id, "verdict": "failed" if why else "passed", "why": why, "answer": answer}
        with self.path.open("ab") as file:
            first = [] if file.tell() else [{"settings": self.settings}]
            file.write("".join(to_json(each) + "\n" for each in (*first, row)).encode())


def settings_of(model: Path, problems: Path, most: int) -> dict[str, Any]:
    """What an answer and its verdict depend on."""
    asked = {"problems": hashlib.sha256(problems.read_bytes()).hexdigest(), "max_new_tokens": most, "prompt": ASK}
    return {"model": _digest(model), **asked}


def _digest(model: Path) -> str:
    """The same for the same model in another place."""
    files = sorted(file for file in model.iterdir() if file.suffix in OF_MODEL) if model.is_dir() else [model]
    total = hashlib.sha256()
    for path in files:
        check_regular(path)
        with path.open("rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _answer(command: Any, problems: list[Problem], answers: Answers) -> None:
    folder, file = folder_and_file(command.path)
    tokenizer = chat_tokenizer(folder, file)
    prompts = [chat_prompt(tokenizer, problem) for problem in problems]
    model = load_any_model(folder, "auto", file).to(device_of(device_named(command.device)))
    check_vocabulary(TokenFile(command.problems, np.concatenate(prompts)), model)
    chat = Chat(model, tokenizer, command.max_new_tokens)
    ask(chat, list(zip(problems, prompts, strict=True)), answers, command.batch)


def chat_tokenizer(folder: Path, file: str | None) -> Any:
    """The tokenizer of a model that can be asked."""
    tokenizer = tokenizer_of(folder, file)
    if not getattr(tokenizer, "chat_template", None):
        lacks = "no tokenizer that transformers can read" if tokenizer is None else "a tokenizer without chat template"
        where = folder / file if file else folder
        raise ValueError(f"{where} has {lacks}, so it cannot be asked; --problems needs an instruct model")
    return tokenizer


def ask(chat: "Chat", asked: Sequence[tuple[Problem, list[int]]], answers: Answers, size: int) -> None:
    """Answer problems with a model in memory, ``size`` at a time, and run the programs of each batch."""
    length = max((len(prompt) for _, prompt in asked), default=0)
    if length >= chat.longest:
        raise ValueError(f"a prompt has {length} tokens, but the model reads {chat.longest} with the answer")
    with progress_line(None, "solve") as show:
        for first in range(0, len(asked), size):
            batch = asked[first : first + size]
            texts = chat([prompt for _, prompt in batch])
            programs = [problem.program(text) for (problem, _), text in zip(batch, texts, strict=True)]
            for (problem, _), text, why in zip(batch, texts, run_programs(programs), strict=True):
                answers.add(problem, text, why)
            if show is not None:
                show(first + len(batch), len(asked), f"{sum(answers.passed.values())} problems solved")


class Chat:
    """Greedy answers of a model: a batch at a time by the decoder, or one by one by ``model.generate``.

    The latter runs models that the decoder does not. Some of them write differently after padding: those with a state
    in place of a cache, and those whose generation config penalises tokens that are there already.
    """

    def __init__(self, model: Any, tokenizer: Any, most: int) -> None:
        if not is_causal(model):
            raise ValueError(f"{type(model).__name__} does not continue text; --problems needs a causal language model")
        self.model, self.tokenizer, self.most = model, tokenizer, most
        ends = model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        pad = next((each for each in (tokenizer.pad_token_id, *ends) if each is not None), 0)
        self.options = {"eos_token_id": sorted(ends) or [-1], "pad_token_id": pad, "do_sample": False}
        self.longest = getattr(text_config(model), "max_position_embeddings", None) or sys.maxsize
        try:
            self.decoder = Decoder(model)
        except ValueError:
            self.decoder = None

    def __call__(self, prompts: list[list[int]]) -> list[str]:
        """One answer each, up to its end token or the most tokens that may be."""
        texts = []
        for row in self._tokens(prompts):
            end = next((place for place, token in enumerate(row) if token in self.options["eos_token_id"]), len(row))
            texts.append(self.tokenizer.decode(row[:end], skip_special_tokens=True))
        return texts

    def _tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        if self.decoder is not None:
            pads = [width - len(prompt) for prompt in prompts]
            rows = [[self.options["pad_token_id"]] * num + prompt for num, prompt in zip(pads, prompts, strict=True)]
            mask = torch.tensor([[0] * num + [1] * (width - num) for num in pads])
            how = {"attention_mask": mask, "max_new_tokens": min(self.most, self.longest - width), **self.options}
            try:
                return self.decoder.generate(torch.tensor(rows), **how)[:, width:].tolist()
            except ValueError:  # a cache that the model does not take is found out here
                self.decoder = None
        return [self._generate(prompt) for prompt in prompts]

    def _generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": min(self.most, self.longest - len(prompt))}
        with torch.inference_mode(), quiet_transformers(), wide_products(ids.device, self.model):
            return self.model.generate(ids, **how, **self.options)[0, len(prompt) :].tolist()
