"""Ways to damage a file: its bytes, or what its format holds, so that only the checks behind the parser can tell."""

import copy
import gzip
import io
import json
import lzma
import math
import os
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

Mutation = Callable[[bytes, random.Random], bytes]

SIZES = ("num_labels", "num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings", "num_experts")
DEEP = "deeply nested"  # stands for a hundred thousand brackets, which no encoder would write
NASTY = [
    *(-1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**400, 1.5, -0.0, 1e308),
    *(math.nan, math.inf, True, None, "", "x", "0", "\x1b[2J\x1b[31m", "../../../etc/passwd", "/dev/zero", "a" * 5000),
    *([], {}, [[]], [1, "a", None], {"a": 1}, {"": {}}, "NaN", "\N{SNOWMAN}", "\0", DEEP),
]


def flip(data: bytes, rng: random.Random) -> bytes:
    """One bit."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def scramble(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 9)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice([1, 7, 8, 64, 4096]))


def blank(data: bytes, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(data)), rng.choice([1, 4, 64, 512])
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice([1, 2, 8, 64]) :]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A part of the file, elsewhere in it."""
    source, target, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice([1, 4, 32, 256])
    return data[:target] + data[source : source + size] + data[target:]


def replace(data: bytes, rng: random.Random) -> bytes:
    """Another file of the same name."""
    return rng.choice(
        [b"", b"\0", b"\0" * 4096, b"null", b"[]", b"{}", b"[" * 10**5, b"PK\x03\x04", b"\x80\x04.", b"1"]
    )


BYTES: list[Mutation] = [flip, flip, scramble, cut, extend, blank, remove, splice, replace]


def _children(value: Any) -> list:
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, (list, tuple)):
        return list(range(len(value)))
    return list(vars(value)) if hasattr(value, "__dataclass_fields__") else []


def changed_tree(value: Any, rng: random.Random) -> Any:
    """The same tree of dicts, lists and dataclasses with one nasty value, one part missing, or two exchanged."""
    children = _children(value)
    if not children or rng.random() < 0.1:
        return rng.choice(NASTY)
    key, other = rng.choice(children), rng.choice(children)
    if hasattr(value, "__dataclass_fields__"):
        found = copy.copy(value)
        object.__setattr__(found, key, changed_tree(getattr(value, key), rng))
        return found
    found = dict(value) if isinstance(value, dict) else list(value)
    match rng.randrange(9):
        case 0:
            del found[key]
        case 8 if isinstance(found, dict):
            found[f"{key}{rng.choice(['.bits', '.values', 'x'])}"] = found.pop(key)
        case 1:
            found[key], found[other] = found[other], found[key]
        case _:
            found[key] = changed_tree(found[key], rng)
    return tuple(found) if isinstance(value, tuple) else found


def in_json(data: bytes, rng: random.Random) -> bytes:
    return _dumped(changed_tree(json.loads(data), rng)).encode(errors="surrogatepass")


def repeated(data: bytes, rng: random.Random) -> bytes:
    """JSON that gives a name twice, with another value first."""
    text = data.decode()
    found = rng.choice(list(re.finditer(r'"[^"\\]*"(?=\s*:)', text)))
    return f"{text[: found.start()]}{found[0]}: {json.dumps(rng.choice(NASTY))}, {text[found.start() :]}".encode()


def odd_text(data: bytes, rng: random.Random) -> bytes:
    """What is no JSON, or should not be, somewhere in it."""
    odd = rng.choice(
        [b'{"a":1,"a":2}', b"NaN", b"-Infinity", b"[" * 10**5, b'"\\ud800"', b"1e999", b"9" * 5000, b",", b"}"]
    )
    at = rng.randrange(len(data))
    return data[:at] + odd + data[at:]


def huge(data: bytes, rng: random.Random) -> bytes:
    """A configuration with a size that no file has, under a name of its own or one that transformers knows."""
    values = json.loads(data)
    names = [name for name, value in values.items() if type(value) is int]
    values[rng.choice([*names, *SIZES])] = rng.choice([10**5, 10**8, 10**12])
    return json.dumps(values).encode()


def in_json_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _dumped(changed_tree(json.loads(lines[at]), rng))
    return "\n".join(lines).encode(errors="surrogatepass")


def _dumped(value: Any) -> str:
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)


def in_pickle(data: bytes, rng: random.Random) -> bytes:
    return pickle.dumps(changed_tree(pickle.loads(data), rng))


def in_torch_file(data: bytes, rng: random.Random) -> bytes:
    state, out = torch.load(io.BytesIO(data), weights_only=False), io.BytesIO()
    torch.save(changed_tree(state, rng), out)
    return out.getvalue()


def in_zip(data: bytes, rng: random.Random) -> bytes:
    """One member of an archive, whose checksum is mended."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        chosen = rng.choice(names)
        for name in names:
            inner = old.read(name)
            new.writestr(name, rng.choice(BYTES)(inner, rng) if name == chosen and inner else inner)
    return out.getvalue()


def odd_member(data: bytes, rng: random.Random) -> bytes:
    """One more member in an archive of arrays: a text, objects, or none of what its name says."""
    objects = io.BytesIO()
    np.save(objects, np.array([{}, None], object), allow_pickle=True)
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as archive:
        name, inner = rng.choice([("a.txt", b"a"), ("o.npy", objects.getvalue()), ("b.npy", b"no array"), ("c/", b"")])
        archive.writestr(name, inner)
    return out.getvalue()


def in_packed(data: bytes, rng: random.Random) -> bytes:
    """What gzip or xz unpacks to; rarely two gigabytes of zeros."""
    packer = gzip if data.startswith(b"\x1f\x8b") else lzma
    if rng.random() < 0.08:
        return _packed_zeros(packer.compress) * 128
    return packer.compress(rng.choice(BYTES)(packer.decompress(data), rng))


@cache
def _packed_zeros(compress: Callable[[bytes], bytes]) -> bytes:
    return compress(bytes(1 << 24))


def in_header(data: bytes, rng: random.Random) -> bytes:
    """The JSON at the beginning of safetensors."""
    size = int.from_bytes(data[:8], "little")
    header = rng.choice([in_json, in_json, repeated, odd_text])(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def forged(data: bytes, rng: random.Random) -> bytes:
    """The description in the header of the sparse form; its checksum is mended, so that only later checks can tell."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    described = header["__metadata__"]
    described["prunus"] = _dumped(changed_tree(json.loads(described["prunus"]), rng))
    described["prunus_crc32"] = f"{zlib.crc32(described['prunus'].encode()):08x}"
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data[8 + size :]


def header_size(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    sizes = [0, 1, size - 1, size + 1, len(data) - 8, len(data), 10**8, 2**32, 2**63, 2**64 - 1]
    return rng.choice(sizes).to_bytes(8, "little") + data[8:]


def in_text(data: bytes, rng: random.Random) -> bytes:
    """One word of a text, such as TOML."""
    words = data.decode().split(" ")
    words[rng.randrange(len(words))] = rng.choice(["=", "[", "nan", "-1", '"', "9" * 400, "[[", "{}", "\n", "\x1b[2J"])
    return " ".join(words).encode()


def integer(data: bytes, rng: random.Random) -> bytes:
    """Four bytes of a header, as a number that is too large or wrong."""
    at = 4 * rng.randrange(max(1, min(8, len(data) // 4)))
    return (
        data[:at]
        + rng.choice([0, 1, 2**16, 2**31, 2**32 - 1]).to_bytes(4, rng.choice(["big", "little"]))
        + data[at + 4 :]
    )


def length(data: bytes, rng: random.Random) -> bytes:
    """Eight bytes somewhere near the beginning, as a length that cannot be."""
    at = rng.randrange(min(1000, len(data)))
    number = rng.choice([0, 1, len(data), 2**20, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
    return data[:at] + number.to_bytes(8, "little") + data[at + 8 :]


STRUCTURED: dict[str, list[Mutation]] = {
    ".json": [in_json, in_json, repeated, odd_text, huge],
    ".npz": [in_zip, odd_member],
    ".jsonl": [in_json_lines],
    ".metadata": [in_pickle],
    ".pickle": [in_pickle],
    ".pt": [in_torch_file, in_zip],
    ".pth": [in_torch_file, in_zip],
    ".distcp": [in_zip],
    ".safetensors": [in_header, in_header, header_size, forged],
    ".gz": [in_packed],
    ".xz": [in_packed],
    ".toml": [in_text],
    ".gguf": [integer, length, length],
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    """A link to a link that leads back."""
    other = path.with_name(f"{path.name}.link")
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def folder(path: Path) -> None:
    path.mkdir()


NO_FILES: list[Callable[[Path], None]] = [pipe, loop, folder]  # what may lie in the place of a file


def mutate(path: Path, rng: random.Random, only: str | None = None) -> str:
    """Damage a file in one way, or in two, and return their names; half of them know its format."""
    if only:
        path.write_bytes({kind.__name__: kind for kind in BYTES}[only](path.read_bytes(), rng))
        return only
    if rng.random() < 0.05:
        kind = rng.choice(NO_FILES)
        path.unlink()
        kind(path)
        return kind.__name__
    data, names = path.read_bytes(), []
    structured = STRUCTURED.get(path.suffix or path.name, [integer])
    for _ in range(rng.choice([1, 1, 1, 2])):
        kind = rng.choice(structured if rng.random() < 0.5 else BYTES)
        if not data:
            break
        try:
            data = kind(data, rng)
        except Exception:  # what was damaged before has no format any more
            kind = flip
            data = kind(data, rng)
        names.append(kind.__name__)
    path.write_bytes(data)
    return "+".join(names)
