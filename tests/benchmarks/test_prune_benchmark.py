"""The benchmark of pruning after training: both sides decide the same, or no speed is reported."""

import json

import pytest
import torch

from benchmarks import prune as bench
from benchmarks.__main__ import main
from benchmarks.page import page

pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(bench, "SHAPE", SMALL)
    monkeypatch.setattr(bench, "VOCABULARY", 40)
    return bench.Command(windows=3, length=12, layers=5).task()


@pytest.mark.parametrize("way", bench.WAYS)
def test_both_sides_decide_the_same_and_leave_the_model_as_it_was(task, way):
    before = [(p.detach().clone(), p.requires_grad) for p in task.model.parameters()]
    masks = [bench.timed_way(task, side)[1] for side in bench.WAYS[way]]
    assert list(masks[0]) == list(masks[1]) and len(masks[0]) == 5
    assert all(torch.equal(masks[0][name], mask) for name, mask in masks[1].items())
    for (value, flag), parameter in zip(before, task.model.parameters(), strict=True):
        assert torch.equal(value, parameter) and parameter.requires_grad == flag


def test_the_probe_keeps_more_than_the_strategy_alone(task, monkeypatch):
    monkeypatch.setattr(bench, "TAU", 0.001)
    alone, probed = bench.one_shot_plainly(task), bench.probe_plainly(task)
    assert sum(int(mask.sum()) for mask in probed.values()) > sum(int(mask.sum()) for mask in alone.values())


def test_no_speed_is_reported_where_masks_differ():
    masks = [{"w": torch.ones(100, dtype=torch.bool)}, {"w": torch.zeros(100, dtype=torch.bool)}]
    with pytest.raises(RuntimeError, match="100 of 100 mask elements differ"):
        bench.row_of("x", [1.0, 2.0], masks, [1, 1])


def test_the_command_leaves_a_file_that_the_page_draws(task, monkeypatch, tmp_path, capsys):
    row = bench.row_of("WANDA, 4096 x 4096", [1.0, 7.0], [{"w": torch.ones(4)}] * 2, [0, 0])
    monkeypatch.setattr(bench, "_layer", lambda *_: row)
    options = "--windows 3 --length 12 --layers 4 --repeat 1".split()
    main(["prune", *options, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("prune_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [each["different"] for each in rows] == [0, 0, 0] and rows[2]["times_fewer_operations"] > 0
    drawn = page(tmp_path)
    assert "part of our probe" in drawn and "| WANDA, 4096 x 4096 | 1.000 | 7.000 | 7.00 |" in drawn


def test_parts_of_the_probe_add_up_and_nothing_stays_clocked(task):
    before = [getattr(owner, name) for owner, name in bench.CLOCKED.values()]
    parts = bench.probe_parts(task)
    assert [getattr(owner, name) for owner, name in bench.CLOCKED.values()] == before
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert all(part["seconds"] > 0 for part in parts)
    head, inner = 40 * 16, 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert bench.head_share(task) == pytest.approx(4 * head / (4 * head + 2 * inner))
