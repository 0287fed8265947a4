"""Ranks under torchrun train as one process does, and their checkpoints outlive kills and other numbers of ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import KINDS, Interrupted, options, until_stop
from test_killed import assert_same, metrics

from prunus.lab.checkpoint import checkpoint_of, load_checkpoint
from prunus.lab.run import Run
from prunus.lab.trainer import evaluated, train

WORKER = Path(__file__).with_name("parallel_worker.py")
BOUND = 1e-4  # of a loss between numbers of ranks: sums over ranks round differently


def torchrun(num: int, *args: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
    command += [f"--max-restarts={restarts}", *map(str, args)]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(bytes(torch.randint(32, 127, (8000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of one, two, three and four ranks, unbroken, interrupted and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(Interrupted):
        train(options(data, folder / "one"), until_stop)
    train(options(data, folder / "alone"))
    for num, job in ((4, "four"), (2, "two"), (3, "three")):
        done = torchrun(num, WORKER, job, data, folder)
        assert done.returncode == 0, done.stderr
        if job == "four":
            for name in ("one", "ddp4", "fsdp4"):
                shutil.copytree(folder / name, folder / "before" / name)
    return folder


def state_of(path: Path) -> dict:
    state = load_checkpoint(checkpoint_of(path))
    return {key: state[key] for key in ("step", "model", "optimizer", "pruner", "rng")} | {
        "model": dict(state["model"])
    }


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text()) | {"seconds": 0}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_the_masks_of_one_process(kind, runs):
    one, two = result_of(runs / "alone"), result_of(runs / f"{kind}2")
    assert two["digest"] == one["digest"] and two["sparsity"] == 0.5
    assert abs(two["loss"] - one["loss"]) < BOUND
    pairs = zip(losses(runs / "alone"), losses(runs / f"{kind}2"), strict=True)
    assert all(abs(a - b) < BOUND for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_and_events_are_logged_once_with_what_they_exchanged(kind, runs):
    lines, alone = metrics(runs / f"{kind}2"), metrics(runs / "alone")
    assert [line["step"] for line in lines] == [line["step"] for line in alone]
    events = [line["event"] for line in lines if "event" in line]
    assert events and all(0 < event["bytes_exchanged"] <= 2**20 for event in events)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_over_ranks_is_that_of_one_process_to_the_bit(kind, runs):
    quality, report, step = evaluated(runs / f"{kind}2" / "checkpoint.pt", eval_size=60)
    result = result_of(runs / f"{kind}2")
    assert (quality.loss, quality.accuracy, report.sparsity, step) == (result["loss"], result["accuracy"], 0.5, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_ends_as_the_unbroken_one_on_as_many_ranks(kind, runs):
    assert_same(state_of(runs / f"{kind}2"), state_of(runs / f"{kind}2-broken"))
    assert metrics(runs / f"{kind}2") == metrics(runs / f"{kind}2-broken")
    assert result_of(runs / f"{kind}2") == result_of(runs / f"{kind}2-broken")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_put_together_are_what_the_ranks_hold(kind, runs):
    whole, pieces = state_of(runs / f"{kind}2-gathered.pt"), state_of(runs / f"{kind}2-saved")
    for state in (whole, pieces):
        for row in state["optimizer"]["state"].values():
            row.pop("mask", None)
    assert pieces["step"] == 10 and pieces["pruner"]["masks"]
    assert_same(whole, pieces)


@pytest.mark.parametrize(
    ("first", "then"),
    [("ddp4", "ddp4-fsdp3"), ("fsdp4", "fsdp4-ddp3"), ("fsdp4", "fsdp4-fsdp2"), ("one", "one-fsdp2")],
)
def test_a_checkpoint_passes_unchanged_to_another_number_of_ranks(first, then, runs):
    assert_same(state_of(runs / "before" / first), state_of(runs / then))


def test_a_run_goes_on_with_other_ranks_or_alone(runs, tmp_path):
    shutil.copytree(runs / "ddp4", tmp_path / "run")
    train(Run(out=tmp_path / "run", resume=True))
    alone = result_of(runs / "alone")
    for result in (result_of(tmp_path / "run"), result_of(runs / "fsdp4")):
        assert result["sparsity"] == 0.5 and result["steps"] == 20
        assert abs(result["loss"] - alone["loss"]) < BOUND
    assert not list((tmp_path / "run").glob("checkpoint-*")) and (tmp_path / "run" / "checkpoint.pt").is_file()


def test_a_job_with_a_killed_rank_restarts_itself_and_ends_as_if_nothing_had_been(data, runs, tmp_path):
    done = torchrun(2, WORKER, "kill", data, tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert_same(state_of(runs / "fsdp2"), state_of(tmp_path / "killed"))
    assert metrics(runs / "fsdp2") == metrics(tmp_path / "killed")
    assert result_of(runs / "fsdp2") == result_of(tmp_path / "killed")
    assert done.stdout.count("prunable weights are zero") == 1
