"""Processes that save to one path at once, and a reader beside them; run as a program.

``python sparse_writers.py FOLDER WRITERS SECONDS`` prints JSON: for each way to save, how many reads found which
writer's values, whole. A mixture or an unreadable file ends it with an error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sparse_killing import Toy, save, tensors

from prunus.export import load_sparse, save_model
from prunus.files.atomic import new_folder
from prunus.files.json_file import read_json, write_json


def value_of(folder: Path) -> float:
    found = load_sparse(folder)
    value = float(found["b"][0])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(value).items()), "a mixture"
    return value


def save_folder(path: Path, value: float) -> None:
    with new_folder(path, replace=True) as part:
        write_json(part / "a.json", {"value": value})
        write_json(part / "b.json", {"value": value})


WAYS: dict[str, tuple[str, Callable[[Path, float], object], Callable[[Path], float]]] = {
    "json": ("a.json", lambda p, v: write_json(p, {"value": [v] * 500}), lambda p: read_json(p)["value"][499]),
    "tensors": ("a.safetensors", save, value_of),
    "model": ("model", lambda p, v: save_model(Toy(v), p, replace=True), value_of),
    "shards": ("shards", lambda p, v: save_model(Toy(v), p, replace=True, max_shard_bytes=2000), value_of),
    "folder": ("folder", save_folder, lambda p: read_json(p / "b.json")["value"]),
}


def race(path: Path, save: Callable, load: Callable, writers: int, seconds: float) -> dict[str, int]:
    save(path, 1.0)
    children = []
    for number in range(1, writers + 1):
        if not (child := os.fork()):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                save(path, float(number))
            os._exit(0)
        children.append(child)
    found: dict[str, int] = {}
    while children:
        value = str(load(path))
        found[value] = found.get(value, 0) + 1
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert status == 0, "a writer failed"
            children.remove(done)
    load(path)
    return found


def main(folder: Path, writers: int, seconds: float) -> None:
    torch.set_num_threads(1)
    results = {name: race(folder / file, save, load, writers, seconds) for name, (file, save, load) in WAYS.items()}
    assert {path.name for path in folder.iterdir()} == {file for file, _, _ in WAYS.values()}, "parts were left"
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
