"""Saves killed at every write, flush and move; run as a program, which prints what was left each time.

Each save runs in a process of its own, which kills itself, for real, at its k-th moment.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from prunus.export import load_sparse, save_model, save_sparse
from prunus.files.writer import UnfinishedFile
from prunus.grids import OnGrid, put_on_grid_
from prunus.ops.grid import Grid

GRID = Grid(4)


class Toy(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        for name, tensor in tensors(value).items():
            self.register_parameter(name, nn.Parameter(tensor))
        for name, on_grid in grids(value).items():
            put_on_grid_(self, name, on_grid)


def tensors(value: float) -> dict[str, torch.Tensor]:
    """Equal shapes for each value, so that files of two saves look alike."""
    sparse = torch.full((64, 64), value)
    sparse[::2, ::3] = 0
    half = torch.full((30, 30), value, dtype=torch.bfloat16)
    return {"a": sparse, "b": torch.full((1000,), value), "c": half, "d": sparse.bfloat16() / 2}


def grids(value: float) -> dict[str, OnGrid]:
    return {"d": OnGrid(GRID, torch.full((64, 1), value))}


def save(path: Path, value: float, **options: int) -> None:
    save_sparse(tensors(value), path, grids=grids(value), **options)


def killing(moment: int, begin: Callable[[], object]) -> bool:
    """Whether a save in a process of its own was killed at its ``moment``-th write, flush or move."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [moment]

    def counted(function: Callable) -> Callable:
        def call(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.fsync, Path.replace = counted(os.fsync), counted(Path.replace)
    UnfinishedFile.add = counted(UnfinishedFile.add)
    begin()
    os._exit(0)


def left_behind(path: Path) -> str:
    """Which save ``path`` holds whole, or that it is refused, or not there."""
    if not path.exists():
        return "nothing"
    try:
        found = load_sparse(path)
    except ValueError:
        return "refused"
    for value in (1.0, 2.0):
        if all(torch.equal(found[name], tensor) for name, tensor in tensors(value).items()):
            return {1.0: "old", 2.0: "new"}[value]
    return "a mixture"


def every_moment(folder: Path, path: Path, begin: Callable[[], object], before: Callable[[], object]) -> list[str]:
    found = []
    for moment in range(1, 1000):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        before()
        killed = killing(moment, begin)
        found.append(left_behind(path))
        if not killed:
            save(folder / "later.safetensors", 1.0)  # what was left is in nobody's way
            return found
    raise AssertionError("the save never ended")


def at_any_time(path: Path, seconds: float) -> list[str]:
    """Kill, from outside, a process that saves without end."""
    found, rng, end = [], random.Random(0), time.monotonic() + seconds
    save(path, 1.0)
    while time.monotonic() < end:
        child = os.fork()
        if not child:
            for i in range(10**6):
                save(path, float(1 + i % 2))
            os._exit(1)
        time.sleep(rng.uniform(0.005, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.append(left_behind(path))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    path = folder / "model.safetensors"

    def old() -> None:
        save(path, 1.0)

    results = {
        "file": every_moment(folder, path, lambda: save(path, 2.0), old),
        "files": every_moment(folder, folder, lambda: save(path, 2.0, max_shard_bytes=2000), lambda: None),
        "folder": every_moment(folder, folder / "new", lambda: save_model(Toy(2.0), folder / "new"), lambda: None),
        "any time": at_any_time(folder / "busy.safetensors", 2.0),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
