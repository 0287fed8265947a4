"""The benchmark of products checks agreement, compares with dense, and is drawn by the page."""

import json

import pytest
import torch

from benchmarks import matvec
from benchmarks.__main__ import main
from benchmarks.matvec import Product, rows_of
from benchmarks.page import tables


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("prunus.sparse.times.PATIENCE", 0.0)
    monkeypatch.setattr("prunus.sparse.times.MOST_COPIES", 2)
    cases = [Product((64, 128), 0.5), Product((64, 128), 0.9, vectors=3), Product((64, 64), 0.5, 64, two_of_four=True)]
    monkeypatch.setattr(matvec, "cases", lambda device: cases)


def test_weights_are_as_sparse_as_the_case_says():
    weight = Product((64, 4096), 0.8).weight(torch.device("cpu"), torch.bfloat16)
    assert weight.eq(0).float().mean().item() == pytest.approx(0.8, abs=0.01)
    structured = Product((64, 64), 0.5, two_of_four=True).weight(torch.device("cpu"), torch.float32)
    assert (structured.view(-1, 4).count_nonzero(1) == 2).all()


def test_the_command_writes_what_the_page_draws(tmp_path, capsys):
    main(["matvec", "--repeat", "2", "--results", str(tmp_path)])
    (path,) = tmp_path.glob("matvec*.json")
    rows, drawn = json.loads(path.read_text())["rows"], "".join(tables(tmp_path).values())
    assert {row["way"] for row in rows} == {"dense", "prunus, gaps"}
    assert all(row["times_faster"] == 1 for row in rows if row["way"] == "dense")
    assert all(row["error"] < 1e-5 and row["us"] > 0 for row in rows)
    assert "| 64 x 128 | 90% | 3 |" in drawn
    assert "matvec" in capsys.readouterr().out


def test_a_way_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr("prunus.sparse.times.product", lambda x, form: x.new_zeros(len(x), form.shape[0]))
    with pytest.raises(RuntimeError, match="no speed is reported"):
        list(rows_of(Product((64, 128), 0.5), 2, torch.device("cpu"), torch.float32))
