"""A run killed anywhere and resumed ends as the run that was never interrupted, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from unbroken_run import OPTIONS, assert_same_runs

from prunus.cli import main
from prunus.lab.checkpoint import load_checkpoint

# each kills the process that runs it: before the 13th update, between two zeroings of the third
# event, with half of the third checkpoint written
KILLERS = {
    "step": """
from torch.optim.optimizer import register_optimizer_step_pre_hook
calls = []
def hook(*_):
    calls.append(1)
    if len(calls) == 13:
        die()
register_optimizer_step_pre_hook(hook)
""",
    "event": """
import prunus.pruner as training
from prunus.ops import bits
inner, update, zeroed = bits.zero_, training.Pruner.update, []
def marked(self):
    zeroed.append(0)
    update(self)
    zeroed[-1] = -10**9
def zero_(tensor, packed):
    if len(zeroed) == 3:
        zeroed[-1] += 1
        if zeroed[-1] == 7:
            die()
    inner(tensor, packed)
training.Pruner.update, bits.zero_ = marked, zero_
""",
    "checkpoint": """
inner, calls = torch.save, []
def save(state, file):
    calls.append(1)
    if len(calls) < 3:
        return inner(state, file)
    import io
    buffer = io.BytesIO()
    inner(state, buffer)
    file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    file.flush()
    die()
torch.save = save
""",
}
# a killed run and the one that resumes it, forked from one process that has loaded everything
PROGRAM = """
import os, signal, sys, torch
import torch._dynamo  # which the first optimizer of a process would load, in seconds
from small_gpt import fewer_weights
from prunus.cli import main

def die():
    os.kill(os.getpid(), signal.SIGKILL)

killer, out, *options = sys.argv[1:]
with fewer_weights():
    child = os.fork()
    if not child:
        exec(killer)
        main(["train", *options, "--out", out])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "it was not killed"
    assert not os.path.exists(os.path.join(out, "result.json"))
    main(["train", "--resume", "--out", out])
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLERS)
def test_a_run_killed_and_resumed_equals_the_unbroken_one(moment, letters, unbroken, tmp_path):
    out = tmp_path / "run"
    run = [sys.executable, "-c", PROGRAM, KILLERS[moment], str(out), *OPTIONS, "--data", str(letters)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr

    assert_same_runs(unbroken, out)
    assert json.loads((out / "result.json").read_text())["sparsity"] == 0.5


def test_a_resumed_run_refuses_an_option_that_contradicts_it(unbroken, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", "--out", str(unbroken), "--lr", "0.5"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and len(said.splitlines()) == 1 and "lr = 0.002, not 0.5" in said


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "pickle"])
def test_a_damaged_checkpoint_is_one_clear_line(damage, unbroken, tmp_path):
    path = tmp_path / "checkpoint.pt"
    whole = (unbroken / "checkpoint.pt").read_bytes()
    if damage == "foreign":
        torch.save({"model": {}}, path)
    elif damage == "pickle":
        torch.save(Path, path)
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
    with pytest.raises(ValueError, match="checkpoint") as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)
