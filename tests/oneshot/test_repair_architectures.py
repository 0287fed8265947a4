"""Repair reaches every prunable layer of small models of many architectures, and lowers the error of each."""

import pytest
import torch

from prunus import Repair, prune

transformers = pytest.importorskip("transformers")
TEXT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {"max_position_embeddings": 32}


def text(config, model, **options):
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


MODELS = {
    "gpt2": text("GPT2Config", "GPT2LMHeadModel", vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "gpt-neox, parallel": text("GPTNeoXConfig", "GPTNeoXForCausalLM", use_parallel_residual=True, **TEXT, **LONG),
    "opt": text("OPTConfig", "OPTForCausalLM", vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
                num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=32),
    "bert": text("BertConfig", "BertForMaskedLM", **TEXT, **LONG),
    "albert, shared blocks": text("AlbertConfig", "AlbertForMaskedLM", embedding_size=8, **TEXT, **LONG),
    "t5": text("T5Config", "T5EncoderModel", vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "mixtral": text("MixtralConfig", "MixtralForCausalLM", num_key_value_heads=1, num_local_experts=3, **TEXT, **LONG),
    "vit": text("ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_channels=2,
                **{key: value for key, value in TEXT.items() if key != "vocab_size"}),
    "resnet": text("ResNetConfig", "ResNetForImageClassification", num_channels=2, embedding_size=4,
                   hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_repaired(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    if name in ("vit", "resnet"):
        batches = [{"pixel_values": torch.randn(24, 2, 8 if name == "vit" else 16, 8 if name == "vit" else 16)}]
    else:
        batches = [{"input_ids": torch.randint(0, 40, (24, 12))}]
    dense = model(**batches[0])[0].detach()
    # the statistics of batch norms that were never trained are not those of the samples
    result = prune(model, batches, 0.5, repair=Repair(batch_norm=False))
    assert all(layer.not_repaired is None for layer in result.layers)
    assert all(layer.error <= layer.mask_error for layer in result.layers)
    assert all(layer.num_pruned == round(0.5 * layer.num_weights) for layer in result.layers)
    repaired = (model(**batches[0])[0] - dense).square().mean()
    with result.masks_alone():
        alone = (model(**batches[0])[0] - dense).square().mean()
    assert repaired < alone


def test_stacked_experts_are_pruned_by_score_and_named():
    torch.manual_seed(0)
    model = MODELS["mixtral"]()
    result = prune(model, [torch.randint(0, 40, (24, 12))], 0.5, include="*experts*")
    reasons = {layer.name: layer.not_repaired for layer in result.layers}
    assert {name for name, reason in reasons.items() if reason} == {name for name in reasons if "experts" in name}
    assert all(layer.num_pruned == layer.num_weights // 2 for layer in result.layers)
