"""Signals and damage: a run that was stopped, or lost its last checkpoint, ends as one that was not."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from unbroken_run import OPTIONS, assert_same_runs

from prunus.cli import main
from prunus.lab import trainer
from prunus.lab.checkpoint import load_checkpoint
from prunus.lab.interruption import SIGNALS, SignalWatch
from prunus.lab.parallel import Team
from prunus.lab.run import read_run
from prunus.lab.tracking import Tracker
from prunus.lab.trainer import Training

small = pytest.mark.usefixtures("few_weights")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


@small
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(unbroken, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    (out / "result.json").unlink()
    assert load_checkpoint(out / "checkpoint.previous.pt")["step"] == 15
    last = out / "checkpoint.pt"
    flip(last, last.stat().st_size // 2)
    for command in (["eval", str(out)], ["export", str(out), "--out", str(tmp_path / "model")]):
        with pytest.raises(SystemExit):
            main(command)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "checksum" in said and "the one before it is checkpoint.previous.pt" in said
    main(["train", "--resume", "--out", str(out)])
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1 and said[0].endswith("the run continues from checkpoint.previous.pt, step 15")
    assert_same_runs(unbroken, out)
    assert (out / "damaged-checkpoint.pt").is_file()

    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        flip(out / name, last.stat().st_size // 2)
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", str(out)])
    assert "checkpoint.pt is damaged" in capsys.readouterr().err


FLIPPED = {"steps": 30, "lr": 0.003, "seed": 1, "sparsity": 0.25, "rate_power": 0.0, "only": ["*.qkv.*"]}


@small
@pytest.mark.parametrize("field", FLIPPED)
def test_a_run_json_that_is_not_that_of_the_checkpoint_is_refused_by_its_field(field, unbroken, tmp_path, capsys):
    out = Path(shutil.copytree(unbroken, tmp_path / "run"))
    values = json.loads((out / "run.json").read_text())
    main(["eval", str(out)])
    evaluated = capsys.readouterr().out
    values["run"][field] = FLIPPED[field]
    (out / "run.json").write_text(json.dumps(values))
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", str(out)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"says {field} = {FLIPPED[field]}, but checkpoint.pt" in said
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    main(["eval", str(out)])  # by the recipe in the checkpoint, which has a checksum
    assert capsys.readouterr().out == evaluated


@small
def test_a_run_goes_on_in_another_place_on_another_device(unbroken, tmp_path):
    out = Path(shutil.copytree(unbroken, tmp_path / "moved"))
    values = json.loads((out / "run.json").read_text())
    values["run"]["device"] = "cpu"
    (out / "run.json").write_text(json.dumps(values))
    main(["train", "--resume", "--out", str(out)])
    assert_same_runs(unbroken, out)


@small
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_to_the_same_end(
    signum, code, letters, unbroken, tmp_path, monkeypatch, capsys
):
    out, step = tmp_path / "run", Training.train_step

    def train_step(training):
        if training.step == 7:
            os.kill(os.getpid(), signum)
        return step(training)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stop:
        patched.setattr(Training, "train_step", train_step)
        main(["train", *OPTIONS, "--data", str(letters), "--out", str(out)])
    assert stop.value.code == code and load_checkpoint(out / "checkpoint.pt")["step"] == 8
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    said = capsys.readouterr().err.splitlines()[-1]
    assert "after step 8" in said and said.endswith(f"continue it by prunus train --resume --out {out}")
    main(["train", "--resume", "--out", str(out)])
    assert_same_runs(unbroken, out)


@small
def test_an_interrupted_study_says_the_command_that_continues_it(base, tmp_path, monkeypatch, capsys):
    step, command = (
        Training.train_step,
        ["study", "--base", str(base), "--seeds", "1", "--out", str(tmp_path / "study")],
    )

    def train_step(training):
        if training.run.score == "magnitude":
            os.kill(os.getpid(), signal.SIGINT)
        return step(training)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stop:
        patched.setattr(Training, "train_step", train_step)
        main(command)
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 130
    assert said == f"prunus study: interrupted; the same command continues: {shlex.join(['prunus', *command])}"
    assert load_checkpoint(tmp_path / "study" / "runs" / "magnitude-0.5-s0" / "checkpoint.pt")["step"] == 2
    main(command)
    assert "3 of 3 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "continues"),
    [
        (["study", "--out", "x"], True),
        (["demo", "--out", "x"], True),
        (["study", "show", "x"], False),
        (["prune", "model", "--out", "x"], True),
        (["prune", "model", "--no-repair"], False),
        (["prune", "model", "--probe", "block"], False),
        (["export", "x"], False),
    ],
    ids=str,
)
def test_only_what_continues_is_said_to(args, continues, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("prunus.cli._parse", interrupted)
    with pytest.raises(SystemExit):
        main(args)
    said = capsys.readouterr().err
    assert said.endswith(f": prunus {shlex.join(args)}\n" if continues else f"prunus {args[0]}: interrupted\n")


@small
def test_a_second_interrupt_does_not_wait(letters, tmp_path, monkeypatch):
    def train_step(training):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Training, "train_step", train_step)
    with pytest.raises(SystemExit) as stop:
        main(["train", *OPTIONS, "--data", str(letters), "--out", str(tmp_path / "run")])
    assert stop.value.code == 130 and not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.slow
def test_a_process_stopped_by_a_signal_goes_on_to_the_same_end(letters, tmp_path):
    out, unbroken = tmp_path / "run", tmp_path / "unbroken"
    command = ["train", *OPTIONS, "--data", str(letters), "--out"]
    main([*command, str(unbroken)])
    process = subprocess.Popen([sys.executable, "-m", "prunus", *command, str(out)], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.05)
    while process.poll() is None and '"loss"' not in (out / "metrics.jsonl").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and f"prunus train --resume --out {out}" in said
    assert 0 < load_checkpoint(out / "checkpoint.pt")["step"] < 20
    main(["train", "--resume", "--out", str(out)])
    assert_same_runs(unbroken, out)


@small
def test_a_kill_while_metrics_are_cut_back_loses_no_line(unbroken, tmp_path, monkeypatch):
    shutil.copytree(unbroken, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = replace(read_run(unbroken), out=tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(os, "fsync", lambda fd: 1 / 0)
        Tracker.open(run, 10)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"loss"')
    Tracker.open(run, 10)
    kept = [line for line in before.splitlines() if json.loads(line)["step"] <= 10]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines() == kept


@small
def test_metrics_are_on_the_disk_before_the_checkpoint_that_relies_on_them(letters, tmp_path, monkeypatch):
    order: list[str] = []
    fsync, save = os.fsync, trainer.save

    def synced(fd: int) -> None:
        order.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(trainer, "save", lambda *args: (order.append("save"), save(*args)))
    options = ["--steps", "2", "--begin", "1", "--end", "2", "--save-every", "1", "--warmup", "1"]
    main(["train", *OPTIONS, *options, "--data", str(letters), "--out", str(tmp_path / "run")])
    places = [i for i, name in enumerate(order) if name == "save"]
    assert len(places) == 2 and all(order[i - 1] == "metrics.jsonl" for i in places)


def test_signals_that_are_ignored_or_handled_in_c_are_left_alone(monkeypatch):
    before = {s: signal.getsignal(s) for s in SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what it runs in the background
        with SignalWatch(Team()):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
        monkeypatch.setattr(signal, "getsignal", lambda _: None)
        with SignalWatch(Team()) as watch:
            assert not watch.before
    finally:
        monkeypatch.undo()
        for signum, handler in before.items():
            signal.signal(signum, handler)
