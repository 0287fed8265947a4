"""``prunus prune`` and ``prunus shrink`` that are killed anywhere and begun again end as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills forks, by hooks on their file operations")
TESTS = Path(__file__).parents[1]
KILLS = """
import json, random, sys
from pathlib import Path

import matplotlib.backends.backend_svg  # once, not in every fork
import numpy as np
import torch
from kills import Victim, at_every_change, torture
from transformers import LlamaConfig, LlamaForCausalLM

from prunus.export.huggingface import load_any_model
from prunus.trained import speed

torch.set_num_threads(1)
speed.SECONDS, speed.ROUNDS = 0.0, 1
home = Path(sys.argv[1])
torch.manual_seed(0)
size = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(**size, max_position_embeddings=32, num_key_value_heads=2)
LlamaForCausalLM(config).save_pretrained(home / "model", max_shard_size="12KB")
np.random.default_rng(0).integers(0, 40, 400).astype("<u2").tofile(home / "tokens.u16")
data = f"--tokens {home}/tokens.u16 --eval-tokens {home}/tokens.u16 --samples 4 --length 12 --eval-windows 6".split()

def args(out):
    return [*sys.argv[2].split(), str(home / "model"), *data, "--out", str(out)]

def found(out):
    result = json.loads((out / "result.json").read_text())
    tensors = load_any_model(out).state_dict()
    files = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    return result["rows"], result["layers"], {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, files

if sys.argv[3] == "anywhere":
    counts = torture("prune", Victim(args, found), home, 200, random.Random(0), goal=12)
else:
    first, step = map(int, sys.argv[3].split("/"))
    counts = at_every_change(Victim(args, found), home, first, step)
print(json.dumps(counts))
"""


def killed(tmp_path, what, where):
    pytest.importorskip("transformers")
    folders = os.pathsep.join(str(TESTS / name) for name in ("", "fuzz", "torture"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([folders, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", KILLS, str(tmp_path), what, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert not counts["differences"], counts
    assert not counts["errors"], counts["errors"]
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("what", ["prune", "prune --bits 4", "shrink --size 0.7"])
def test_killed_at_any_moment_it_goes_on_and_leaves_the_same_bits_and_nothing_else(tmp_path, what):
    counts = killed(tmp_path, what, "anywhere")
    assert counts["kills"] >= 12 and counts["inside file operations"], counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "where", "least"),
    [
        ("prune", "1/2", 40),
        ("prune", "2/2", 40),
        ("prune --no-repair --score magnitude", "1/1", 60),
        ("prune --bits 4", "2/3", 40),
    ],
)
def test_a_streamed_run_killed_before_a_change_of_a_file_and_again_leaves_the_same_bytes(tmp_path, what, where, least):
    assert killed(tmp_path, what, where)["kills"] >= least
