"""Repair reaches every prunable layer of small models of many architectures, and lowers the error of each."""

import pytest
import torch
from covering import each_once, quickly

from prunus import NofM, PerRow, Repair, prune

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
    "falcon": text("FalconConfig", "FalconForCausalLM", vocab_size=40, hidden_size=16, num_hidden_layers=2,
                   num_attention_heads=2),
    "bert": text("BertConfig", "BertForMaskedLM", **TEXT, **LONG),
    "albert, shared blocks": text("AlbertConfig", "AlbertForMaskedLM", embedding_size=8, **TEXT, **LONG),
    "t5": text("T5Config", "T5EncoderModel", vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "mixtral": text("MixtralConfig", "MixtralForCausalLM", num_key_value_heads=1, num_local_experts=3, **TEXT, **LONG),
    "llama4": text("Llama4TextConfig", "Llama4ForCausalLM", num_key_value_heads=1, num_local_experts=3, head_dim=8,
                   intermediate_size_mlp=24, **TEXT, **LONG),
    "vit": text("ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_channels=2,
                **{key: value for key, value in TEXT.items() if key != "vocab_size"}),
    "resnet": text("ResNetConfig", "ResNetForImageClassification", num_channels=2, embedding_size=4,
                   hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic"),
}  # fmt: skip


@pytest.mark.parametrize("name", quickly(MODELS, "gpt2", "bert", "albert, shared blocks"))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repair", "select"),
    [
        *each_once([Repair(), Repair("own")], [NofM(2, 4), PerRow()]),
        pytest.param(Repair(), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stacked_experts_are_repaired_each_by_its_tokens(repair, select):
    torch.manual_seed(0)
    model = MODELS["mixtral"]().eval()
    tokens = torch.randint(0, 40, (24, 12))
    dense = model(tokens).logits.detach()
    how = model.config._experts_implementation
    result = prune(model, [tokens], 0.5, select=select, repair=repair, include="*experts*")
    assert model.config._experts_implementation == how
    assert sum("experts" in layer.name for layer in result.layers) == 4
    assert all(layer.not_repaired is None and layer.error <= layer.mask_error for layer in result.layers)
    assert all(layer.num_pruned == layer.num_weights // 2 for layer in result.layers)
    repaired = (model(tokens).logits - dense).square().mean()
    with result.masks_alone():
        assert repaired < (model(tokens).logits - dense).square().mean()


def test_experts_with_few_tokens_are_pruned_by_score_and_named_and_padding_changes_nothing():
    weights = []
    for padding in (0, 7):
        torch.manual_seed(0)
        model = MODELS["mixtral"]().eval()
        tokens, mask = torch.randint(0, 40, (2, 6)), torch.ones(2, 6, dtype=torch.long)
        mask[1, 4:] = 0
        tokens[mask == 0] = padding
        result = prune(model, [{"input_ids": tokens, "attention_mask": mask}], include="*experts*")
        weights.append([*model.parameters()])
    reasons = {layer.name: layer.not_repaired for layer in result.layers if "experts" in layer.name}
    assert any(reason and "of 3 experts got too few tokens" in reason for reason in reasons.values())
    assert all(layer.num_pruned == layer.num_weights // 2 for layer in result.layers)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_padding_is_no_token_of_experts_that_compute_all_at_once():
    torch.manual_seed(0)
    tokens, found = torch.randint(0, 40, (24, 12)), []
    mask = torch.arange(12).expand(24, 12) < torch.randint(4, 13, (24, 1))
    for filled in (0, 7):
        torch.manual_seed(0)
        model = MODELS["llama4"]().eval()
        batch = {"input_ids": torch.where(mask, tokens, filled), "attention_mask": mask.long()}
        prune(model, [batch], 0.5)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items() if "experts" in name)
