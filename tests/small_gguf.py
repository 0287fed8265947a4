"""Small GGUF files."""

from pathlib import Path
from typing import Any

import numpy as np

TOKENS = ["<s>", *"abcdefghijkl", "Ġ", "ab", "cd"]


def _add_letters(writer: Any) -> None:
    """A tokenizer of letters."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, context: int = 16, template: str | None = None) -> None:
    """A LLaMA of one layer with a vocabulary of letters."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    _add_letters(writer)
    if template is not None:
        writer.add_chat_template(template)
    shapes = {"token_embd": (16, 8), "output_norm": (8,), "output": (16, 8), "blk.0.ffn_down": (8, 16)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8)}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, np.float32))
    _write(writer)


def write_quantised_gguf(path: Path) -> None:
    """An LFM2 of one layer in 8 bits: of this family transformers 5.23 keeps weights packed."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "lfm2")
    writer.add_context_length(16)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv([2])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(3)
    writer.add_rope_freq_base(1e4)
    _add_letters(writer)
    generator = np.random.default_rng(0)
    for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(32 if "_q" in name or "_k" in name else 64, np.float32))
    writer.add_tensor("token_embd_norm.weight", np.ones(64, np.float32))
    layers = [f"attn_{name}" for name in ("q", "k", "v", "output")] + [f"ffn_{name}" for name in ("gate", "up", "down")]
    kind, rows = GGMLQuantizationType.Q8_0, {"token_embd": len(TOKENS)} | {f"blk.0.{layer}": 64 for layer in layers}
    for name, num in rows.items():
        values = generator.standard_normal((num, 64), np.float32)
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)
    _write(writer)
