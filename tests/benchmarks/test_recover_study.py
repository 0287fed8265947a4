"""The study of recovery: small models go the same way, a killed study continues, and the page draws the records."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import learning
from benchmarks import recover_study as study
from benchmarks.__main__ import main
from benchmarks.recover_figures import GOALS, above, parts, read_figures
from prunus.lab.data.batches import token_data
from prunus.lab.run import Run
from prunus.lab.trainer import train

pytest.importorskip("accelerate")
SIZES = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--device", "cpu"]


@pytest.fixture
def runs(tmp_path):
    """A dense run and a pruned one of a tiny GPT, as options."""
    sizes = {"model": "gpt2-tiny", "width": 32, "layers": 1, "context": 16, "steps": 2, "batch": 4, "eval_size": 8}
    for name, score in (("dense-0", "none"), ("pruned-0", "magnitude")):
        train(Run(**sizes, score=score, sparsity=0.8, out=tmp_path / name))
    models = ["--model", str(tmp_path / "dense-{seed}"), "--pruned", str(tmp_path / "pruned-{seed}"), "--seeds", "0"]
    return [*models, *SIZES, "--name", "GPT-51M", "--results", str(tmp_path / "results")]


@pytest.mark.slow
def test_a_killed_study_continues_and_zeros_are_where_they_were(runs, tmp_path, kill_recovery, records):
    ways = ["control", "recover", "hard", "magnitude-recover", "trained-recover"]
    command = ["recover-study", *runs, "--levels", "80", "--steps", "3", "2", "--ways", *ways]
    kill_recovery(4)
    with pytest.raises(SystemExit):
        main(command)
    before = records()
    assert [row["way"] for row in before] == ["dense", "control", "control", "repair", "recover"]
    main(command)
    rows = records()
    assert rows[:5] == before and len({(row["way"], row["level"], row["steps"]) for row in rows}) == len(rows) == 4 + 10
    for row in (row for row in rows if row["steps"]):
        assert row["zeros"] == row["zeros_before"] and len(row["curve"]) >= 3 and row["lr_reason"]
    assert all(abs(row["zeros"] - 0.8 * row["num_weights"]) < 1 for row in rows if row["level"])
    drawn = parts(tmp_path / "results")
    assert "equal in number and place in 10 of 10 runs" in drawn["models"] and "2 steps: " in drawn["budgets"]


def test_a_model_of_transformers_learns_from_token_files(llama, records):
    main(["recover-study", *llama, "--levels", "50", "--steps", "2", "--ways", "recover"])
    assert [row["way"] for row in records()] == ["dense", "repair", "recover"]


def test_images_learn_from_crops_and_flips(small_images, tmp_path, records):
    command = ["recover-study", *small_images, *SIZES]
    command += ["--levels", "80", "--seeds", "0", "--steps", "2", "--ways", "magnitude-recover"]
    main([*command, "--results", str(tmp_path / "results")])
    dense, start, row = records()
    assert dense["metric"] == "accuracy" and row["zeros"] == start["zeros"]


def test_held_out_windows_follow_the_evaluated_ones_and_batches_depend_on_the_seed():
    tokens = np.arange(2000, dtype=np.uint16)
    data = token_data(tokens, tokens, 8, None)
    make, held_out = learning.run_batches(data, 100, 4, seed=1)
    assert torch.equal(torch.cat([x for x, _ in held_out])[:, 0], 8 * torch.arange(100, 108))
    other, _ = learning.run_batches(data, 100, 4, seed=2)
    assert torch.equal(make(3)[0], make(3)[0]) and not torch.equal(make(3)[0], other(3)[0])


# The page


@pytest.fixture
def write(write_study):
    def rows(row):
        return {"zeros": 8, "num_weights": 10} | ({"zeros_before": 8} if row["steps"] else {})

    return partial(write_study, study.WHAT, row=rows)


def test_each_student_is_compared_with_the_dense_model_of_its_seed(write, tmp_path):
    write({("dense", "", 0, 0): 50.0, ("dense", "", 0, 1): 60.0})
    write({("recover", "80", 9, 0): 51.0, ("recover", "80", 9, 1): 60.6}, name="b")
    (model,) = read_figures(tmp_path)
    assert above(model, "recover", "80") == pytest.approx(0.015)
    goals = parts(tmp_path)["goals"]
    assert "+1.5% | +1.8% | met |" in goals and goals.count("**not measured**") == len(GOALS) - 1


def test_goals_are_missed_by_shares_and_points(write, tmp_path):
    write({("dense", "", 0, 0): 50.0, ("repair", "50", 0, 0): 52.0, ("recover", "50", 9, 0): 51.0})
    images = {("dense", "", 0, 0): 0.92, ("recover", "80", 9, 0): 0.9}
    write(images, model="ResNet-20", metric="accuracy", name="b")
    text = {("dense", "", 0, 0): 38.0, ("recover", "70", 9, 0): 55.0}
    write(text, model="SmolLM2-135M", name="c")
    goals = parts(tmp_path)["goals"]
    assert "| 52.00 | +4.0% | 51.00 | +2.0% | +0.2% | **missed by 1.8 points** |" in goals
    assert "-2.00 points | 91.3% | **missed by 1.3 points** |" in goals and "| 50 | **missed by 10.0%** |" in goals


def test_the_longest_runs_stand_in_the_tables_and_shorter_ones_beside_them(write, tmp_path):
    values = {("dense", "", 0, 0): 50.0, ("control", "", 9, 0): 48.0, ("repair", "80", 0, 0): 60.0}
    values |= {("recover", "80", steps, 0): value for steps, value in ((3, 58.0), (9, 52.0), (27, 51.0))}
    write(values | {("hard", "80", 27, 0): 50.49})
    drawn = parts(tmp_path)
    assert "| repaired, recovered | 51.00 | 27 | 0.001 | 2.0 |" in drawn["models"]
    assert "| GPT-51M, 80 % | 60.00 | 3 steps: 58.00; 9 steps: 52.00; 27 steps: 51.00 |" in drawn["budgets"]
    assert "| dense, trained on by cross-entropy | +5.88 |" in drawn["choices"] and "| +1.00 |" in drawn["choices"]
    assert drawn["curves"].count("7.389") == 2 * 8
