"""What repair, shrinking and text cost: small models go the same way, and estimates show their arithmetic."""

import json

import pytest
import torch

from benchmarks import costs, decode, repair_figures, shrink_figures
from benchmarks.benchmark import random_llama
from prunus import Repair
from tests.benchmarks.test_figures import STUDIES

pytest.importorskip("transformers")


@pytest.mark.parametrize("offload", [False, True])
def test_a_repaired_model_comes_back_and_every_part_is_timed(small_shape, offload):
    model, tokens = random_llama(small_shape, 2, (3, 8), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    place = torch.device("cpu") if offload else None
    row = costs.measure_repair(model, tokens, Repair(), place)
    assert row["sparsity"] == 0.5
    parts = {"forwards", "grams", "factorisations", "iterations", "refine"}
    assert parts <= set(row) and sum(row[part] for part in (*parts, "other")) == pytest.approx(row["seconds"])
    assert all(map(torch.equal, before, model.parameters()))


def test_the_page_draws_what_the_command_measured(measure, small_shape, tmp_path, monkeypatch):
    monkeypatch.setitem(costs.SHAPES, "Mistral-7B", small_shape)
    measure("repair --blocks 2 --windows 2 --length 6 --device cpu --offload")
    drawn = repair_figures.parts(tmp_path / "results")["times"]
    assert "| 2 blocks of Mistral-7B's shape, offload, 2 windows of 6, bfloat16 |" in drawn


@pytest.mark.slow
def test_a_trained_model_is_timed_too(small_llama, measure, tmp_path):
    model = ("--model", small_llama, "--tokens", small_llama / "calib.u16", "--windows", 4, "--length", 8)
    (row,), _ = measure("repair --device cpu --tune", *model)
    (path,) = (tmp_path / "results").iterdir()
    assert path.name.startswith("repair-stories15m-tune_") and row["tune"] > 0
    assert json.loads(path.read_text())["settings"]["num_weights"] > 0
    path.unlink()
    (row,), _ = measure("repair --device cpu --tune --no-whole", *model)
    assert "tune" not in row  # it has no list of blocks


@pytest.mark.parametrize("options", [[], ["--offload"]])
def test_shrinking_is_timed_part_by_part(measure, small_shape, tmp_path, monkeypatch, options):
    monkeypatch.setattr(costs, "LLAMA_7B", small_shape)
    rows, _ = measure("shrink-time", "--blocks", 3, 2, "--windows", 2, "--length", 6, "--device", "cpu", *options)
    assert [row["blocks"] for row in rows] == [2, 3, None]
    for row in rows[:2]:
        assert row["weights"] <= 0.7 * row["weights_before"] and "selection" in row["parts"] and "other" in row["parts"]
    assert "- 32 blocks, estimated: " in shrink_figures.parts(tmp_path / "results", STUDIES)["time"]


def test_an_estimate_is_what_a_block_adds():
    rows = [{"blocks": 2, "seconds": 10.0, "peak_gib": 3.0}, {"blocks": 4, "seconds": 16.0, "peak_gib": 3.5}]
    record = {"rows": [*rows, {"blocks": None, "seconds": 1.0}], "settings": {"offload": True, "windows": 512}}
    drawn = costs.extrapolated(record)
    assert "16.00 + 28 x (16.00 - 10.00) / 2 = 100.0 s" in drawn and "at most 300 s; met: 100.0 s" in drawn
    assert "at most 24 GiB; met: 10.5 GiB" in drawn
    rows = [{"blocks": 32, "seconds": 330.0, "peak_gib": 90.0}]
    settings = {"offload": False, "windows": 512}
    drawn = costs.extrapolated({"rows": rows, "settings": settings})
    assert "at most 300 s; **missed by 10%**" in drawn and "GiB" not in drawn
    assert "is for 512 windows" in costs.extrapolated({"rows": rows, "settings": settings | {"windows": 64}})
    assert costs.extrapolated({"rows": rows[:0], "settings": settings}) == ""


@pytest.mark.slow
def test_text_comes_from_dense_and_shrunk_models_by_both_ways(measure, small_shape, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "LLAMA_1B", small_shape)
    sizes = ["--blocks", 2, "--layers", 1, "--batches", 1, 2, "--new-tokens", 12, "--repeat", 1, "--multiples", 1, 8]
    rows, _ = measure("shrink-speed", *sizes, "--sizes", "0.7", "--device", "cpu")
    names = ["dense", "size 0.7", "size 0.7, neurons a multiple of 8", "1 layers fewer"]
    assert [row["model"] for row in rows] == names * 4 and {row["way"] for row in rows} == {"generate", "decoder"}
    assert all(0 < row["bytes"] < 1 and row["of_bytes"] > 0 for row in rows if row["model"] != "dense")
    assert "| generate | size 0.7 | 1 |" in shrink_figures.parts(tmp_path / "results", STUDIES)["speed"]
