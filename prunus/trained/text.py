"""The tokens of a text, which is a file or a folder of files, tokenised a few MiB at a time.

As in most tools that prepare text for training, the tokenizer's end-of-text token, where it has one, stands between two
documents. A file of at most WHOLE bytes gives the tokens of ``tokenizer.encode``; a longer one is tokenised in pieces.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files.atomic import write_atomically
from ..oneshot.progress import Progress, progress_line
from .corpus import WHOLE, Corpus, Piece, find_corpus, spread_stretches

MOST_READ = 2**26  # bytes of text whose tokens are held in memory
PROBE = 2**20  # bytes of text that tell how many tokens a byte makes


def write_tokens(text: Path, tokenizer: Any, to: Path, most: int) -> list[str]:
    """Write the tokens of a text as little-endian uint32, which ``read_tokens`` maps to memory; says what was not read.

    Where there are more than ``most``, as far as a sample tells, they are those of pieces spread evenly over the text,
    about ``most`` in all. The same text, tokenizer and ``most`` give the same file.
    """
    with progress_line(None, "tokenise") as report:
        corpus = find_corpus(text, report)
        wanted = math.ceil(most / tokens_per_byte(corpus, tokenizer))

        def write(file: BinaryIO) -> None:
            for ids in token_arrays(corpus, tokenizer, wanted, report):
                file.write(ids.tobytes())

        write_atomically(to, write)
    return corpus.notes(wanted)


def read_text(path: Path, tokenizer: Any) -> tuple[np.ndarray, list[str]]:
    """The tokens of a text, of a longer one than MOST_READ those of pieces spread evenly; and what was not read."""
    with progress_line(None, "tokenise") as report:
        corpus = find_corpus(path, report)
        ids = np.concatenate(list(token_arrays(corpus, tokenizer, MOST_READ, report)))
    return ids, corpus.notes(MOST_READ)


def token_arrays(corpus: Corpus, tokenizer: Any, wanted: int, report: Progress | None) -> Iterator[np.ndarray]:
    """Tokens (uint32) of about ``wanted`` bytes of a corpus, piece after piece."""
    end, num_bytes, num_tokens, is_new = getattr(tokenizer, "eos_token_id", None), 0, 0, False
    wanted = min(wanted, corpus.size)
    for batch in _batches(corpus.pieces(spread_stretches(corpus.size, wanted))):
        for piece, row in zip(batch, _encoded(tokenizer, batch), strict=True):
            num_bytes, is_new = num_bytes + piece.num_bytes, is_new or piece.is_new
            if row:
                ends = [end] if is_new and num_tokens and end is not None else []
                yield np.array(ends + row, "<u4")
                num_tokens, is_new = num_tokens + len(row), False
        if report is not None:
            report(min(num_bytes, wanted), wanted, f"{num_tokens:,} tokens")
    if not num_tokens:
        raise ValueError(f"{corpus.path} holds no tokens, only {num_bytes:,} bytes of text; give more text")


def tokens_per_byte(corpus: Corpus, tokenizer: Any) -> float:
    pieces = list(corpus.pieces(spread_stretches(corpus.size, PROBE)))
    num_tokens = sum(len(row) + piece.is_new for piece, row in zip(pieces, _encoded(tokenizer, pieces), strict=True))
    return max(1, num_tokens) / max(1, sum(piece.num_bytes for piece in pieces))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += piece.num_bytes
        if size >= WHOLE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(tokenizer: Any, pieces: list[Piece]) -> list[list[int]]:
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer([piece.text for piece in pieces], **options, verbose=False)["input_ids"]
