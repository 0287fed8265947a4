"""Tiny causal language models of transformers, whose texts differ, with zeros in their linear layers."""

from typing import Any

import torch
from families import SIZES, transformers
from torch import nn

LENGTH = 64
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": LENGTH}
WINDOW = {"head_dim": 8, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "GPT2LMHeadModel": GPT2,
    "Gemma2ForCausalLM": WINDOW,
    "Gemma3ForCausalLM": WINDOW,
    "MistralForCausalLM": {"sliding_window": 8},
    "PhiForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "GPTNeoXForCausalLM": {},
    "FalconForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def causal_model(name: str = "LlamaForCausalLM", sparsity: float = 0.0, **options: Any) -> Any:
    kind = getattr(transformers, name)
    sizes = SIZES | {"max_position_embeddings": LENGTH} | FAMILIES[name] | options
    model = kind(kind.config_class(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # so that texts differ
    for layer in model.modules():
        if sparsity and (type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"):
            layer.weight.data[torch.rand_like(layer.weight) < sparsity] = 0
    return model
