"""Trackers get what metrics.jsonl gets, and a missing one is one line before anything is written."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from prunus.cli import main
from prunus.lab.run import Run
from prunus.lab.tracking import commit, flat

FAST = (
    "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --eval-every 3 --log-every 1 --warmup 1"
)


def trained(tmp_path: Path, *trackers: str) -> list[tuple[int, dict[str, float]]]:
    """Train with trackers; steps and numbers of metrics.jsonl."""
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    out = tmp_path / "run"
    main(["train", *FAST.split(), "--data", str(tmp_path / "text.txt"), "--out", str(out), "--track", *trackers])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], numbers) for line in lines if (numbers := flat(line))]


def test_a_process_has_the_commit_that_it_began_with(monkeypatch):
    commit.cache_clear()
    try:
        for now in ("first", "second"):
            monkeypatch.setenv("PRUNUS_COMMIT", now)
            assert commit() == "first"
    finally:
        commit.cache_clear()


@pytest.mark.slow
def test_tensorboard_and_wandb_offline_hold_the_same_metrics(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'prunus[wandb]'")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = trained(tmp_path, "wandb,tensorboard")
    assert {"loss", "eval/perplexity", "event/sparsity", "sparsity"} <= {name for _, got in logged for name in got}

    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for name in board.Tags()["scalars"]:
        expected = [(step, pytest.approx(got[name], rel=1e-6)) for step, got in logged if name in got]
        assert [(one.step, one.value) for one in board.Scalars(name)] == expected

    log = next((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    losses = [repr(got["loss"]).encode() for _, got in logged if "loss" in got]
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(loss in log.read_bytes() for loss in losses):
        time.sleep(0.1)  # a process of wandb's own writes it
    assert len(losses) == 6 and all(loss in log.read_bytes() for loss in losses)


def test_trackio_holds_the_same_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when it is imported
    pytest.importorskip("trackio", reason="needs trackio: pip install 'prunus[trackio]'")
    logged = trained(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "prunus.db") as base:
        rows = base.execute("select step, metrics from metrics order by id").fetchall()
    assert [(step, json.loads(metrics)) for step, metrics in rows] == logged


def test_numbers_are_named_by_their_place():
    line = {"step": 3, "loss": 1.5, "eval": {"loss": 2}, "zeros": [1, 2], "layers": {"a": 4}, "name": "x", "flag": True}
    assert flat(line) == {"loss": 1.5, "eval/loss": 2}


def test_names_are_given_apart_or_with_commas_each_counts_once_and_they_are_part_of_the_run():
    run = Run(track=("wandb,tensorboard", "trackio", "wandb"))
    assert run.track == ("wandb", "tensorboard", "trackio")
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize(("tracker", "said"), [("neptune", "wandb, tensorboard, trackio"), ("wandb", "prunus[wandb]")])
def test_a_tracker_that_is_not_there_is_one_line_and_nothing_is_written(tracker, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("prunus.lab.tracking.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        trained(tmp_path, tracker)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wandb_without_an_account_is_one_line_and_the_folder_can_be_used_again(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'prunus[wandb]'")

    def refuse(**options: object) -> None:
        (Path(str(options["dir"])) / "wandb").mkdir()
        raise wandb.errors.UsageError("no key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SystemExit):
        trained(tmp_path, "wandb")
    assert "WANDB_MODE=offline" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
