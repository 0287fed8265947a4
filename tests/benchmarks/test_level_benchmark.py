"""The benchmark of a level: a small model of the same kind goes the same way, and comes back as it was."""

import json

import pytest
import torch

from benchmarks import level as bench
from benchmarks.__main__ import main
from benchmarks.page import page

pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "SHAPE", SMALL)
    monkeypatch.setattr(bench, "VOCABULARY", 40)
    monkeypatch.setattr(bench, "DTYPE", torch.float32)


def test_the_model_comes_back_and_both_schedules_are_timed(small):
    level = bench.level_of(2, 3, 8, torch.device("cpu"))
    before = [(p.detach().clone(), p.requires_grad) for p in level.model.parameters()]
    rows = bench.measure_level(level, 0.5)
    assert [row["way"] for row in rows] == ["plainly, scaled", "block, first in its process", "block", "sequential"]
    assert rows[0]["passes"] == 2 * 7 * 2 * 3 and all(row["seconds"] > 0 for row in rows)
    assert all(0.3 < row["sparsity"] <= 0.5 for row in rows[1:])
    for (value, flag), parameter in zip(before, level.model.parameters(), strict=True):
        assert torch.equal(value, parameter) and parameter.requires_grad == flag


def test_operations_are_counted_by_hand(small):
    level = bench.level_of(2, 3, 8, torch.device("cpu"))
    block = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48
    passes = (2 * block + 40 * 32) + (block + 40 * 32)
    assert bench.flops(level, "sequential") == 2 * 24 * (7 * 4 * passes + 2 * 2 * block)


def test_the_command_leaves_a_file_that_the_page_draws(small, tmp_path):
    main(["level", "--blocks", "2", "--windows", "2", "--length", "6", "--results", str(tmp_path)])
    (path,) = tmp_path.glob("level_*.json")
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert "a level of a 7 B model" in page(tmp_path)
