"""The benchmarks of keeping masks: every arm runs at a small size, and the page draws it."""

import json

import pytest
import torch

from benchmarks import step
from benchmarks.__main__ import main
from benchmarks.benchmark import write_record
from benchmarks.page import tables
from benchmarks.step import ARMS, MASKED, TRAINED, WITH_RATES, StepCost, check_agrees, measure_updates

CPU = torch.device("cpu")


def rows_of(command, results):
    main([*command.split(), "--results", str(results)])
    (path,) = results.iterdir()
    return json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_a_training_step_is_measured_in_every_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "CONTEXT", 8)
    rows = rows_of("step --model gpt2-tiny --tokens 8 --repeat 1", tmp_path)
    assert [row["arm"] for row in rows] == [*ARMS, *ARMS]
    assert all(row["ms"] > 0 for row in rows) and all(
        f"| {name} |" in "".join(tables(tmp_path).values()) for name in ARMS
    )


@pytest.mark.slow
def test_a_whole_training_is_measured_in_every_arm(tmp_path):
    options = "--model gpt2-tiny --context 8 --batch 1 --no-compile --precision float32 --repeat 1 --every 1"
    rows = rows_of(f"train {options}", tmp_path)
    assert [row["arm"] for row in rows] == list(TRAINED)
    assert rows[0]["sparsity"] == 0 and all(row["sparsity"] > 0.4 for row in rows[1:])
    assert all(f"| {name} |" in tables(tmp_path)["train"] for name in TRAINED)


def test_the_step_with_factors_on_learning_rates_is_held_against_the_masked_one(tmp_path):
    rows = measure_updates(StepCost(layers=2, dim=16, repeat=2), CPU)
    names = [row["way"] for row in rows]
    assert names.index(WITH_RATES) == names.index(MASKED) + 1
    assert [row["way"] for row in rows if "overhead" in row] == [WITH_RATES]
    settings = {"sparsity": 0.5, "repeat": 2, "weights": "2 weights of 16 x 16", "num_weights": 512}
    write_record("update", settings, rows, tmp_path)
    assert f"| {rows[names.index(WITH_RATES)]['overhead']:+.2%} |" in tables(tmp_path)["update"]


def test_no_speed_is_reported_where_the_step_is_not_that_of_torch(monkeypatch):
    assert check_agrees(16, CPU) < 8
    monkeypatch.setattr(step, "AdamWPrune", torch.optim.SGD)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        check_agrees(16, CPU)
