"""A small GGUF file."""

from pathlib import Path

import numpy as np

TOKENS = ["<s>", *"abcdefghijkl", "Ġ", "ab", "cd"]


def write_gguf(path: Path) -> None:
    """A LLaMA of one layer with a vocabulary of letters."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (16, 8), "output_norm": (8,), "output": (16, 8), "blk.0.ffn_down": (8, 16)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,), "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8)}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
