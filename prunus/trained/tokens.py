"""Tokens of a file: raw uint16 or uint32, an array of numpy, or the bytes of a text, packed or not."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

import numpy as np

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
MAX_READ = 2**30  # bytes of a file that is read into memory: half a megabyte may unpack to any size
TOKEN_TYPES = {"uint16": (".bin", ".u16"), "uint32": (".u32",)}  # of raw files, little-endian, by their names


@contextmanager
def opened(path: Path) -> Iterator[BufferedIOBase]:
    """A file to read, unpacked if it ends in .gz or .xz; ValueError where a packed one is damaged."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as damage:
        raise ValueError(f"{path} is not a complete {path.suffix} file ({damage}); copy it again") from damage


def suffix_of(path: Path) -> str:
    """The end of a file's name, without that of packing."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it ends in .gz or .xz; ValueError where it is longer than MAX_READ."""
    with opened(path) as file:
        content = file.read(MAX_READ + 1)
    if len(content) > MAX_READ:
        ways = "; unpack it: a plain file of tokens is not read into memory" * (path.suffix in OPENERS)
        raise ValueError(
            f"{path} holds more than {MAX_READ / 2**20:g} MiB, the most that may be read into memory{ways}"
        )
    return content


def read_tokens(path: Path, token_type: str = "auto") -> np.ndarray:
    """The tokens of a file, mapped to memory unless it is compressed.

    uint16 of .bin and .u16, uint32 of .u32, integers of .npy, bytes of any other. ``token_type`` says what a raw file
    holds whatever its name; without it one that is called uint16 and looks like uint32 is refused.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; give a text, tokens (.bin, .u16, .u32, .npy), 'stdlib', or images: a folder, "
            "'digits'"
        )
    packed, suffix = path.suffix in OPENERS, suffix_of(path)
    if suffix == ".npy" and not packed:
        return _read_npy(path)
    named = next((name for name, suffixes in TOKEN_TYPES.items() if suffix in suffixes), "uint8")
    kind = np.dtype(named if token_type == "auto" else token_type).newbyteorder("<")
    if packed:
        raw = np.frombuffer(read_bytes(path), np.uint8)
    else:  # an empty file cannot be mapped
        raw = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    if not len(raw):
        raise ValueError(f"{path} is empty; give a file that holds tokens")
    if len(raw) % kind.itemsize:
        what = "an odd number of bytes" if kind.itemsize == 2 else "a number of bytes that is not a multiple of 4"
        raise ValueError(f"{path} should hold {kind.name} tokens, but has {what}, {len(raw)}; copy it again")
    tokens = raw.view(kind)
    if token_type == "auto" and kind.itemsize == 2 and _looks_like_uint32(tokens):
        raise ValueError(
            f"{path} looks like uint32 tokens, since every second uint16 is almost 0; name it .u32, or pass "
            "--token-type uint32 (or uint16, if that is right)"
        )
    return tokens


def _looks_like_uint32(tokens: np.ndarray) -> bool:
    """Whether these would be the low and high halves of 32-bit tokens: every second is 0, or tiny beside large ones."""
    sample = tokens[: 2**20]
    if len(tokens) % 2 or len(sample) < 16:
        return False
    low, high = int(sample[::2].max()), int(sample[1::2].max())
    return (high == 0 and low > 0) or (high < 16 and low >= 4096)


def _read_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (Exception, MemoryError) as damage:  # numpy has many for a damaged header
        raise ValueError(f"{path} is not an array that numpy.save wrote ({damage}); copy it again") from damage
    if not isinstance(tokens, np.ndarray):
        raise ValueError(f"{path} is an archive of arrays (.npz), not one array; numpy.save writes one")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise ValueError(f"{path} should hold one row of integers, but holds {tokens.dtype} {list(tokens.shape)}")
    if tokens.dtype.kind == "i" and (least := int(tokens.min())) < 0:
        raise ValueError(f"{path} holds token {least}; tokens are 0 or more")
    return tokens
