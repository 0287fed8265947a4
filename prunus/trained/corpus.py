"""The files of a text and how they are read: in pieces, all of them or as many as are wanted, spread evenly.

A folder stands for all files below it, sorted by their paths, except hidden ones, symbolic links and what is no text.
Files may be packed (.gz, .xz); a .jsonl file has a document in each line, ``{"text": "..."}``.
"""

import codecs
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import BufferedIOBase, BytesIO
from itertools import accumulate, pairwise
from pathlib import Path

from ..files.regular import check_regular
from ..oneshot.progress import Progress
from .tokens import opened, suffix_of

WHOLE = 2**22  # bytes of a text that is one piece
PIECE = 2**17  # bytes of the pieces of a longer one: many, so that the tokenizer's threads all work
STRETCHES = 64  # into which a part of a corpus is divided, at least
LEAST = 2**8  # bytes of a stretch
LONGEST_LINE = 2**26  # bytes of a document in .jsonl


@dataclass(frozen=True)
class Piece:
    """Consecutive text; ``is_new`` where it does not go on from the piece before."""

    text: str
    num_bytes: int
    is_new: bool


@dataclass(frozen=True)
class Stretch:
    """At most ``num`` bytes of a corpus from the first line that begins at ``begin`` or later, and before ``until``."""

    begin: int
    until: int
    num: int


@dataclass(frozen=True)
class Corpus:
    """The files of a text with their sizes in bytes, unpacked; they are read as if they were one."""

    path: Path
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    num_left_out: int

    @cached_property
    def begins(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    @property
    def size(self) -> int:
        return self.begins[-1]

    def notes(self, wanted: int) -> list[str]:
        """What was not read: files that are no text, and all but ``wanted`` bytes."""
        total, notes = len(self.files) + self.num_left_out, []
        if self.num_left_out:
            left_out = f"{self.num_left_out:,} of {total:,} files are left out"
            notes.append(f"{self.path}: {left_out}, which are symbolic links or no text in UTF-8")
        if wanted < self.size:
            part = f"{wanted / self.size:.1%} of {self.size / 2**20:,.1f} MiB"
            notes.append(f"{self.path}: {part} of text are read, in pieces spread evenly over it")
        return notes

    def pieces(self, stretches: list[Stretch]) -> Iterator[Piece]:
        open_files: dict[int, BufferedIOBase] = {}
        with ExitStack() as stack:  # a packed file is opened once: each time it would be unpacked from its beginning
            for stretch in stretches:
                left = stretch.num
                for number in range(bisect_right(self.begins, stretch.begin) - 1, len(self.files)):
                    begin, path = self.begins[number], self.files[number]
                    if left <= 0 or begin >= stretch.until:
                        break
                    if number not in open_files:
                        stack.close()
                        open_files = {number: stack.enter_context(opened(path))}
                    part = Stretch(max(0, stretch.begin - begin), min(self.sizes[number], stretch.until - begin), left)
                    for piece in (_documents if suffix_of(path) == ".jsonl" else _lines)(open_files[number], part):
                        left -= piece.num_bytes
                        yield piece


def spread_stretches(size: int, wanted: int) -> list[Stretch]:
    """Stretches of ``wanted`` bytes in all, spread evenly: the beginning of a sorted corpus would be one topic."""
    if wanted >= size:
        return [Stretch(0, size, size)]
    num = max(1, min(max(STRETCHES, wanted // PIECE), wanted // LEAST))
    each = wanted // num
    begins = [i * (size - each) // max(1, num - 1) for i in range(num)]
    return [Stretch(begin, until, each) for begin, until in pairwise([*begins, size])]


def find_corpus(path: Path, report: Progress | None = None) -> Corpus:
    """The files of a text, each read through once: what is no text is left out of a folder, and refused by itself."""
    check_regular(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a text file, or a folder of them")
    if path.is_dir():
        return _corpus_of_folder(path, report)
    try:
        size = _checked_size(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); give tokens with --tokens") from error
    if not size:
        raise ValueError(f"{path} is empty; give a file that holds text")
    return Corpus(path, (path,), (size,), 0)


def stamps(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of change of the files of a text, of which none is read."""
    files = _files_below(path) if path.is_dir() else [path] if path.exists() else []
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.lstat()]]


def _corpus_of_folder(folder: Path, report: Progress | None) -> Corpus:
    listed, sizes = _files_below(folder), dict[Path, int]()
    for number, path in enumerate(listed):
        if report is not None:
            report(number, len(listed), "files checked")
        if not path.is_symlink():
            with suppress(UnicodeDecodeError):
                sizes[path] = _checked_size(path)
    corpus = Corpus(folder, tuple(sizes), tuple(sizes.values()), len(listed) - len(sizes))
    if not corpus.size:
        others = f"{corpus.num_left_out:,} symbolic links and files that are not UTF-8, and {len(sizes):,} empty files"
        raise ValueError(f"{folder} holds no text, only {others}; give a text file, or a folder of them")
    return corpus


def _files_below(folder: Path) -> list[Path]:
    """Files and links that are not hidden, sorted by their paths; ValueError for a pipe, a socket or a device."""

    def fail(error: OSError) -> None:
        raise error

    listed: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(place, name).is_symlink()]
        listed += [Path(place, name) for name in [*names, *links] if not name.startswith(".")]
    for path in listed:
        if not path.is_symlink():
            check_regular(path)
    return sorted(listed, key=lambda path: path.relative_to(folder).as_posix())


def _checked_size(path: Path) -> int:
    """Bytes of a file, unpacked; UnicodeDecodeError where it is no text, ValueError for a line that is no document."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as file:
        if suffix_of(path) == ".jsonl":
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                _document(line, f"{path}, line {number}:")
            return file.tell()
        while block := file.read(WHOLE // 4):
            if (place := block.find(0)) >= 0:
                raise UnicodeDecodeError("utf-8", block, place, place + 1, "text has no NUL")
            decoder.decode(block)
        decoder.decode(b"", final=True)
        return file.tell()


def _document(line: bytes, place: str) -> bytes:
    """The text in a line of .jsonl; nothing of an empty line."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"{place} a document may have at most {LONGEST_LINE / 2**20:g} MiB; split it")
    if not (text := line.decode("utf-8-sig")).strip():
        return b""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} expected JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError(f'{place} expected an object with a string under "text", got {text.strip()[:60]}')
    return value["text"].encode("utf-8", "replace")  # JSON may hold half of a pair of surrogates


def _documents(file: BufferedIOBase, part: Stretch) -> Iterator[Piece]:
    _go_to_line(file, part.begin, LONGEST_LINE)
    left = part.num
    while left > 0 and file.tell() < part.until and (line := file.readline(LONGEST_LINE + 1)):
        document = _document(line, "the text changed while it was read:")
        yield from _cut(BytesIO(document), min(left, len(document)))
        left -= len(document)


def _lines(file: BufferedIOBase, part: Stretch) -> Iterator[Piece]:
    """The text in a part of a file, each line end as ``\\n``."""
    _go_to_line(file, part.begin, part.num // 4)
    for piece in _cut(file, min(part.num, part.until - file.tell())):
        yield replace(piece, text=piece.text.replace("\r\n", "\n").replace("\r", "\n"))


def _go_to_line(file: BufferedIOBase, begin: int, most: int) -> None:
    """Go on to the first line that begins at ``begin`` or later, unless one that was read before ends there."""
    if file.tell() < begin:
        file.seek(begin - 1)
        file.readline(1 + most)


def _cut(file: BufferedIOBase, num: int) -> Iterator[Piece]:
    """The next ``num`` bytes, in one piece if they are at most WHOLE; a cut is at the end of a line if there is one."""
    most, rest, is_new = num if num <= WHOLE else PIECE, b"", True
    while num > 0 and (block := file.read(min(num, most - len(rest)))):
        num, block = num - len(block), rest + block
        edge = _edge(block) if num else len(block)
        rest = block[edge:]
        # the text was checked: what does not decode is a letter of which a stretch has a part
        yield Piece(block[:edge].decode("utf-8", "ignore"), edge, is_new)
        is_new = False


def _edge(block: bytes) -> int:
    """Where to cut: after the last line, else before the last word, else before the last letter."""
    return (
        block.rfind(b"\n") + 1
        or max(0, block.rfind(b" "))
        or max(i for i in range(max(0, len(block) - 4), len(block)) if block[i] & 0xC0 != 0x80)
    )
