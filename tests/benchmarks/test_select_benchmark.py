"""The benchmark of finding masks: every method drops the number it should, and impossible sizes are refused."""

import json

import pytest
import torch

from benchmarks import select
from benchmarks.__main__ import main
from benchmarks.page import tables
from benchmarks.select import METHODS, OURS, SHAPES, check_exact, problem

SMALL = "--layers 3 --dim 40 --repeat 1".split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_masks_are_checked_before_they_are_timed(dtype, monkeypatch):
    p = problem([(40, 24), (8, 24)], "bitter7", 0.5, torch.device("cpu"), dtype)
    kept = torch.cat([score.flatten() for score in p.scores()]).sort().values[p.num_drop :]
    assert check_exact(p) == kept[0]
    monkeypatch.setattr(type(p), "num_drop", 5)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        check_exact(p)


def test_every_method_is_measured_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(select, "peak_extra_mib", lambda *_: 1.0)
    main(["select", *SMALL, "--results", str(tmp_path)])
    assert OURS in capsys.readouterr().out
    (path,) = tmp_path.glob("select-3-weights-of-40-x-40_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(row["kept_too_many"] == 0 for row in rows if row["method"].startswith("prunus"))
    assert all(row["ms"] > 0 for row in rows)
    assert all(f"| {name} |" in tables(tmp_path)["select"] for name in METHODS)


def test_rivals_can_be_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(select, "peak_extra_mib", lambda *_: None)
    main(["select", *SMALL, "--no-rivals", "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    names = [row["method"] for row in json.loads(path.read_text())["rows"]]
    assert names == [name for name in METHODS if name.startswith("prunus")]
    assert "| not measured |" in tables(tmp_path)["select"]


def test_shapes_are_those_of_the_models():
    shapes = SHAPES["mistral-7b"]
    assert len(shapes) == 224 and sum(a * b for a, b in shapes) == 6_979_321_856


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("select --sparsity 2", "[0, 1)"),
        ("select --layers 0", "--layers must be at least 1"),
        ("select --repeat 0", "--repeat must be at least 1"),
        ("step --tokens 8 0", "--tokens must be at least 1"),
        ("select --threads -1", "--threads must be at least 0"),
        ("select --score wanda", "wanda reads input_norm"),
        ("selct", "there is no such command"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*options.split(), *(["--results", str(tmp_path / "results")] if "--" in options else [])])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "results").exists()
