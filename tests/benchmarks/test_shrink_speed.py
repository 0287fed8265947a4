"""The speed of shrinking and of what it makes: small models go the same way, and estimates show their arithmetic."""

import pytest

from benchmarks import shrink_speed as bench
from benchmarks.shrink_figures import parts
from tests.benchmarks.test_shrink_study import STUDIES

pytest.importorskip("transformers")


@pytest.mark.parametrize("options", [[], ["--offload"]])
def test_shrinking_is_timed_part_by_part(measure, small_shape, tmp_path, monkeypatch, options):
    monkeypatch.setattr(bench, "LLAMA_7B", small_shape)
    rows, _ = measure("shrink-time", "--blocks", 3, 2, "--windows", 2, "--length", 6, "--device", "cpu", *options)
    assert [row["blocks"] for row in rows] == [2, 3, None]
    for row in rows[:2]:
        assert row["weights"] <= 0.7 * row["weights_before"] and "selection" in row["parts"] and "other" in row["parts"]
    assert "- 32 blocks, estimated: " in parts(tmp_path / "results", STUDIES)["time"]


def test_an_estimate_is_what_a_block_adds():
    rows = [{"blocks": 2, "seconds": 10.0, "peak_gib": 3.0}, {"blocks": 4, "seconds": 16.0, "peak_gib": 3.5}]
    record = {"rows": [*rows, {"blocks": None, "seconds": 1.0}], "settings": {"offload": True, "windows": 512}}
    drawn = bench.extrapolated(record)
    assert "16.00 + 28 x (16.00 - 10.00) / 2 = 100.0 s" in drawn and "at most 300 s; met: 100.0 s" in drawn
    assert "at most 24 GiB; met: 10.5 GiB" in drawn
    rows = [{"blocks": 32, "seconds": 330.0, "peak_gib": 90.0}]
    settings = {"offload": False, "windows": 512}
    drawn = bench.extrapolated({"rows": rows, "settings": settings})
    assert "at most 300 s; **missed by 10%**" in drawn and "GiB" not in drawn
    assert "is for 512 windows" in bench.extrapolated({"rows": rows, "settings": settings | {"windows": 64}})
    assert bench.extrapolated({"rows": rows[:0], "settings": settings}) == ""


@pytest.mark.slow
def test_text_comes_from_dense_and_shrunk_models_by_both_ways(measure, small_shape, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LLAMA_1B", small_shape)
    sizes = ["--blocks", 2, "--layers", 1, "--batches", 1, 2, "--new-tokens", 12, "--repeat", 1, "--multiples", 1, 8]
    rows, _ = measure("shrink-speed", *sizes, "--sizes", "0.7", "--device", "cpu")
    names = ["dense", "size 0.7", "size 0.7, neurons a multiple of 8", "1 layers fewer"]
    assert [row["model"] for row in rows] == names * 4 and {row["way"] for row in rows} == {"generate", "decoder"}
    assert all(0 < row["bytes"] < 1 and row["of_bytes"] > 0 for row in rows if row["model"] != "dense")
    assert "| generate | size 0.7 | 1 |" in parts(tmp_path / "results", STUDIES)["speed"]
