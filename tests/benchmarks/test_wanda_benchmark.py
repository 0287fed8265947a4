"""The benchmarks of one-shot WANDA beside llmcompressor, of which a stand-in is used here."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import wanda
from benchmarks.prune import wanda_plainly


def oneshot(model, dataset, **options):
    wanda._by_their_functions(model, torch.tensor(dataset["input_ids"]))


def accumulate_row_scalars(x, layer, scalars, num_seen):
    squares = x.flatten(0, -2).float().square().sum(0)
    return scalars * num_seen / (num_seen + 1) + squares / (num_seen + 1), num_seen + 1


def sparsify_weight(layer, scalars, sparsity, n, m):
    weight = layer.weight.detach()
    return weight * wanda_plainly(weight, scalars[layer].sqrt())


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


def test_every_way_prunes_the_same_weights_and_is_drawn(llmcompressor, small_llama, measure, monkeypatch):
    layer_rows = wanda.layer_rows
    monkeypatch.setattr(wanda, "layer_rows", lambda dim, repeat: layer_rows(32, repeat))
    options = "--windows 3 --length 8 --repeat 1"
    rows, drawn = measure(f"wanda {small_llama} {small_llama / 'calib.u16'} {options}")
    assert [row["task"] for row in rows] == ["a layer of 32 x 32"] * 2 + ["stories15M"] * 3
    assert all(row["different"] == 0 and row["seconds"] > 0 for row in rows)
    assert "| stories15M: llmcompressor, oneshot |" in drawn
