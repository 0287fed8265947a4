"""The benchmarks of pruning after training: both sides decide the same, or no speed is reported."""

from contextlib import contextmanager

import pytest
import torch

from benchmarks import prune as bench
from benchmarks.benchmark import random_llama

pytest.importorskip("transformers")


@pytest.fixture
def task(small_llama):
    return bench.Prune(
        checkpoint=small_llama, calibration=small_llama / "calib.u16", windows=3, length=12, layers=5
    ).task()


@pytest.fixture
def level(small_shape):
    """A random model of two blocks and its tokens."""
    return random_llama(small_shape, 2, (3, 8), torch.device("cpu"))


@contextmanager
def left_as_it_was(model):
    before = [(parameter.detach().clone(), parameter.requires_grad) for parameter in model.parameters()]
    yield
    for (value, flag), parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(value, parameter) and parameter.requires_grad == flag


@pytest.mark.parametrize("way", bench.WAYS)
@pytest.mark.slow
def test_both_sides_decide_the_same_and_leave_the_model_as_it_was(task, way):
    with left_as_it_was(task.model):
        row = bench.measure_way(task, way, 1)
    assert row["different"] == 0 and row["times_fewer_operations"] > 0
    assert row["num_weights"] == sum(weight.parameter.numel() for weight in task.weights) and len(task.weights) == 5


def test_the_probe_keeps_more_than_the_strategy_alone(task, monkeypatch):
    monkeypatch.setattr(bench, "TAU", 0.001)
    alone, probed = bench.one_shot_plainly(task), bench.probe_plainly(task)
    assert sum(int(mask.sum()) for mask in probed.values()) > sum(int(mask.sum()) for mask in alone.values())


def test_no_speed_is_reported_where_masks_differ():
    sides = [lambda: {"w": torch.ones(100)}, lambda: {"w": torch.zeros(100)}]
    with pytest.raises(RuntimeError, match="100 of 100 mask elements differ, so no speed is reported"):
        bench.compared("x", sides, 1, torch.device("cpu"))


@pytest.mark.slow
def test_the_command_leaves_a_file_that_the_page_draws(monkeypatch, measure, small_llama):
    layer = bench.measure_layer
    monkeypatch.setattr(bench, "measure_layer", lambda dim, *rest: layer(64, *rest))
    files = ("--checkpoint", small_llama, "--calibration", small_llama / "calib.u16")
    rows, drawn = measure("prune --windows 2 --length 6 --layers 2 --repeat 1", *files)
    assert [row["task"] for row in rows] == ["WANDA, 64 x 64", *bench.WAYS]
    assert "part of our probe" in drawn and f"| WANDA, 64 x 64 | {rows[0]['seconds']:.3f} |" in drawn


def test_parts_of_the_probe_add_up_and_leave_the_model_as_it_was(task):
    with left_as_it_was(task.model):
        parts = bench.probe_parts(task)
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert all(part["seconds"] > 0 for part in parts)
    head, inner = 40 * 16, 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24
    assert bench.head_share(task.model) == pytest.approx(4 * head / (4 * head + 2 * inner))


@pytest.mark.slow
def test_a_level_is_timed_by_each_schedule_has_its_operations_counted_and_leaves_the_model_as_it_was(level):
    model, tokens = level
    with left_as_it_was(model):
        rows = bench.measure_level(model, tokens)
    assert [row["way"] for row in rows] == ["plainly, scaled", "block, first in its process", "block", "sequential"]
    assert rows[0]["passes"] == 2 * 7 * 2 * 3 and all(row["seconds"] > 0 for row in rows)
    assert all(0.3 < row["sparsity"] <= 0.5 for row in rows[1:])
    block = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48
    passes = (2 * block + 40 * 32) + (block + 40 * 32)
    assert bench.flops(model, tokens, "sequential") == 2 * 24 * (7 * 4 * passes + 2 * 2 * block)


def test_the_command_of_a_level_leaves_a_file_that_the_page_draws(measure, monkeypatch, small_shape):
    monkeypatch.setattr(bench, "MISTRAL", small_shape)
    rows = [{"way": "plainly, scaled", "seconds": 2.0, "passes": 8}, {"way": "block", "seconds": 1.0, "passes": 4}]
    monkeypatch.setattr(bench, "measure_level", lambda *_: rows)
    assert "| block | 1.0 | 2.0 |" in measure("level --blocks 2 --windows 2 --length 6")[1]
