"""The benchmarks of pruning after training: both sides decide the same, or no speed is reported."""

import pytest
import torch

from benchmarks import prune as bench

pytest.importorskip("transformers")
STORIES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MISTRAL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "STORIES", STORIES)
    monkeypatch.setattr(bench, "MISTRAL", MISTRAL)
    monkeypatch.setattr(bench, "VOCABULARY", 40)
    monkeypatch.setattr(bench, "LEVEL_DTYPE", torch.float32)


@pytest.fixture
def task():
    return bench.Prune(windows=3, length=12, layers=5).task()


def state_of(model):
    return [(p.detach().clone(), p.requires_grad) for p in model.parameters()]


def assert_as_before(model, before):
    for (value, flag), parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(value, parameter) and parameter.requires_grad == flag


@pytest.mark.parametrize("way", bench.WAYS)
@pytest.mark.slow
def test_both_sides_decide_the_same_and_leave_the_model_as_it_was(task, way):
    before = state_of(task.model)
    row = bench.measure_way(task, way, 1)
    assert row["different"] == 0 and row["times_fewer_operations"] > 0
    assert row["num_weights"] == sum(weight.parameter.numel() for weight in task.weights) and len(task.weights) == 5
    assert_as_before(task.model, before)


def test_the_probe_keeps_more_than_the_strategy_alone(task, monkeypatch):
    monkeypatch.setattr(bench, "TAU", 0.001)
    alone, probed = bench.one_shot_plainly(task), bench.probe_plainly(task)
    assert sum(int(mask.sum()) for mask in probed.values()) > sum(int(mask.sum()) for mask in alone.values())


def test_no_speed_is_reported_where_masks_differ():
    masks = [{"w": torch.ones(100, dtype=torch.bool)}, {"w": torch.zeros(100, dtype=torch.bool)}]
    arms = {"ours": lambda: masks[0], "plainly": lambda: masks[1]}
    with pytest.raises(RuntimeError, match="100 of 100 mask elements differ"):
        bench.compared("x", arms, 1, torch.device("cpu"))


@pytest.mark.slow
def test_the_command_leaves_a_file_that_the_page_draws(monkeypatch, measure):
    layer = bench.measure_layer
    monkeypatch.setattr(bench, "measure_layer", lambda dim, *rest: layer(64, *rest))
    rows, drawn = measure("prune --windows 2 --length 6 --layers 2 --repeat 1")
    assert [row["task"] for row in rows] == ["WANDA, 64 x 64", *bench.WAYS]
    assert "part of our probe" in drawn and f"| WANDA, 64 x 64 | {rows[0]['seconds']:.3f} |" in drawn


def test_parts_of_the_probe_add_up_and_leave_the_model_as_it_was(task):
    before = state_of(task.model)
    parts = bench.probe_parts(task)
    assert_as_before(task.model, before)
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert all(part["seconds"] > 0 for part in parts)
    head, inner = 40 * 16, 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert bench.head_share(task.model) == pytest.approx(4 * head / (4 * head + 2 * inner))


@pytest.mark.slow
def test_a_level_is_timed_by_each_schedule_and_leaves_the_model_as_it_was():
    model, tokens = bench.ProbeLevel(blocks=2, windows=2, length=6).model_and_tokens()
    before = state_of(model)
    rows = bench.measure_level(model, tokens, 0.5)
    assert [row["way"] for row in rows] == ["plainly, scaled", "block, first in its process", "block", "sequential"]
    assert rows[0]["passes"] == 2 * 7 * 2 * 2 and all(row["seconds"] > 0 for row in rows)
    assert all(0.3 < row["sparsity"] <= 0.5 for row in rows[1:])
    assert_as_before(model, before)


def test_operations_of_a_level_are_counted_by_hand():
    model, tokens = bench.ProbeLevel(blocks=2, windows=3, length=8).model_and_tokens()
    block = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48
    passes = (2 * block + 40 * 32) + (block + 40 * 32)
    assert bench.flops(model, tokens, "sequential") == 2 * 24 * (7 * 4 * passes + 2 * 2 * block)


def test_the_command_of_a_level_leaves_a_file_that_the_page_draws(measure, monkeypatch):
    rows = [{"way": "plainly, scaled", "seconds": 2.0, "passes": 8}, {"way": "block", "seconds": 1.0, "passes": 4}]
    monkeypatch.setattr(bench, "measure_level", lambda *_: rows)
    assert "| block | 1.0 | 2.0 |" in measure("level --blocks 2 --windows 2 --length 6")[1]
