"""Reading files: bytes behind any compression, and tokens by the file's suffix."""

import gzip
import lzma
import zlib
from pathlib import Path

import numpy as np

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
UINT16 = (".bin", ".u16")


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
    raw = np.frombuffer(read_bytes(path), np.uint8) if packed else _mapped(path)
    if not len(raw):
        raise ValueError(f"{path} is empty; give a file that holds tokens")
    if len(raw) % kind.itemsize:
        raise ValueError(f"{path} should hold uint16 tokens, but has an odd number of bytes, {len(raw)}; copy it anew")
    return raw.view(kind)


def _mapped(path: Path) -> np.ndarray:
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")
