"""Every program in ``examples/`` runs as its first lines say, on a CPU, without a network."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch
from pages import ROOT
from safetensors.torch import load_file

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow


def run(name, *args, launcher=()):
    command = [sys.executable, *launcher, EXAMPLES / name, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_every_program_is_in_the_contents():
    text = (EXAMPLES / "README.md").read_text()
    programs = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(programs) == 5 and [name for name in programs if f"({name})" not in text] == []


def test_the_own_loop_resumed_ends_with_the_masks_of_an_unbroken_run(tmp_path):
    said = run("own_loop.py", "--steps", 100)
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLES / "own_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, pruner = module.train(100, 0.8, tmp_path / "unbroken.pt")
    assert f"80.00% zeros, masks {pruner.digest()[:12]}" in said


def test_a_folder_is_pruned_and_saved_small():
    said = run("prune_folder.py", "--out", "small")
    assert "Result(50.0000%" in said and "every bit comes back" in said


def test_fine_tuning_keeps_the_zeros():
    said = run("finetune_sparse.py", "--steps", 4, "--out", "tuned")
    assert "50.0000% of" in said
    weights = load_file("tuned/model.safetensors")
    pruned = [weight for name, weight in weights.items() if "proj" in name]
    assert sum(int((weight == 0).sum()) for weight in pruned) == sum(weight.numel() for weight in pruned) // 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fsdp2_prunes_exactly(num_ranks):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    said = run("fsdp2.py", "--steps", 10, launcher=launcher)
    assert f"{num_ranks} ranks, 50.0000% of the prunable weights are zero" in said


def test_the_notebook_runs_and_is_a_notebook():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(isinstance(cell["outputs"], list) and re.fullmatch(r"[\w-]+", cell["id"]) for cell in cells)
    names = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    assert names["Chart"](names["curves"], names["levels"])._repr_svg_().startswith("<svg")
    assert isinstance(names["sparse"], torch.nn.Module)
