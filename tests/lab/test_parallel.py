"""Ranks under torchrun train as one process does, and their checkpoints outlive kills and other numbers of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from parallel_worker import KINDS, Interrupted, options, until_stop
from unbroken_run import assert_same, metrics

from prunus.cli.eval import evaluated
from prunus.doctor import examine
from prunus.eligible import eligible
from prunus.lab.checkpoint import checkpoint_of, load_checkpoint
from prunus.lab.run import Run
from prunus.lab.trainer import train
from prunus.ops import bits
from prunus.sparsity_report import report

WORKER = Path(__file__).with_name("parallel_worker.py")
BOUND = 1e-4  # of a loss between numbers of ranks: sums over ranks round differently


def torchrun(num: int, *args: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
    command += [f"--max-restarts={restarts}", *map(str, args)]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone | {"OMP_NUM_THREADS": "1"})


def state_of(path: Path, masks: bool = True) -> dict:
    """What the rest of a run depends on; without ``masks`` those in the optimizer's part are left out."""
    state = load_checkpoint(checkpoint_of(path))
    for row in state["optimizer"]["state"].values() if not masks else ():
        row.pop("mask", None)
    return {key: state[key] for key in ("step", "model", "optimizer", "pruner", "rng")} | {
        "model": dict(state["model"])
    }


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text()) | {"seconds": 0, "peak_memory": 0}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.mark.slow
def test_ranks_train_as_one_process_and_their_checkpoints_outlive_them(tmp_path):
    data = tmp_path / "text.txt"
    data.write_bytes(bytes(torch.randint(32, 127, (8000,)).tolist()))
    train(options(data, tmp_path / "alone"))
    with pytest.raises(Interrupted):
        train(options(data, tmp_path / "none"), until_stop)
    three = torchrun(3, WORKER, "three", data, tmp_path)
    assert three.returncode == 0, three.stderr
    before = {name: state_of(tmp_path / name) for name in ("none", "ddp-three", "fsdp-three")}
    two = torchrun(2, WORKER, "two", data, tmp_path, restarts=1)
    assert two.returncode == 0, two.stderr

    for kind in KINDS:
        ranks_train_as_one_process(tmp_path / "alone", tmp_path / kind)
        they_evaluate_as_one_process_to_the_bit(tmp_path / kind)
        an_interrupted_run_is_an_unbroken_one(tmp_path / kind, tmp_path / f"{kind}-broken")
        shards_put_together_are_what_ranks_hold(tmp_path / f"{kind}-sharded", tmp_path / f"{kind}-gathered.pt")
    a_job_with_a_killed_rank_restarts_itself(tmp_path, two)
    a_checkpoint_passes_unchanged_to_other_ranks(tmp_path, before)
    a_run_goes_on_with_other_ranks_or_alone(tmp_path)


def launched(log: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "prunus"]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env = alone | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return subprocess.Popen([*command, "train", *map(str, args)], stderr=file, text=True, env=env)


def wait_for_steps(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    path = folder / "metrics.jsonl"
    while process.poll() is None and not (path.is_file() and path.read_text().count('"loss"') >= number):
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks as Linux lists them")
def test_a_signal_stops_all_ranks_together_with_a_checkpoint(tmp_path):
    data, out = tmp_path / "text.txt", tmp_path / "run"
    data.write_bytes(bytes(torch.randint(32, 127, (8000,)).tolist()))
    words = (
        "--context 16 --batch 4 --steps 150 --every 10 --begin 40 --end 120 --warmup 3 --log-every 1 --eval-every 99"
    )
    options = ["--parallel", "ddp", *words.split(), "--eval-size", "8", "--save-every", "0", "--device", "cpu"]
    log, options = tmp_path / "log", [*options, "--data", data]

    to_one_rank = launched(log, *options, "--out", out)
    wait_for_steps(to_one_rank, out, 5)
    os.kill(children(to_one_rank)[-1], signal.SIGTERM)
    assert to_one_rank.wait(timeout=120) and log.read_text().count("exitcode  : 143") == 2, log.read_text()
    assert f"torchrun --nproc-per-node 2 -m prunus train --resume --out {out} --parallel ddp" in log.read_text()
    first = load_checkpoint(checkpoint_of(out))["step"]
    assert 5 <= first < 150

    to_the_agent = launched(log, "--resume", "--out", out)
    wait_for_steps(to_the_agent, out, first + 5)
    to_the_agent.send_signal(signal.SIGTERM)
    to_the_agent.wait(timeout=120)
    second = load_checkpoint(checkpoint_of(out))["step"]
    assert f"stopped by SIGTERM after step {second}, with a checkpoint" in log.read_text()
    assert first < second < 150

    assert launched(log, "--resume", "--out", out).wait(timeout=200) == 0
    assert launched(log, *options, "--out", tmp_path / "whole").wait(timeout=200) == 0
    an_interrupted_run_is_an_unbroken_one(tmp_path / "whole", out)


def ranks_train_as_one_process(alone: Path, ranks: Path) -> None:
    """Each line once, with masks and losses that differ by rounding alone; events say what they exchanged."""
    one, many = result_of(alone), result_of(ranks)
    assert many["sparsity"] == one["sparsity"] == 0.5 and many["digest"]
    assert abs(many["loss"] - one["loss"]) < BOUND
    assert all(abs(a - b) < BOUND for a, b in zip(losses(alone), losses(ranks), strict=True))
    assert [line["step"] for line in metrics(ranks)] == [line["step"] for line in metrics(alone)]
    events = [line["event"] for line in metrics(ranks) if "event" in line]
    assert events and all(0 < event["bytes_exchanged"] <= 2**20 for event in events)
    first, second = (state_of(folder)["pruner"]["masks"] for folder in (alone, ranks))
    moved = sum(int(bits.count(first[name] ^ second[name])) for name in first)
    assert moved < 1e-3 * one["num_prunable"]


def they_evaluate_as_one_process_to_the_bit(ranks: Path) -> None:
    (training, quality, step), result = evaluated(ranks / "checkpoint.pt", eval_windows=30), result_of(ranks)
    sparsity = report(training.model, eligible(training.model)).sparsity
    assert (quality.loss, quality.accuracy, sparsity, step) == (result["loss"], result["accuracy"], 0.5, 12)


def an_interrupted_run_is_an_unbroken_one(first: Path, second: Path) -> None:
    assert_same(state_of(first), state_of(second))
    assert metrics(first) == metrics(second)
    assert result_of(first) == result_of(second)


def shards_put_together_are_what_ranks_hold(sharded: Path, whole: Path) -> None:
    state = state_of(sharded, masks=False)
    assert state["step"] == 6 and state["pruner"]["masks"]
    assert_same(state_of(whole, masks=False), state)
    report = examine(sharded, allow=("dead-rows", "dead-columns"))
    assert report.is_healthy and report.kind == "distributed checkpoint"


def a_job_with_a_killed_rank_restarts_itself(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert "exitcode: -9" in done.stderr
    an_interrupted_run_is_an_unbroken_one(folder / "fsdp", folder / "killed")
    assert done.stdout.count("prunable weights are zero") == 1


def a_checkpoint_passes_unchanged_to_other_ranks(folder: Path, before: dict[str, dict]) -> None:
    for first, then in (("ddp-three", "ddp-fsdp"), ("fsdp-three", "fsdp-ddp"), ("none", "none-fsdp")):
        assert_same(before[first], state_of(folder / then))


def a_run_goes_on_with_other_ranks_or_alone(folder: Path) -> None:
    """The fsdp run of three ranks went on with two."""
    for name in ("ddp-three", "none"):
        train(Run(out=folder / name, resume=True))
    alone = result_of(folder / "alone")
    assert result_of(folder / "none") == alone
    for name in ("ddp-three", "fsdp-three"):
        result = result_of(folder / name)
        assert result["sparsity"] == 0.5 and result["steps"] == 12 and abs(result["loss"] - alone["loss"]) < BOUND
    assert not list((folder / "ddp-three").glob("checkpoint-*")), "one process leaves one file"
