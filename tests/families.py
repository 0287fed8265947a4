"""Tiny random models of many families of transformers, each with arguments of its forward; built in milliseconds."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

VOCABULARY, SIDE = 64, 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES = {"image_size": SIDE, "patch_size": 4, "num_channels": 3}
PATCHES = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
PATCHES |= IMAGES
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
START = {"pad_token_id": 0, "decoder_start_token_id": 0}
TWO_SIDES = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, **START,
}  # fmt: skip
WHISPER = TWO_SIDES | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}


GEMMA = SIZES | {"head_dim": 8, "sliding_window": 8}
CLIP = PATCHES | {"projection_dim": 8}
DEEPSEEK = SIZES | {
    "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
JAMBA = SIZES | {
    "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2,
    "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "use_mamba_kernels": False,
}  # fmt: skip
QWEN_EYES = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
QWEN_EYES |= {"spatial_merge_size": 2, "temporal_patch_size": 1}
QWEN2_VL = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SWIN = {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "sr_ratios": [2, 1], "mlp_ratios": [2, 2],
    "num_attention_heads": [1, 2], "patch_sizes": [3, 3], "strides": [2, 2], "decoder_hidden_size": 8,
}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
DETR = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 4, "d_model": 16,
    "backbone_config": RESNET | {"layer_type": "basic", "out_features": ["stage2"]},
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_labels": 3,
}  # fmt: skip


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(num: int = 4, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (num, length), generator=torch.Generator().manual_seed(2))


def class_labels(num: int = 4) -> Tensor:
    return torch.arange(num) % 3


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def classes() -> dict[str, Tensor]:
    return text() | {"labels": class_labels()}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": tokens(length=10), "labels": tokens(length=6)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": draw(4, 3, SIDE, SIDE), "labels": class_labels()}


def sound() -> dict[str, Tensor]:
    return {"input_features": draw(4, 4, 16), "labels": tokens(length=5)}


def unlabelled() -> dict[str, Tensor]:
    return {"pixel_values": draw(4, 3, 4 * SIDE, 4 * SIDE)}


Family = tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]  # class, configuration, arguments of a forward
FAMILIES: dict[str, Family] = {
    "llama": ("LlamaForCausalLM", SIZES, text),
    "llama classifier": ("LlamaForSequenceClassification", SIZES | {"num_labels": 3}, classes),
    "bert classifier": ("BertForSequenceClassification", SIZES | {"num_labels": 3}, classes),
    "bert": ("BertModel", SIZES, text),
    "t5": ("T5ForConditionalGeneration", T5 | START, pairs),
    "bart": ("BartForConditionalGeneration", TWO_SIDES, pairs),
    "marian": ("MarianMTModel", TWO_SIDES, pairs),
    "vit": ("ViTForImageClassification", PATCHES | {"num_labels": 3}, pixels),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, sound),
    "mixtral": ("MixtralForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "gpt_oss": ("GptOssForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, text),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | EXPERTS | {"head_dim": 8}, text),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK, text),
    "granitemoe": ("GraniteMoeForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "jamba": ("JambaForCausalLM", JAMBA, text),
    "llava": ("LlavaForConditionalGeneration", {
        "text_config": SIZES | {"model_type": "llama"}, "vision_config": CLIP | {"model_type": "clip_vision_model"},
        "image_token_index": 63}, text),
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "text_config": GEMMA, "vision_config": PATCHES, "mm_tokens_per_image": 1, "image_token_index": 63}, text),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {
        "text_config": QWEN2_VL, "vision_config": QWEN_EYES, "image_token_id": 63, "video_token_id": 62,
        "vision_start_token_id": 61}, text),
    "swin": ("SwinForImageClassification", SWIN | {"num_labels": 3}, pixels),
    "segformer": ("SegformerForSemanticSegmentation", SEGFORMER | {"num_labels": 3}, unlabelled),
    "detr": ("DetrForObjectDetection", DETR, unlabelled),
    "esm": ("EsmForMaskedLM", SIZES | {"mask_token_id": 3, "position_embedding_type": "rotary"}, text),
}  # fmt: skip


def build(name: str, table: Mapping[str, Family] = FAMILIES) -> Any:
    """The model, in evaluation mode, with weights large enough to matter."""
    kind, values, _ = table[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    model = made(made.config_class(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:  # sinusoidal positions are computed
                parameter.normal_(0, 0.2)
    return model.eval()


def inputs(name: str) -> dict[str, Tensor]:
    return FAMILIES[name][2]()


@torch.no_grad()
def assert_equal_models(found: Any, wanted: Any, batch: dict[str, Tensor]) -> None:
    """Same class, same tensors bit for bit, same outputs."""
    assert type(found) is type(wanted)
    a, b = found.state_dict(), wanted.state_dict()
    assert list(a) == list(b)
    assert [name for name in b if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []
    first, second = found.eval()(**batch), wanted.eval()(**batch)
    assert torch.equal(first[0], second[0]) and first.keys() == second.keys()
