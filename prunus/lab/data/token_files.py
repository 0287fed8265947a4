"""Tokens from files: text as bytes, uint16 tokens, and the standard library of the Python that runs this."""

import gzip
import lzma
import os
import sys
import sysconfig
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
UINT16 = (".bin", ".u16")
SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
LIMIT = 16 * 2**20  # bytes of the standard library; 3.11 to 3.13 have about 11 million
HELD_OUT = 0.05


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it ends in .gz or .xz."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            return file.read()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as damage:
        raise ValueError(f"{path} is no whole {path.suffix} file ({damage}); copy it anew") from damage


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file: uint16 of .bin and .u16, bytes of any other; mapped to memory unless compressed."""
    if not path.is_file():
        raise ValueError(
            f"{path} is no file; give a text, uint16 tokens (.bin, .u16), 'stdlib', or images: a folder, 'digits'"
        )
    packed = path.suffix in OPENERS
    kind = np.dtype("<u2" if (path.with_suffix("") if packed else path).suffix in UINT16 else "u1")
    if packed:
        raw = np.frombuffer(read_bytes(path), np.uint8)
    else:  # an empty file cannot be mapped
        raw = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    if not len(raw):
        raise ValueError(f"{path} is empty; give a file that holds tokens")
    if len(raw) % kind.itemsize:
        raise ValueError(f"{path} should hold uint16 tokens, but has an odd number of bytes, {len(raw)}; copy it anew")
    return raw.view(kind)


def read_stdlib() -> tuple[np.ndarray, np.ndarray]:
    """Train and validation bytes of the standard library that runs this."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = split(sources(root))
    if not train or not held_out:
        raise ValueError(f"{root} holds too few Python sources; give the path of a text instead of 'stdlib'")
    return joined(train), joined(held_out)


def sources(root: Path) -> list[Path]:
    """Readable sources of the library's modules, in the order of a hash of their path below ``root``."""

    def hashed(place: Path) -> bytes:
        return blake2b(place.as_posix().encode(), digest_size=8).digest()

    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    readable = [path for path in found if path.is_file() and os.access(path, os.R_OK)]
    places = {path.relative_to(root): path for path in readable}
    modules = [place for place in places if place.with_suffix("").parts[0] in sys.stdlib_module_names]
    return [places[place] for place in sorted(modules, key=hashed)]


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Train and validation files: the first ones, until they make 5 % of the bytes, are validation.

    Files beyond the first LIMIT bytes are in neither part.
    """
    ends = list(accumulate(path.stat().st_size for path in paths))
    num_kept = bisect_right(ends, LIMIT)
    num_held_out = 1 + bisect_left(ends, HELD_OUT * ends[num_kept - 1]) if num_kept else 0
    return list(paths[num_held_out:num_kept]), list(paths[:num_held_out])


def joined(paths: Sequence[Path]) -> np.ndarray:
    """The bytes of all files, concatenated."""
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
