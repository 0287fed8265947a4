"""The page for many ranks is computed from records, and says what it does not know."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.distributed import page


def row(**more):
    return {"event_ms": 2.0, "plain_step_ms": 10.0, "pruned_step_ms": 11.0} | more


def record(way):
    return {
        "what": "distributed",
        "date": "2026-01-01",
        "environment": {"machine": "m", "python": "3", "versions": {}, "commit": "c"},
        "settings": {"num_weights": 1_093_750_000, "weights": "w", "sparsity": 0.5, "tokens": 64, "repeat": 3},
        "rows": [
            row(ranks=2, bytes_exchanged=24776, digest="d"),
            row(way=way),
            row(way="cut by counts", num_sums=10, bytes_exchanged=5000, plain_step_ms=None, pruned_step_ms=None),
        ],
    }


@pytest.mark.parametrize("way", ["one rank, nccl", "one rank, gloo"])
def test_the_projection_is_arithmetic_on_what_a_gpu_took(way, tmp_path):
    assert page(tmp_path) is None
    (tmp_path / "r.json").write_text(json.dumps(record(way)))
    text = page(tmp_path)
    assert "| 2 ranks, gloo | 2.00 | 24,776 | 10.00 | 11.00 | +10.0% |" in text
    assert ("together 3.0 ms an event" in text) == ("nccl" in way)
    assert ("No GPU has been measured" in text) == ("nccl" not in way)


def test_one_rank_on_a_gpu_is_held_against_the_plain_way(tmp_path):
    alone = record("FSDP2 on one rank, nccl")
    alone["rows"][0] = row(way="plain", event_ms=2.5, pruned_step_ms=10.5)
    (tmp_path / "r.json").write_text(json.dumps(alone))
    text = page(tmp_path)
    assert "differs by -20.0%; pruning adds 1.00 ms to its step, 0.50 ms to the plain one" in text
    assert "one digest" not in text and "thread" not in text


@pytest.mark.slow
def test_the_command_measures_every_number_of_ranks_and_one_rank_beside_none(tmp_path):
    main(["distributed", *"--layers 2 --dim 16 --repeat 1".split(), "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("ranks", row.get("way")) for row in rows[:4]] == [1, 2, 4, "plain"]
    assert rows[-1]["num_sums"] > 0 and "| 4 ranks, gloo |" in page(tmp_path)
