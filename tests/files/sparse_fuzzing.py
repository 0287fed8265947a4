"""Mutations of a small file, loaded one after the other under a limit of memory; run as a program.

``python sparse_fuzzing.py FOLDER COUNT SECONDS`` prints JSON: how many loads were refused, unchanged, or another
well-formed file (only those whose checksum was forged), and stops with an error at the first that was none of these.
"""

import json
import random
import resource
import struct
import sys
import time
import zlib
from pathlib import Path

import torch

from prunus.export import load_sparse, save_sparse
from prunus.ops.bits import words_of

SPARE = 256 << 20  # bytes that a load may take beyond what the process has
NUMBERS = [-1, -(2**63), 0, 1, 2, 3, 7, 8, 9, 64, 2**31, 2**32, 2**60, 2**62, 2**63, 2**64, 10**400, 1.5, True, None]
VALUES = [
    *NUMBERS,
    "",
    "F32",
    "BF16",
    "I64",
    "U8",
    "X",
    "dense",
    "bitmask",
    "2:4",
    "1:8",
    "9:9",
    "same",
    [],
    {},
    [[]],
    "00000000",
]
KEYS = [
    "dtype",
    "shape",
    "encoding",
    "crc32",
    "as",
    "data_offsets",
    "version",
    "tensors",
    "shard",
    "metadata",
    "a",
    "b",
]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sparse, two, one = torch.randn(24, 16), torch.randn(8, 16), torch.zeros(4, 16, dtype=torch.bfloat16)
    sparse[torch.rand(sparse.shape) < 0.6] = 0
    two.view(-1, 4)[:, :2] = 0
    one[:, ::8] = 3
    found = {
        "a": sparse,
        "b": two,
        "c": one,
        "bias": torch.randn(9),
        "count": torch.tensor(7),
        "none": torch.empty(0, 2),
    }
    return found | {"tied": sparse}


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def scramble(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice([1, 7, 8, 64, 4096]))


def blank(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice([1, 4, 64, 512]))
    data[start:stop] = bytes(stop - start)


def remove(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice([1, 2, 8, 64])]


def copy(data: bytearray, rng: random.Random) -> None:
    size = rng.choice([1, 4, 32, 256])
    source, target = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    data[target : target + size] = data[source : source + size]


def exchange(data: bytearray, rng: random.Random) -> None:
    size = rng.choice([4, 32, 256])
    a, b = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def relength(data: bytearray, rng: random.Random) -> None:
    length = struct.unpack("<Q", data[:8])[0]
    choices = [0, 1, 2, length - 1, length + 1, length + 8, len(data) - 8, len(data), 10**8, 2**32, 2**63, 2**64 - 1]
    data[:8] = struct.pack("<Q", rng.choice(choices))


def entries(data: bytearray, rng: random.Random) -> None:
    """Change the header where it is no description."""
    header, rest = parse(data)
    name = rng.choice([name for name in header if name != "__metadata__"])
    match rng.randrange(6):
        case 0:
            header[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(VALUES)
        case 1:
            key = rng.choice(["shape", "data_offsets"])
            header[name][key] = [rng.choice(NUMBERS) for _ in range(rng.choice([0, 1, 2, 3, 40]))]
        case 2:
            other = rng.choice([other for other in header if other != "__metadata__"])
            header[name], header[other] = header[other], header[name]
        case 3:
            del header[rng.choice(list(header))]
        case 4:
            header[name + rng.choice([".bits", ".values", "x"])] = header.pop(name)
        case 5:
            header["__metadata__"][rng.choice(["prunus", "prunus_crc32", "format", "x"])] = rng.choice(
                ["", "prunus", "{}"]
            )
    unparse(data, json.dumps(header), rest)


def text(data: bytearray, rng: random.Random) -> None:
    """Put odd JSON into the header."""
    header, rest = parse(data)
    written = json.dumps(header)
    at = rng.randrange(len(written))
    odd = rng.choice(
        ['{"a":1,"a":2}', "NaN", "-Infinity", "[" * 10**5, "{" * 1000, '"\\ud800"', "1e999", "9" * 5000, ",", "}", "\0"]
    )
    unparse(data, written[:at] + odd + written[at:], rest)


def forged(data: bytearray, rng: random.Random) -> None:
    """Change the description and mend its checksum, so that only the checks behind it can tell."""
    header, rest = parse(data)
    meta = header["__metadata__"]
    description = json.loads(meta["prunus"])
    record = description["tensors"][rng.choice(list(description["tensors"]))]
    match rng.randrange(5):
        case 0:
            record[rng.choice(KEYS)] = rng.choice(VALUES)
        case 1:
            record["shape"] = [rng.choice(NUMBERS) for _ in range(rng.choice([0, 1, 2, 3, 40]))]
        case 2:
            description[rng.choice(KEYS)] = rng.choice(VALUES)
        case 3:
            description["tensors"][rng.choice(["a", "b", "tied", "new"])] = rng.choice([record, *VALUES])
        case 4:
            record.pop(rng.choice(list(record)))
    meta["prunus"] = json.dumps(description)
    meta["prunus_crc32"] = f"{zlib.crc32(meta['prunus'].encode()):08x}"
    unparse(data, json.dumps(header), rest)


def parse(data: bytearray) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(bytes(data[8 : 8 + length])), bytes(data[8 + length :])


def unparse(data: bytearray, header: str, rest: bytes) -> None:
    written = header.encode()
    data[:] = struct.pack("<Q", len(written)) + written + rest


MUTATIONS = [flip, scramble, truncate, extend, blank, remove, copy, exchange, relength, entries, text, forged]


def outcome(path: Path, wanted: dict[str, torch.Tensor], mutation: object) -> str:
    """What a load came to: refused, unchanged, or forged."""
    try:
        found = load_sparse(path)
    except (ValueError, OSError):
        return "refused"
    alike = found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(words_of(found[name]), words_of(tensor))
        for name, tensor in wanted.items()
    )
    if not alike and mutation is not forged:
        raise AssertionError("a damaged file gave other tensors")
    return "unchanged" if alike else "forged"


def main(folder: Path, count: int, seconds: float) -> None:
    torch.set_num_threads(1)
    wanted, path = tensors(), folder / "model.safetensors"
    save_sparse(wanted, path)
    whole = path.read_bytes()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, size + SPARE))
    counts: dict[str, int] = {}
    started = time.monotonic()
    for seed in range(count):
        rng = random.Random(seed)
        data, mutation = bytearray(whole), MUTATIONS[seed % len(MUTATIONS)]
        mutation(data, rng)
        path.write_bytes(data)
        try:
            result = outcome(path, wanted, mutation)
        except BaseException:
            print(f"seed {seed}, {mutation.__name__}", file=sys.stderr)
            raise
        counts[result] = counts.get(result, 0) + 1
        if time.monotonic() - started > seconds:
            break
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
