"""Text for the study of programs: Python source, and what the model writes itself from short instructions.

Source alone would teach a pruned model to continue files, and to forget how to answer. So a part of what it learns
from are its own answers, drawn at temperature 1, in the chat template in which it is asked later. Whole packages are
kept back to evaluate on, and copies of their files are dropped. No document may hold a part of a problem that is asked.
"""

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from prunus.cli.answering import chat_tokenizer
from prunus.export.huggingface import load_any_model, quiet_transformers
from prunus.files.atomic import write_atomically
from prunus.files.json_file import strict_json, write_json
from prunus.ops.machine import device_of
from prunus.trained.data import text_config, tokenizer_of
from prunus.trained.problems import Problem, read_problems
from prunus.trained.tokens import read_bytes

SPAN = 13  # words in a row that no document may share with a problem
SHORTEST = 8  # words of a whole solution with its signature that is shorter
CHOOSES = 50  # every so many-th document is one on which recovery chooses its best state
OTHERS = {"site-packages", "dist-packages"}  # folders inside a source folder that are one of their own
TOGETHER = 256  # documents that are tokenised together
FORMS = (
    "Write a Python function that {}.",
    "Write a Python function that {}. Answer with the code alone.",
    "Write a Python function that {}, with type hints and a docstring that has two examples.",
    "Write a Python class that {}, and show how it is used.",
    "Write a Python function that {}, then explain it in three sentences.",
    "Write tests with pytest for a Python function that {}.",
    "Explain to a beginner, with an example, how a program {}.",
)
ACTIONS = (
    "sorts", "filters", "groups", "validates", "parses", "merges", "counts", "compares", "converts", "splits",
    "summarises", "searches", "caches", "removes duplicates from", "finds mistakes in", "prints", "stores", "samples",
)  # fmt: skip
OBJECTS = (
    "rows of a CSV file", "lines of a log file", "dates given as text", "nested dictionaries", "a queue of tasks",
    "e-mail addresses", "words of a text", "a matrix of numbers", "a binary tree", "a directed graph", "prices in "
    "several currencies", "file paths", "JSON records", "a linked list", "bank transactions", "version numbers",
    "HTML tags", "polynomials", "playing cards", "sensor readings", "URLs", "options of a program", "time intervals",
    "colours", "IP addresses", "moves of a board game",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProgramsText:
    """Write learn.u32, choose.u32, python.u32 and prose.u32: tokens to learn from, and to choose and evaluate on.

    The model is a Hugging Face folder or, with --gguf-file, the folder of a GGUF file. What the model has written is
    kept in written.jsonl, and the same command goes on from there.
    """

    model: Path
    out: Path
    problems: Path  # programming problems in HumanEval's form that no text may hold
    prose: Path  # text to evaluate on, a file
    sources: tyro.conf.UseAppendAction[tuple[Path, ...]]  # folder of Python packages; may be repeated
    held_back: tuple[str, ...] = ("json", "http", "email", "logging", "unittest")  # packages to evaluate on
    gguf_file: str | None = None
    tokens: int = 12_000_000  # to learn from, at most
    eval_tokens: int = 262_144  # to evaluate on, at most, of each kind
    written: float = 0.1  # share of the tokens to learn from that the model writes
    most: int = 512  # tokens of an answer
    batch: int = 128  # answers that it writes at a time
    seed: int = 0
    device: str = "cpu"  # cpu or cuda

    def run(self) -> None:
        if not 0 <= self.written < 1:
            raise ValueError(f"--written is a share of at least 0 and less than 1, got {self.written}")
        tokenizer = (chat_tokenizer if self.written else tokenizer_of)(self.model, self.gguf_file)
        if tokenizer is None:
            raise ValueError(f"{self.model} has no tokenizer that transformers can read")
        texts, prose = Texts(Problems(self.problems)), self.prose.read_text()
        files = python_files(self.sources)
        if missing := set(self.held_back) - {package for package, _ in files}:
            raise ValueError(f"no source folder has the package {', '.join(sorted(missing))}, which is to be held back")
        random.Random(self.seed).shuffle(files)
        held_back = [path for package, path in files if package in self.held_back]
        others = [path for package, path in files if package not in self.held_back]
        lists = {"python": tokenised(tokenizer, texts.of_files(held_back), self.eval_tokens)}
        lists["prose"] = tokenised(tokenizer, texts.clean([prose]), self.eval_tokens)
        source = tokenised(tokenizer, texts.of_files(others), round(self.tokens * (1 - self.written)))
        answers = self._written(tokenizer, texts) if self.written else []
        learn = source + answers
        random.Random(self.seed).shuffle(learn)
        lists |= {"learn": [ids for i, ids in enumerate(learn) if i % CHOOSES], "choose": learn[::CHOOSES]}
        counts = {name: write_documents(self.out / f"{name}.u32", ids, tokenizer) for name, ids in lists.items()}
        about = {"tokens": counts, "documents": {name: len(ids) for name, ids in lists.items()}}
        about |= {"written_tokens": sum(map(len, answers)), "held_back": self.held_back, "dropped": dict(texts.dropped)}
        write_json(self.out / "text.json", about)
        print(json.dumps(about, indent=1))

    def _written(self, tokenizer: Any, texts: "Texts") -> list[list[int]]:
        """Conversations of a short instruction and the model's answer."""
        self.out.mkdir(parents=True, exist_ok=True)
        path, wanted = self.out / "written.jsonl", self.tokens * self.written
        rows = list(whole_rows(path))
        if sum(len(row["ids"]) for row in rows) < wanted:
            dtype = "auto" if self.device == "cpu" else "bfloat16"
            model = load_any_model(self.model, dtype, self.gguf_file).to(device_of(self.device))
            with path.open("a") as file:
                while (num := sum(len(row["ids"]) for row in rows)) < wanted:
                    print(f"written: {num:,} of {wanted:,.0f} tokens", flush=True)
                    new = written_by(model, tokenizer, instructions(len(rows), self.batch), self.most, len(rows))
                    file.write("".join(json.dumps(row) + "\n" for row in new))
                    file.flush()
                    rows += new
        is_clean = set(texts.clean([row["text"] for row in rows]))
        return [row["ids"] for row in rows if row["text"] in is_clean]


# Problems


class Problems:
    """Words in a row that are of a problem: of its prompt, of its solution with the signature, and of its test.

    Words are compared without what is between them, in lower case, and without the names behind ``def`` and ``>>>``, so
    other spaces, line breaks and names of functions hide nothing.
    """

    def __init__(self, path: Path) -> None:
        problems, rows = read_problems(path), map(strict_json, filter(None, read_bytes(path).splitlines()))
        solutions = [row.get("canonical_solution") or "" for row in rows]
        self.grams: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        for problem, solution in zip(problems, solutions, strict=True):
            for text in (problem.prompt, signature_of(problem) + solution, problem.test):
                words = words_of(text)
                size = min(SPAN, len(words))
                for first in range(len(words) - size + 1) if size >= SHORTEST else ():
                    gram = tuple(words[first : first + size])
                    self.grams[gram[:SHORTEST]].add(gram)

    def are_in(self, words: Sequence[str]) -> bool:
        found = self.grams.keys() & zip(*(words[i:] for i in range(SHORTEST)), strict=False)
        return bool(found) and any(
            tuple(words[first : first + len(gram)]) == gram
            for first in range(len(words) - SHORTEST + 1)
            for gram in self.grams.get(tuple(words[first : first + SHORTEST]), ())
        )


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"(\bdef|>>>)\s+\w+", r"\1", text).lower())


def signature_of(problem: Problem) -> str:
    text = problem.prompt[[*problem.defines.finditer(problem.prompt)][-1].start() :]
    return re.split(r'"""|\'\'\'', text, maxsplit=1)[0]


# Documents


@dataclass
class Texts:
    """Documents, without those that hold a part of a problem and without copies; counts what it drops."""

    problems: Problems

    def __post_init__(self) -> None:
        self.seen, self.dropped = set[bytes](), Counter[str]()

    def clean(self, texts: Sequence[str]) -> Iterator[str]:
        for text in texts:
            words = words_of(text)
            digest = hashlib.sha256(" ".join(words).encode()).digest()
            if not words or digest in self.seen:
                self.dropped["copies" if words else "empty files"] += 1
            elif self.problems.are_in(words):
                self.dropped["documents with a part of a problem"] += 1
            else:
                yield text
            self.seen.add(digest)

    def of_files(self, paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                self.dropped["files that are not UTF-8"] += 1
                continue
            if "\0" in text:
                self.dropped["files that are not text"] += 1
            else:
                yield from self.clean([text])


def python_files(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Packages and files below the folders, sorted; a module of its own is a package."""
    found = []
    for folder in folders:
        paths = [path for path in folder.rglob("*.py") if path.is_file() and not path.is_symlink()]
        if not paths:
            raise ValueError(f"{folder} has no Python source; --sources takes folders of packages")
        parts = [(path.relative_to(folder), path) for path in sorted(paths)]
        found += [(inner.parts[0].removesuffix(".py"), path) for inner, path in parts if not OTHERS & {*inner.parts}]
    return found


def tokenised(tokenizer: Any, texts: Iterator[str], most: int) -> list[list[int]]:
    """The tokens of documents, until there are enough."""
    documents, num = list[list[int]](), 0
    while num < most and (part := list(islice(texts, TOGETHER))):
        for ids in encoded(tokenizer, part):
            documents.append(ids[: most - num])
            num += len(documents[-1])
    return [ids for ids in documents if ids]


def encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def write_documents(path: Path, documents: Sequence[Sequence[int]], tokenizer: Any) -> int:
    """Write documents with an end token behind each; how many tokens there are."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = np.array([token for document in documents for token in (*document, *end)], "<u4")
    if not len(ids):
        raise ValueError(f"no text is left for {path}; give more --sources")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(ids.tobytes()))
    return len(ids)


# What the model writes


def instructions(first: int, num: int) -> list[str]:
    """Short instructions by number, all different until there are no others."""
    every = list(product(FORMS, ACTIONS, OBJECTS))
    random.Random(0).shuffle(every)
    chosen = (every[(first + i) % len(every)] for i in range(num))
    return [form.format(f"{action} {what}") for form, action, what in chosen]


@torch.no_grad()
def written_by(model: Any, tokenizer: Any, asked: Sequence[str], most: int, seed: int) -> list[dict[str, Any]]:
    """The model's answers, drawn at temperature 1, as text and as tokens with the question."""
    from transformers import GenerationConfig

    chats = [[{"role": "user", "content": one}] for one in asked]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = encoded(tokenizer, texts)
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    pad, width = min(ends, default=0), max(map(len, prompts))
    most = min(most, (getattr(text_config(model), "max_position_embeddings", None) or width + most) - width)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=most, eos_token_id=sorted(ends), pad_token_id=pad)
    torch.manual_seed(seed)
    with quiet_transformers():
        rows = model.generate(ids, attention_mask=mask, generation_config=how)[:, width:].tolist()
    answers = [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in rows]
    return [
        {"asked": one, "text": tokenizer.decode(answer, skip_special_tokens=True), "ids": prompt + answer}
        for one, prompt, answer in zip(asked, prompts, answers, strict=True)
    ]


def whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without the last one if it was cut, which goes from the file too."""
    if path.is_file():
        *lines, torn = path.read_bytes().split(b"\n")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(torn))
        yield from map(json.loads, lines)
