"""Whole layers are removed: those that matter least, so that what stays computes what it computed before."""

import pytest
import torch
from families import FAMILIES, SIZES, assert_equal_models, build, inputs, text

from prunus.oneshot.calibration import Calibration
from prunus.oneshot.drop_layers import drop_layers_

DEEP = SIZES | {"num_hidden_layers": 4, "n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 32, "head_dim": 8}
MORE = {
    "llama": ("LlamaForCausalLM", DEEP, text),
    "gpt2": ("GPT2LMHeadModel", DEEP, text),
    "bert": ("BertModel", DEEP, text),
}


@pytest.fixture(autouse=True)
def with_more_layers(monkeypatch):
    for name, family in MORE.items():
        monkeypatch.setitem(FAMILIES, name, family)


@pytest.mark.parametrize("name", MORE)
@torch.no_grad()
def test_the_smaller_model_is_the_one_that_its_folder_loads(name, tmp_path):
    model, batch = build(name), inputs(name)
    dropped = drop_layers_(Calibration(model, [batch]), 2)
    assert dropped.is_applied and dropped.num_dropped == len(dropped.distances) == 2 and dropped.num_layers == 4
    assert model.config.num_hidden_layers == 2
    model.save_pretrained(tmp_path)
    assert_equal_models(type(model).from_pretrained(tmp_path), model, batch)
