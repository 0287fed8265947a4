"""A hundred and more families of transformers, tiny and random, for the sweep: class, configuration, inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from families import (
    EXPERTS,
    FAMILIES,
    PATCHES,
    SIDE,
    SIZES,
    VOCABULARY,
    Family,
    class_labels,
    draw,
    pairs,
    pixels,
    text,
    tokens,
    unlabelled,
)
from torch import Tensor

# one size under the names that configurations have for it; each reads those that it knows
TEXT = SIZES | EXPERTS | {
    "n_embd": 16, "d_model": 16, "dim": 16, "emb_dim": 16, "embedding_size": 16, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "n_positions": 32, "n_ctx": 32, "n_inner": 24,
    "d_ff": 24, "d_kv": 8, "ffn_dim": 24, "hidden_dim": 24, "dff": 24, "num_local_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "sliding_window": 8, "state_size": 4, "rotary_dim": 4, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "decoder_start_token_id": 0, "kv_channels": 8,
}  # fmt: skip
HEADS = TEXT | {"head_dim": 8}
LATENT = TEXT | {"v_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
MAMBA |= {"mamba_n_groups": 1, "mamba_chunk_size": 8}
STAGES = {"num_labels": 3, "hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_channels": 3}
LABELLED = PATCHES | {"num_labels": 3}
SOUND = SIZES | {
    "num_labels": 3, "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "squeeze_factor": 2,
    "feat_extract_norm": "layer", "apply_spec_augment": False, "conv_pos_kernel_size": 3, "mask_time_prob": 0.0,
    "hidden_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
TOWERS = {"text_config": SIZES | {"projection_dim": 8}, "vision_config": PATCHES | {"projection_dim": 8}}


def drawn(labels: Callable[[], Tensor] | None = class_labels, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Arguments of these shapes, and labels."""
    return {name: draw(*shape) for name, shape in shapes.items()} | ({"labels": labels()} if labels else {})


def sequence() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def picture_and_text() -> dict[str, Tensor]:
    return text() | small_unlabelled()


waves, spectrum = partial(drawn, input_values=(4, 320)), partial(drawn, input_values=(4, 16, 8))
frames = partial(drawn, partial(tokens, length=5), input_features=(4, 16, 4))
video, large_pixels = (partial(drawn, pixel_values=shape) for shape in ((4, 2, 3, SIDE, SIDE), (4, 3, 32, 32)))
small_unlabelled = partial(drawn, None, pixel_values=(4, 3, SIDE, SIDE))
masked_pixels = partial(small_unlabelled, noise=(4, 4))
series = partial(drawn, None, past_values=(4, 16, 2), future_values=(4, 4, 2))


def _of_classes(
    names: str, ending: str, values: dict[str, Any], inputs: Callable[[], dict[str, Tensor]]
) -> dict[str, Family]:
    """Families of ``name:class``; a class has the ending, unless it says what its head is."""
    pairs = (one.split(":") for one in names.split())
    return {family: (kind if "LMHead" in kind else kind + ending, values, inputs) for family, kind in pairs}


DECODERS = """
    mistral:Mistral ministral:Ministral qwen2:Qwen2 qwen3:Qwen3 gemma:Gemma gemma2:Gemma2 gemma3_text:Gemma3 phi:Phi
    phi3:Phi3 phimoe:Phimoe olmo:Olmo olmo2:Olmo2 olmo3:Olmo3 olmoe:Olmoe flex_olmo:FlexOlmo granite:Granite
    granitemoeshared:GraniteMoeShared cohere:Cohere cohere2:Cohere2 starcoder2:Starcoder2 stablelm:StableLm
    gpt2:GPT2LMHeadModel gpt_neox:GPTNeoX gpt_bigcode:GPTBigCode opt:OPT bloom:Bloom mpt:Mpt persimmon:Persimmon
    nemotron:Nemotron glm:Glm glm4:Glm4 glm4_moe:Glm4Moe helium:Helium hunyuan_v1_dense:HunYuanDenseV1
    hunyuan_v1_moe:HunYuanMoEV1 smollm3:SmolLM3 ernie4_5:Ernie4_5 ernie4_5_moe:Ernie4_5_Moe exaone4:Exaone4 lfm2:Lfm2
    minimax:MiniMax mamba:Mamba falcon_mamba:FalconMamba recurrent_gemma:RecurrentGemma rwkv:Rwkv jetmoe:JetMoe
    llama4_text:Llama4 seed_oss:SeedOss arcee:Arcee apertus:Apertus biogpt:BioGpt xglm:XGLM
    openai-gpt:OpenAIGPTLMHeadModel diffllama:DiffLlama bitnet:BitNet vaultgemma:VaultGemma doge:Doge dots1:Dots1
    nanochat:NanoChat modernbert-decoder:ModernBertDecoder minimax_m2:MiniMaxM2 xlm:XLMWithLMHeadModel
"""
ENCODERS = """
    albert:Albert bert-mlm:Bert big_bird:BigBird camembert:Camembert convbert:ConvBert data2vec-text:Data2VecText
    deberta:Deberta deberta-v2:DebertaV2 distilbert:DistilBert electra:Electra ernie:Ernie eurobert:EuroBert
    flaubert:FlaubertWithLMHeadModel fnet:FNet ibert:IBert layoutlm:LayoutLM megatron-bert:MegatronBert
    modernbert:ModernBert mpnet:MPNet nystromformer:Nystromformer roberta:Roberta
    roberta-prelayernorm:RobertaPreLayerNorm roformer:RoFormer squeezebert:SqueezeBert xlm-roberta:XLMRoberta yoso:Yoso
    longformer:Longformer
"""
TRANSLATORS = """
    mt5:MT5 umt5:UMT5 longt5:LongT5 mbart:MBart pegasus:Pegasus pegasus_x:PegasusX bigbird_pegasus:BigBirdPegasus
    blenderbot:Blenderbot blenderbot-small:BlenderbotSmall m2m_100:M2M100 plbart:PLBart mvp:Mvp nllb-moe:NllbMoe
"""
EYES = """
    deit:DeiT beit:Beit dinov2:Dinov2 vit_msn:ViTMSN ijepa:IJepa data2vec-vision:Data2VecVision
"""
EARS = """
    wav2vec2:Wav2Vec2 hubert:Hubert wavlm:WavLM unispeech:UniSpeech sew:SEW
"""
SWIN = FAMILIES["swin"][1] | {"num_labels": 3}
TABLE: dict[str, Family] = (
    FAMILIES
    | _of_classes(DECODERS, "ForCausalLM", HEADS, text)
    | _of_classes(ENCODERS, "ForMaskedLM", TEXT, sequence)
    | _of_classes(TRANSLATORS, "ForConditionalGeneration", TEXT, pairs)
    | _of_classes(EYES, "ForImageClassification", LABELLED, pixels)
    | _of_classes(EARS, "ForSequenceClassification", SOUND, waves)
    | {
        "qwen2_moe": ("Qwen2MoeForCausalLM", HEADS | {"shared_expert_intermediate_size": 12}, text),
        "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT | {"first_k_dense_replace": 1}, text),
        "gpt_neo": ("GPTNeoForCausalLM", TEXT | {"attention_types": [[["global", "local"], 1]]}, text),
        "gptj": ("GPTJForCausalLM", TEXT, text),
        "codegen": ("CodeGenForCausalLM", TEXT | {"n_head": 4, "num_attention_heads": 4}, text),
        "falcon": ("FalconForCausalLM", TEXT, text),
        "dbrx": ("DbrxForCausalLM", { "vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2,
            "max_seq_len": 32, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config":
            {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}}, text),
        "ctrl": ("CTRLLMHeadModel", TEXT | {"dff": 24}, text),
        "mamba2": ("Mamba2ForCausalLM", SIZES | { "num_heads": 4, "head_dim": 8, "expand": 2, "state_size": 4,
            "n_groups": 1, "chunk_size": 8}, text),
        "bamba": ("BambaForCausalLM", SIZES | MAMBA | {"attn_layer_indices": [1]}, text),
        "granitemoehybrid": ("GraniteMoeHybridForCausalLM", SIZES | MAMBA | { "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 12, "layer_types": ["mamba", "attention"]}, text),
        "qwen3_next": ("Qwen3NextForCausalLM", HEADS | { "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 12, "layer_types":
            ["linear_attention", "full_attention"]}, text),
        "xlnet": ("XLNetLMHeadModel", { "vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner":
            24}, sequence),
        "funnel": ("FunnelForMaskedLM", { "vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner":
            24, "block_sizes": [1, 1], "num_decoder_layers": 1}, sequence),
        "rembert": ("RemBertForMaskedLM", TEXT | { "input_embedding_size": 16, "output_embedding_size": 16}, sequence),
        "mobilebert": ("MobileBertForMaskedLM", TEXT | { "embedding_size": 8, "intra_bottleneck_size": 8,
            "num_feedforward_networks": 1}, sequence),
        "prophetnet": ("ProphetNetForConditionalGeneration", { "vocab_size": VOCABULARY, "hidden_size": 16,
            "encoder_ffn_dim": 24, "num_encoder_layers": 2, "num_encoder_attention_heads": 2, "decoder_ffn_dim": 24,
            "num_decoder_layers": 2, "num_decoder_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
            "decoder_start_token_id": 0}, pairs),
        "led": ("LEDForConditionalGeneration", TEXT | { "attention_window": [4, 4], "max_encoder_position_embeddings":
            32, "max_decoder_position_embeddings": 32}, pairs),
        "switch_transformers": ("SwitchTransformersForConditionalGeneration", TEXT | { "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1, "num_decoder_layers": 2, "expert_capacity": 64}, pairs),
        "siglip": ("SiglipForImageClassification", {"vision_config": PATCHES, "num_labels": 3}, pixels),
        "swinv2": ("Swinv2ForImageClassification", SWIN, pixels),
        "convnext": ("ConvNextForImageClassification", STAGES | {"num_stages": 2}, large_pixels),
        "convnextv2": ("ConvNextV2ForImageClassification", STAGES | {"num_stages": 2}, large_pixels),
        "resnet": ("ResNetForImageClassification", STAGES | {"layer_type": "basic"}, large_pixels),
        "regnet": ("RegNetForImageClassification", STAGES | {"groups_width": 4, "layer_type": "x"}, large_pixels),
        "bit": ("BitForImageClassification", STAGES | {"num_groups": 2}, large_pixels),
        "poolformer": ("PoolFormerForImageClassification", { "num_labels": 3, "hidden_sizes": [8, 16], "depths": [1, 1],
            "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]}, large_pixels),
        "mobilenet_v1": ("MobileNetV1ForImageClassification", { "num_labels": 3, "depth_multiplier": 0.25, "image_size":
            32}, large_pixels),
        "mobilenet_v2": ("MobileNetV2ForImageClassification", { "num_labels": 3, "depth_multiplier": 0.25, "image_size":
            32}, large_pixels),
        "mobilevit": ("MobileViTForImageClassification", { "num_labels": 3, "image_size": 32, "hidden_sizes": [8, 8, 8],
            "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16], "num_attention_heads": 2}, large_pixels),
        "focalnet": ("FocalNetForImageClassification", { "num_labels": 3, "image_size": 32, "patch_size": 4,
            "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]},
            large_pixels),
        "levit": ("LevitForImageClassification", { "num_labels": 3, "image_size": 32, "hidden_sizes": [8, 16, 16],
            "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}, large_pixels),
        "cvt": ("CvtForImageClassification", { "num_labels": 3, "embed_dim": [8, 8, 16], "num_heads": [1, 1, 2],
            "depth": [1, 2, 3], "patch_sizes": [3, 3, 3], "patch_stride": [2, 2, 2], "patch_padding": [1, 1, 1]},
            large_pixels),
        "pvt": ("PvtForImageClassification", { "num_labels": 3, "image_size": 32, "num_encoder_blocks": 2, "depths": [1,
            1], "hidden_sizes": [8, 16], "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2],
            "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}, large_pixels),
        "hiera": ("HieraForImageClassification", { "num_labels": 3, "image_size": [32, 32], "embed_dim": 8, "depths":
            [1, 1], "num_heads": [1, 2], "mlp_ratio": 2.0, "num_query_pool": 1, "patch_stride": [4, 4],
            "masked_unit_size": [2, 2], "query_stride": [2, 2]}, large_pixels),
        "vit_mae": ("ViTMAEForPreTraining", PATCHES | { "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2, "decoder_intermediate_size": 24, "mask_ratio": 0.5}, masked_pixels),
        "yolos": ("YolosForObjectDetection", PATCHES | { "image_size": [SIDE, SIDE], "num_detection_tokens": 4,
            "num_labels": 3}, small_unlabelled),
        "dpt": ("DPTForDepthEstimation", PATCHES | { "image_size": 32, "num_hidden_layers": 4, "backbone_out_indices":
            [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "readout_type": "ignore"},
            unlabelled),
        "glpn": ("GLPNForDepthEstimation", { "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2], "decoder_hidden_size": 8}, unlabelled),
        "timesformer": ("TimesformerForVideoClassification", LABELLED | {"num_frames": 2}, video),
        "videomae": ("VideoMAEForVideoClassification", LABELLED | {"num_frames": 2, "tubelet_size": 1}, video),
        "vivit": ("VivitForVideoClassification", LABELLED | {"num_frames": 2, "tubelet_size": [1, 4, 4]}, video),
        "conditional_detr": ("ConditionalDetrForObjectDetection", FAMILIES["detr"][1], unlabelled),
        "audio-spectrogram-transformer": ("ASTForAudioClassification", LABELLED | { "max_length": 16, "num_mel_bins": 8,
            "frequency_stride": 4, "time_stride": 4}, spectrum),
        "speech_to_text": ("Speech2TextForConditionalGeneration", TEXT | { "input_feat_per_channel": 4, "conv_channels":
            8, "conv_kernel_sizes": [3], "num_conv_layers": 1, "max_source_positions": 16, "max_target_positions": 16},
            frames),
        "wav2vec2-conformer": ("Wav2Vec2ConformerForSequenceClassification", SOUND | { "conv_depthwise_kernel_size": 3},
            waves),
        "clip": ("CLIPModel", TOWERS | {"projection_dim": 8}, picture_and_text),
        "siglip towers": ("SiglipModel", TOWERS, picture_and_text),
        "blip": ("BlipForConditionalGeneration", { "text_config": SIZES | {"encoder_hidden_size": 16, "projection_dim":
            8}, "vision_config": PATCHES, "projection_dim": 8}, picture_and_text),
        "git": ("GitForCausalLM", SIZES | {"vision_config": PATCHES}, picture_and_text),
        "paligemma": ("PaliGemmaForConditionalGeneration", { "text_config": FAMILIES["gemma3"][1]["text_config"] |
            {"model_type": "gemma2"}, "vision_config": PATCHES | {"model_type": "siglip_vision_model"},
            "image_token_index": 63, "projection_dim": 16}, sequence),
        "patchtst": ("PatchTSTForPrediction", { "num_input_channels": 2, "context_length": 16, "patch_length": 4,
            "patch_stride": 4, "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 24,
            "prediction_length": 4}, series),
    }
)  # fmt: skip
