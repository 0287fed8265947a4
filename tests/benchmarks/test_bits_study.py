"""The study of few bits: small models go the same way, bits are counted exactly, and the page draws the records."""

import json

import pytest
import torch
from torch import nn

from benchmarks import bits_study as study
from benchmarks.__main__ import main
from prunus.lab.run import Run
from prunus.lab.trainer import train
from prunus.ops.grid import Grid

pytest.importorskip("accelerate")
SIZES = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--length", "8", "--seeds", "0", "--device", "cpu"]


def records(folder):
    (path,) = (folder / "results").iterdir()
    return json.loads(path.read_text())["rows"]


@pytest.fixture
def llama(small_llama, tmp_path):
    """A command that quantises a small Llama, which learns from its own samples."""
    names = {"tokens": "calib", "train-tokens": "calib", "held-out-tokens": "valid", "eval-tokens": "valid"}
    files = [part for name, file in names.items() for part in (f"--{name}", str(small_llama / f"{file}.u16"))]
    return ["bits-study", "--model", str(small_llama), *files, *SIZES, "--results", str(tmp_path / "results")]


@pytest.fixture
def runs(tmp_path):
    """Runs of a tiny GPT, as options: dense, pruned while training, and smaller from the start."""
    sizes = {"model": "gpt2-tiny", "layers": 1, "context": 16, "steps": 2, "batch": 4, "eval_size": 8}
    for name, width, score in (("dense-0", 64, "none"), ("pruned-80-0", 64, "bitter7"), ("small-50-0", 32, "none")):
        train(Run(**sizes, width=width, score=score, sparsity=0.8, out=tmp_path / name))
    paths = {"model": "dense-{seed}", "pruned": "pruned-{level}-{seed}", "small": "small-{level}-{seed}"}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(tmp_path / path))]
    return ["bits-study", *options, *SIZES, "--results", str(tmp_path / "results")]


def test_every_way_is_quantised_to_every_form_and_bits_are_those_of_masks_codes_and_scales(runs, tmp_path):
    ways = ["dense", "repair", "trained", "small"]
    main([*runs, "--ways", *ways, "--levels", "80", "--removed", "50", "--bits", "8", "4", "2-nearest", "4-torchao"])
    rows = {row["way"]: row for row in records(tmp_path)}
    assert {*rows} >= {way + form for way in ways for form in ("", " 8", " 4", " 2-nearest")}
    num, scales = rows["dense"]["num_weights"], 64 * (3 + 1 + 4) + 64 * 2  # groups of 128: one a row, of the last two
    assert num == 12 * 64 * 64 and {row["num_weights"] for row in rows.values()} == {num}
    assert rows["dense"]["bits_a_weight"] == 16
    assert rows["dense 4"]["bits_a_weight"] == pytest.approx(4 + 16 * scales / num)
    for way in ("repair", "trained"):
        assert rows[way]["kept"] == pytest.approx(0.2 * num, abs=1)
        assert rows[way]["bits_a_weight"] == pytest.approx(1 + 16 * rows[way]["kept"] / num)
        assert rows[f"{way} 4"]["bits_a_weight"] == pytest.approx(1 + (4 * rows[way]["kept"] + 16 * scales) / num)
    assert rows["small"]["bits_a_weight"] == 16 / 4 and rows["small 4"]["mask_bits"] == 0
    assert rows["small"]["num_bytes"] == 2 * 12 * 32 * 32


@pytest.mark.slow
def test_a_killed_study_continues_and_learns_once_for_all_forms(llama, tmp_path, kill_recovery):
    command = [*llama, "--levels", "50", "--removed", "50", "--steps", "2", "--bits", "4", "4-nearest"]
    kill_recovery(2)
    with pytest.raises(SystemExit):
        main(command)
    before = records(tmp_path)
    assert [row["way"] for row in before][-4:] == ["recover 4-nearest", "shrink", "shrink 4", "shrink 4-nearest"]
    main(command)
    rows = records(tmp_path)
    assert rows[: len(before)] == before and len({row["way"] for row in rows}) == len(rows) == 5 * 3
    assert {row["steps"] for row in rows if "recover" in row["way"]} == {2}


@pytest.mark.slow
def test_scales_learn_after_quantising(llama, tmp_path):
    main([*llama, "--levels", "50", "--ways", "repair", "--steps", "2", "--bits", "4", "4-scales"])
    *_, fixed, learned = records(tmp_path)
    assert learned["way"] == "repair 4-scales" and learned["scale_steps"] == 2 and learned["steps"] == 0
    assert learned["bits_a_weight"] == fixed["bits_a_weight"]


def test_weights_without_a_grid_count_16_bits_and_short_last_groups_have_a_scale_of_their_own():
    model = nn.Sequential(nn.Linear(130, 3, bias=False))
    assert study.stored_bits(model, has_mask=False)["code_bits"] == 16 * 390
    assert study.stored_bits(model, has_mask=False, others=Grid(4))["scale_bits"] == 16 * 3 * 2
    with torch.no_grad():
        model[0].weight[0, :100] = 0
    bits = study.stored_bits(model, has_mask=True)
    assert bits["kept"] == 290 and bits["mask_bits"] == 390 and bits["code_bits"] == 16 * 290


def test_after_16_bits_weights_are_as_before():
    model = nn.Sequential(nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    with study.in_bfloat16(model):
        assert torch.equal(model[0].weight, before.bfloat16().float()) and not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)
