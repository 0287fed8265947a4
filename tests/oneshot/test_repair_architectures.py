"""Repair reaches every prunable layer of small models of many architectures, and lowers the error of each."""

import pytest
import torch
from covering import quickly
from families import FAMILIES, SIZES, VOCABULARY, build, pixels, text, tokens

from prunus import NofM, PerRow, Repair, prune
from prunus.oneshot.forward import first_tensor, outputs

NAMES = ("t5", "bart", "marian", "whisper", "bert", "mixtral", "vit")
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LLAMA4 = {"num_local_experts": 3, "head_dim": 8, "intermediate_size_mlp": 24}
RESNET = {"num_channels": 3, "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic"}
MODELS = {name: FAMILIES[name] for name in NAMES} | {
    "gpt2": ("GPT2LMHeadModel", GPT2, text),
    "gpt-neox, parallel": ("GPTNeoXForCausalLM", SIZES | {"use_parallel_residual": True}, text),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16}, text),
    "falcon": ("FalconForCausalLM", SIZES, text),
    "albert, shared blocks": ("AlbertForMaskedLM", SIZES | {"embedding_size": 8}, text),
    "llama4": ("Llama4ForCausalLM", SIZES | LLAMA4, lambda: {"input_ids": tokens(24)}),
    "resnet": ("ResNetForImageClassification", RESNET, pixels),
}


@torch.no_grad()
def assert_repaired(model, batch, **options):
    """Every layer has its exact count and no larger error, and the outputs are nearer than with the masks alone."""
    dense = first_tensor(outputs(model, batch))
    result = prune(model, [batch], **options)
    assert all(layer.not_repaired is None and layer.error <= layer.mask_error for layer in result.layers)
    assert all(layer.num_pruned == round(0.5 * layer.num_weights) for layer in result.layers)
    repaired = (first_tensor(outputs(model, batch)) - dense).norm()
    with result.masks_alone():
        assert repaired < (first_tensor(outputs(model, batch)) - dense).norm()
    return result


@pytest.mark.parametrize("name", quickly(MODELS, "gpt2", "t5", "whisper", "albert, shared blocks"))
def test_every_layer_is_repaired(name):
    # the statistics of batch norms that were never trained are not those of the samples
    assert_repaired(build(name, MODELS), MODELS[name][2](), repair=Repair(batch_norm=False))


@pytest.mark.slow
@pytest.mark.parametrize(("repair", "select"), [(Repair(), NofM(2, 4)), (Repair("own"), PerRow()), (Repair(), None)])
def test_stacked_experts_are_repaired_each_by_its_tokens(repair, select):
    model = build("mixtral")
    how = model.config._experts_implementation
    result = assert_repaired(model, {"input_ids": tokens(24)}, select=select, repair=repair, include="*experts*")
    assert model.config._experts_implementation == how
    assert sum("experts" in layer.name for layer in result.layers) == 4


@pytest.mark.parametrize(
    ("name", "num", "few"), [("mixtral", 1, True), pytest.param("llama4", 24, False, marks=pytest.mark.slow)]
)
def test_padding_changes_nothing_and_experts_with_few_tokens_are_pruned_by_score_and_named(name, num, few):
    weights, mask = [], torch.arange(12).expand(num, 12) < torch.randint(4, 11, (num, 1))
    for padding in (0, 7):
        model = build(name, MODELS)
        batch = {"input_ids": torch.where(mask, tokens(num), padding), "attention_mask": mask.long()}
        result = prune(model, [batch], include="*experts*")
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items() if few or "experts" in key)
    assert all(layer.num_pruned == layer.num_weights // 2 for layer in result.layers)
    reasons = [layer.not_repaired or "" for layer in result.layers if "experts" in layer.name]
    assert any("of 4 experts got too few tokens" in reason for reason in reasons) == few
