"""The benchmark of repair: a small model of the same kind goes the same way, and comes back as it was."""

import json

import pytest
import torch

from benchmarks import prune
from benchmarks import repair as bench
from benchmarks.__main__ import main
from benchmarks.page import page
from prunus import Repair

pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(prune, "MISTRAL", SMALL)
    monkeypatch.setattr(prune, "VOCABULARY", 40)
    monkeypatch.setattr(prune, "LEVEL_DTYPE", torch.float32)


@pytest.mark.parametrize("offload", [False, True])
def test_the_model_comes_back_and_every_part_is_timed(small, offload):
    model, tokens = prune.Level(blocks=2, windows=3, length=8).model_and_tokens()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    place = torch.device("cpu") if offload else None
    row = bench.measure_repair(model, tokens, 0.5, "layer", Repair(), place)
    assert row["sparsity"] == 0.5 and row["error"] < row["mask_error"]
    parts = {"forwards", "grams", "factorisations", "iterations", "refine"}
    assert parts <= set(row) and sum(row[part] for part in (*parts, "other")) == pytest.approx(row["seconds"])
    assert all(map(torch.equal, before, model.parameters()))


def test_the_command_leaves_a_file_that_the_page_draws(small, tmp_path):
    sizes = ["--blocks", "2", "--windows", "2", "--length", "6", "--device", "cpu", "--offload"]
    main(["repair", *sizes, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("repair_*.json")
    assert json.loads(path.read_text())["settings"]["offload"] is True
    assert "Repair: a 7 B model" in page(tmp_path)


def test_ways_to_prune_a_trained_model_are_compared_over_seeds(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, num_hidden_layers=1, max_position_embeddings=32, **SMALL, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    files = {name: tmp_path / f"{name}.u16" for name in ("tokens", "eval-tokens")}
    for path in files.values():
        torch.randint(0, 40, (200,)).to(torch.uint16).numpy().tofile(path)
    sizes = ["--windows", "4", "--length", "8", "--eval-windows", "3", "--seeds", "2", "--device", "cpu"]
    given = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    main(["repair", "--model", str(tmp_path / "model"), *given, *sizes, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("repair-quality_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(bench.WAYS) * len(bench.LEVELS) and all(len(row["values"]) == 2 for row in rows)
    drawn = page(tmp_path)
    assert "Repair: a trained model" in drawn and all(f"{row['mean']:.3f} (" in drawn for row in rows)
