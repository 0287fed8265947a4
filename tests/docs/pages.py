"""Pages as they are written: their links, and their blocks of code, which run in order in an empty folder."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunus.cli import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """``note`` is the comment above: ``not run: why``, or ``file: name`` for what is to be written to a file."""

    language: str
    text: str
    note: str
    line: int


def blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        yield Block(found["language"], found["text"], found["note"] or "", line)


def run_python(block: Block, path: Path, names: dict[str, Any]) -> None:
    """Run a block with the names of those before it; errors name the line of the page."""
    exec(compile("\n" * block.line + block.text, str(path), "exec"), names)


def run_commands(block: Block) -> None:
    """Every line of a block, ``prunus`` in this process, which spares an import of torch each."""
    for line in block.text.replace("\\\n", " ").splitlines():
        match shlex.split(line, comments=True):
            case []:
                continue
            case ["prunus", *args]:
                main(args)
            case ["torchrun", *args]:
                subprocess.run([sys.executable, "-m", "torch.distributed.run", *args], check=True, timeout=300)
            case _:
                raise AssertionError(f"no test knows how to run: {line}; mark the block <!-- not run: why -->")


def run(path: Path, *, commands: bool) -> None:
    """All blocks of a page in order; without ``commands`` those of Python alone."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(path):
        if block.note.startswith("not run: "):
            continue
        if block.note.startswith("file: "):
            Path(block.note.removeprefix("file: ")).write_text(block.text)
        elif block.language == "python":
            run_python(block, path, names)
        elif block.language == "sh" and commands:
            run_commands(block)


def links_of(path: Path) -> list[str]:
    """Targets of links and pictures outside of code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    return [first or second for first, second in LINK.findall(prose)]


def anchors_of(path: Path) -> set[str]:
    """Anchors that headings get, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
