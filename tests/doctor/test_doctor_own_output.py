"""What Prunus writes itself is healthy: the doctor judges by what was asked, where the folder says it."""

import json

import numpy as np
import pytest
import torch
from patients import folder, healthy, kinds, prune_layers_, prune_rows_, weights_of

from prunus.cli import main
from prunus.doctor import examine

UNTIED = {"tie_word_embeddings": False}


def with_result(path, tensors, pruned, **settings):
    """A folder with the result.json of ``prunus prune`` beside its tensors."""
    folder(path, tensors, UNTIED)
    rows = [{"name": name, "num_pruned": int((tensors[name] == 0).sum())} for name in pruned]
    (path / "result.json").write_text(json.dumps({"settings": settings, "layers": rows}))
    return path


def sines(num, width):
    angles = torch.arange(num)[:, None] / 10000 ** (torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], 1)


def test_zeros_of_a_sine_are_no_damage_but_other_zeros_of_positions_are(tmp_path):
    tensors = healthy() | {"model.encoder.embed_positions.weight": sines(16, 16)}
    assert examine(folder(tmp_path / "a", tensors)).is_healthy
    tensors["model.encoder.embed_positions.weight"][3:5, :6] = 0
    assert kinds(examine(folder(tmp_path / "b", tensors))) == {"excluded"}


def test_a_head_that_was_pruned_by_request_is_a_weight(tmp_path):
    tensors = prune_layers_(healthy(tied=False))
    names = [*weights_of(tensors), "lm_head.weight"]
    tensors["lm_head.weight"].view(-1)[::2] = 0
    assert kinds(examine(folder(tmp_path / "a", tensors, UNTIED))) == {"excluded"}
    found = examine(with_result(tmp_path / "b", tensors, names, include=["lm_head"]))
    assert found.is_healthy and found.sparsity == 0.5
    assert found.num_prunable == sum(tensors[name].numel() for name in names)


def test_zeros_of_a_quantised_origin_are_noted(tmp_path):
    tensors = prune_layers_(healthy())
    tensors["model.embed_tokens.weight"][torch.rand(32, 16) < 0.1] = 0
    names = weights_of(tensors)
    assert not examine(with_result(tmp_path / "a", tensors, names, gguf_file=None)).is_healthy
    found = examine(with_result(tmp_path / "b", tensors, names, gguf_file="model.Q4_0.gguf"))
    assert found.is_healthy and any("embed_tokens" in note for note in found.notes)


def test_inputs_that_no_row_keeps_are_no_fault_of_pruning_by_row(tmp_path):
    tensors = healthy()
    for name in weights_of(tensors):
        tensors[name][:, 3] = 1e-6
    found = examine(folder(tmp_path, prune_rows_(tensors)), strict=True)
    assert found.is_healthy and any(layer.num_dead_columns for layer in found.layers)


def test_frozen_weights_are_not_counted_where_the_folder_lists_what_was_pruned(tmp_path):
    tensors = prune_layers_(healthy())
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.randn(40, 16)
    names = [name for name in weights_of(tensors) if name != "model.layers.0.mlp.up_proj.weight"]
    assert examine(folder(tmp_path / "a", tensors)).sparsity < 0.5
    found = examine(with_result(tmp_path / "b", tensors, names))
    assert found.is_healthy and found.sparsity == 0.5


@pytest.mark.parametrize("gate", ["mlp.gate", "mlp.router", "mlp.shared_expert_gate"])
def test_routers_are_not_counted(gate, tmp_path):
    tensors = {f"layers.{i}.{gate}.weight": torch.randn(4, 16) for i in range(2)}
    tensors |= {f"layers.{i}.mlp.experts.{j}.up.weight": torch.randn(8, 16) for i in range(2) for j in range(4)}
    tensors["layers.0.mlp.experts.0.gate.weight"] = torch.randn(8, 16)  # of an expert, which is pruned
    found = examine(folder(tmp_path, tensors))
    assert found.num_prunable == 9 * 8 * 16
    assert {layer.name for layer in found.layers if layer.role == "router"} == {
        f"layers.{i}.{gate}.weight" for i in (0, 1)
    }


def test_a_layer_with_a_bias_is_no_embedding_whatever_its_name(tmp_path):
    tensors = {"encoder.input_embedding.weight": torch.randn(16, 8), "encoder.input_embedding.bias": torch.randn(16)}
    tensors["encoder.input_embedding.weight"].view(-1)[::2] = 0
    assert examine(folder(tmp_path, tensors)).sparsity == 0.5


def test_weights_that_came_back_since_the_result_was_written_are_found(tmp_path):
    tensors = prune_layers_(healthy())
    path = with_result(tmp_path, tensors, weights_of(tensors))
    name = weights_of(tensors)[0]
    tensors[name][tensors[name] == 0] = 1.0
    folder(tmp_path, tensors)
    [finding] = examine(path).findings
    assert (finding.kind, finding.where) == ("too-dense", name) and "result.json" in finding.what


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"settings": [], "layers": {}}', '{"settings": {"include": 3}, "layers": [3, {"name": []}]}'],
)
def test_another_result_says_nothing(content, tmp_path):
    folder(tmp_path, prune_layers_(healthy()))
    (tmp_path / "result.json").write_text(content)
    assert examine(tmp_path).is_healthy


@pytest.mark.parametrize("scope", ["row", "2:4"])
def test_a_folder_of_prunus_prune_with_its_head_pruned_is_healthy(scope, tmp_path, capsys):
    families = pytest.importorskip("families")
    families.build("mixtral").save_pretrained(tmp_path / "model")
    np.random.default_rng(0).integers(0, 64, 600).astype("<u2").tofile(tmp_path / "data.u16")
    options = f"--score wanda --no-repair --samples 4 --length 12 --scope {scope} --include lm_head --out".split()
    main(["prune", str(tmp_path / "model"), "--tokens", str(tmp_path / "data.u16"), *options, str(tmp_path / "out")])
    main(["export", str(tmp_path / "out"), "--out", str(tmp_path / "small")])
    for name in ("out", "small"):
        main(["doctor", str(tmp_path / name)])
        assert "healthy" in capsys.readouterr().out
