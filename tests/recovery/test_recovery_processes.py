"""Recoveries in processes of their own: killed and resumed to the same bits, on two ranks as on one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("run_recovery.py")


def run(how, folder, kill_at=None, ranks=1):
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    call = [*launch, str(SCRIPT), how, str(folder), *([] if kill_at is None else [str(kill_at)])]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert kill_at is not None or done.returncode == 0, done.stderr[-3000:]
    path = folder / f"{how}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@pytest.mark.slow
@pytest.mark.parametrize("ranks_how", ["ddp", "fsdp"])
def test_two_ranks_learn_what_one_does_and_go_on_after_a_kill(tmp_path, ranks_how):
    from transformers import AutoModelForCausalLM

    (tmp_path / "one").mkdir()
    one = run("one", tmp_path / "one")
    folder = tmp_path / ranks_how
    folder.mkdir()
    assert run(ranks_how, folder, kill_at=8, ranks=2) is None
    assert any((folder / "state").glob("checkpoint-*"))
    two = run(ranks_how, folder, ranks=2)
    assert two["zeros"] == two["zeros_before"] == two["num_zeros"] == one["zeros"]
    assert [point[:2] for point in two["curve"]] == [point[:2] for point in one["curve"]]
    for ours, alone in zip(two["curve"], one["curve"], strict=True):
        assert ours[2] == pytest.approx(alone[2], rel=0.02)
    assert one["after"] < one["before"]
    stored = [load_file(tmp_path / each / "out" / "model.safetensors").keys() for each in ("one", ranks_how)]
    assert stored[0] == stored[1] and "lm_head.weight" not in stored[1]  # it is tied to the embedding
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1) == one["zeros"] - _tied(model)


@pytest.mark.slow
def test_scales_of_codes_learn_on_two_ranks_what_they_learn_on_one_and_go_on_after_a_kill(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = run("one codes", tmp_path / "one")
    assert run("ddp codes", tmp_path / "two", kill_at=8, ranks=2) is None
    two = run("ddp codes", tmp_path / "two", ranks=2)
    assert one["keeps_codes"] and two["keeps_codes"] and two["zeros"] == one["zeros"] == one["zeros_before"]
    for ours, alone in zip(two["curve"], one["curve"], strict=True):
        assert ours[:2] == alone[:2] and ours[2] == pytest.approx(alone[2], rel=0.02)
    assert two["after"] < two["before"]


def _tied(model):
    """Zeros of a tied head, which a state dict holds twice and a model once."""
    return int((model.lm_head.weight == 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kills"), {"trials": (30, 61, 200), "all trials": (50, 70, 130, 200)}.items())
def test_a_run_that_is_killed_in_trials_and_after_them_ends_with_the_same_bits(tmp_path, how, kills):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(how, tmp_path / "whole")
    for step in kills:
        assert run(how, tmp_path / "killed", kill_at=step) is None
    newest = max((tmp_path / "killed" / "state").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    half = newest.with_name("checkpoint-999")  # as a kill leaves one that is being written
    shutil.copytree(newest, half)
    (half / "trainer_state.json").write_text('{"global_step": 9')
    assert run(how, tmp_path / "killed") == whole
    assert whole["zeros"] == whole["zeros_before"] and len(whole["curve"]) == 5


def test_settings_of_another_run_are_refused(tmp_path):
    sys.path.insert(0, str(SCRIPT.parent))
    from students import llama, pruned, sequences

    from prunus import recover

    teacher = llama()
    student = pruned(teacher)
    recover(student, teacher, sequences(8), steps=2, state=tmp_path, progress=False)
    before = [p.detach().clone() for p in student.parameters()]
    for change in ({"steps": 3}, {"lr": 0.1}, {"seed": 1}, {"hard": 0.5}):
        options = {"steps": 2, "progress": False, "state": tmp_path} | change
        with pytest.raises(ValueError, match="holds a run whose"):
            recover(student, teacher, sequences(8), **options)
    assert all(torch.equal(p, old) for p, old in zip(student.parameters(), before, strict=True))
