"""The run that tests interrupt, kill and resume, and what must be equal in the end."""

import json
from pathlib import Path

import torch

from prunus.lab.checkpoint import load_checkpoint

OPTIONS = (
    "--model gpt2-tiny --context 16 --batch 4 --steps 20 --every 3 --begin 4 --end 16 --eval-every 10 --eval-size 4 "
    "--save-every 5 --log-every 1 --warmup 3"
).split()


def assert_same_runs(first: Path, second: Path) -> None:
    one, other = load_checkpoint(first / "checkpoint.pt"), load_checkpoint(second / "checkpoint.pt")
    for key in ("step", "model", "optimizer", "pruner", "rng"):
        assert_same(one[key], other[key], key)
    assert metrics(first) == metrics(second)
    own = {"seconds": 0, "peak_memory": 0}
    results = [json.loads((folder / "result.json").read_text()) | own for folder in (first, second)]
    assert results[0] == results[1]


def assert_same(a: object, b: object, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    else:
        assert a == b, where


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("event", {}).pop("seconds", None)
    return lines
