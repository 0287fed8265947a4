"""The benchmark of repair: a small model of the same kind goes the same way, and comes back as it was."""

import json

import pytest
import torch

from benchmarks import repair as bench
from benchmarks import repair_study as study
from benchmarks.__main__ import main
from benchmarks.benchmark import random_llama
from benchmarks.repair_figures import parts
from prunus import Repair

pytest.importorskip("transformers")


@pytest.mark.parametrize("offload", [False, True])
def test_the_model_comes_back_and_every_part_is_timed(small_shape, offload):
    model, tokens = random_llama(small_shape, 2, (3, 8), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    place = torch.device("cpu") if offload else None
    row = bench.measure_repair(model, tokens, Repair(), place)
    assert row["sparsity"] == 0.5
    parts = {"forwards", "grams", "factorisations", "iterations", "refine"}
    assert parts <= set(row) and sum(row[part] for part in (*parts, "other")) == pytest.approx(row["seconds"])
    assert all(map(torch.equal, before, model.parameters()))


def test_the_command_leaves_a_file_that_the_page_draws(small_shape, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "MISTRAL", small_shape)
    sizes = ["--blocks", "2", "--windows", "2", "--length", "6", "--device", "cpu", "--offload"]
    main(["repair", *sizes, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("repair-2-blocks*.json")
    assert json.loads(path.read_text())["settings"]["offload"] is True
    assert "| 2 blocks of Mistral-7B's shape, offload, 2 windows of 6, bfloat16 |" in parts(tmp_path)["times"]


@pytest.fixture
def trained(small_llama, tmp_path):
    """Options that name a small Llama and its tokens."""
    model = ["--model", str(small_llama), "--tokens", str(small_llama / "calib.u16")]
    return [*model, "--windows", "4", "--length", "8", "--device", "cpu", "--results", str(tmp_path / "results")]


@pytest.mark.slow
def test_a_trained_model_is_timed_too(trained, tmp_path):
    main(["repair", *trained, "--tune"])
    (path,) = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    assert path.name.startswith("repair-stories15m-tune_") and record["settings"]["num_weights"] > 0
    assert record["rows"][0]["tune"] > 0
    main(["repair", *trained, "--tune", "--no-whole"])
    (path,) = (tmp_path / "results").glob("repair-stories15m-tune-blocks_*")
    assert "tune" not in json.loads(path.read_text())["rows"][0]  # it has no list of blocks


@pytest.mark.slow
def test_a_killed_study_continues_and_ends_with_every_way_level_and_seed(
    trained, small_llama, tmp_path, monkeypatch, capsys
):
    ways = ["magnitude", "wanda-repaired", "by-row", "repair"]
    held_out = ["--eval-tokens", str(small_llama / "valid.u16"), "--eval-windows", "3"]
    command = ["repair-quality", *trained, *held_out, "--seeds", "0", "1", "--levels", "50", "2:4", "--ways", *ways]
    measured, num = study.measured, 0

    def killed(*args):
        nonlocal num
        num += 1
        if num == 7:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(study, "measured", killed)
    with pytest.raises(SystemExit):
        main(command)
    (path,) = (tmp_path / "results").iterdir()
    before = json.loads(path.read_text())["rows"]
    assert len(before) == 6
    main(command)
    rows = json.loads(path.read_text())["rows"]
    assert rows[:6] == before and len(rows) == 2 * (1 + 7)
    assert len({row["value"] for row in rows if row["way"] == "dense"}) == 1
    assert all(row["zeros"] == row["num_weights"] // 2 for row in rows if row["way"] != "dense")
    with pytest.raises(SystemExit):
        main([*command, "--eval-windows", "2"])
    assert "give another --results" in capsys.readouterr().err


def test_ways_of_llm_compressor_are_left_out_without_it(trained, small_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    held_out = ["--eval-tokens", str(small_llama / "valid.u16")]
    main(["repair-quality", *trained, *held_out, "--seeds", "0", "--levels", "50", "--ways", "llmc-sparsegpt"])
    assert "left out" in capsys.readouterr().out
