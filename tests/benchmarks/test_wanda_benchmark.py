"""The benchmarks of one-shot WANDA beside llmcompressor, of which a stand-in is used here."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import wanda
from benchmarks.__main__ import main
from benchmarks.page import tables
from benchmarks.prune import wanda_plainly


def oneshot(model, dataset, **options):
    wanda._by_their_functions(model, torch.tensor(dataset["input_ids"]))


def accumulate_row_scalars(x, layer, scalars, num_seen):
    squares = x.flatten(0, -2).float().square().sum(0)
    return scalars * num_seen / (num_seen + 1) + squares / (num_seen + 1), num_seen + 1


def sparsify_weight(layer, scalars, sparsity, n, m):
    weight = layer.weight.detach()
    return weight * wanda_plainly(weight, scalars[layer].sqrt(), sparsity)


@pytest.fixture
def llmcompressor(monkeypatch):
    functions = {
        "make_empty_row_scalars": lambda layer: torch.zeros(layer.weight.shape[1]),
        "accumulate_row_scalars": accumulate_row_scalars,
        "sparsify_weight": sparsify_weight,
    }
    modules = {
        "llmcompressor": {"__version__": "0", "oneshot": oneshot},
        "llmcompressor.modifiers": {},
        "llmcompressor.modifiers.pruning": {"WandaPruningModifier": SimpleNamespace},
        "llmcompressor.modifiers.pruning.wanda": {},
        "llmcompressor.modifiers.pruning.wanda.wanda_sparsify": functions,
        "datasets": {"Dataset": SimpleNamespace(from_dict=dict)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)


def test_every_way_prunes_the_same_weights_and_is_drawn(llmcompressor, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    layer_rows = wanda.layer_rows
    monkeypatch.setattr(wanda, "layer_rows", lambda dim, repeat: layer_rows(32, repeat))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    np.random.default_rng(0).integers(0, 40, 100).astype("<u2").tofile(tmp_path / "calib.u16")
    options = "--windows 3 --length 8 --repeat 1".split()
    files = [str(tmp_path / name) for name in ("model", "calib.u16")]
    main(["wanda", *files, *options, "--results", str(tmp_path / "results")])
    (path,) = (tmp_path / "results").iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row["task"] for row in rows] == ["a layer of 32 x 32"] * 2 + ["model"] * 3
    assert all(row["different"] == 0 and row["seconds"] > 0 for row in rows)
    assert "| model: llmcompressor, oneshot |" in "".join(tables(tmp_path / "results").values())


def test_no_speed_is_reported_where_other_weights_are_pruned():
    ways = {"ours": lambda: {"w": torch.ones(4)}, "theirs": lambda: {"w": torch.zeros(4)}}
    with pytest.raises(RuntimeError, match="4 of 4 weights differ, so no speed is reported"):
        wanda.compared("a task", ways, 1)
