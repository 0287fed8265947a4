"""``prunus prune`` and ``prunus shrink`` under torchrun: ranks work together, one of them speaks and writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = build("llama")
    model.save_pretrained(folder / "dense")
    np.random.default_rng(0).integers(0, model.config.vocab_size, 2000, np.uint16).tofile(folder / "tokens.u16")
    return folder


def run(*args, num=2):
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", "-m", "prunus"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*call, *map(str, args)], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize("command", [("prune",), ("shrink", "--neurons", "0.5")], ids=["prune", "shrink"])
def test_two_ranks_write_one_folder_and_speak_once(dense, tmp_path, command):
    data = ("--tokens", dense / "tokens.u16", "--samples", 6, "--length", 16, "--out", tmp_path / "out")
    done = run(*command, dense / "dense", *data)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("written") == 1 and [path.name for path in tmp_path.iterdir()] == ["out"]
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert all("perplexity" in row for row in rows.values())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if command == ("prune",):
        assert rows["repaired"]["sparsity"] == 0.5
        assert all(int((layer.mlp.down_proj.weight == 0).sum()) * 2 == layer.mlp.down_proj.weight.numel()
                   for layer in model.model.layers)  # fmt: skip


def test_what_ranks_cannot_do_is_refused_in_one_line_and_nothing_is_written(dense, tmp_path):
    data = ("--tokens", dense / "tokens.u16", "--samples", 6, "--length", 16, "--out", tmp_path / "out")
    for option in ("--tune",), ("--samples", 0):
        done = run("prune", dense / "dense", *data, *option)
        lines = [line for line in done.stderr.splitlines() if line.startswith("prunus prune:")]
        assert done.returncode != 0 and len(lines) == 1 and "Traceback (most recent" not in "".join(lines)
        assert not list(tmp_path.iterdir())
