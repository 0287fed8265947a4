"""A GGUF file alone is enough: its tokenizer reads the text, and is written beside the pruned model."""

from pathlib import Path

import numpy as np
import pytest

from prunus.cli import main

gguf = pytest.importorskip("gguf")
TOKENS = ["<s>", *"abcdefghijkl", "Ġ", "ab", "cd"]


def write_gguf(path: Path) -> None:
    """A LLaMA of one layer with a vocabulary of letters."""
    writer = gguf.GGUFWriter(path, "llama")
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


def test_a_gguf_file_is_pruned_by_text_and_its_tokenizer_is_written(tmp_path, capsys):
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "unrelated.json").write_text("{}")
    (tmp_path / "text.txt").write_text("abcdefghijkl cabbed " * 60)
    options = ["--text", tmp_path / "text.txt", "--length", 8, "--samples", 4, "--out", tmp_path / "out"]
    main(["prune", *map(str, [tmp_path / "model.gguf", *options])])
    assert "written" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer("cabbed gab")["input_ids"] == own("cabbed gab")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcd")["input_ids"])[-2:] == ["ab", "cd"]
    assert not (tmp_path / "out" / "unrelated.json").exists()
    main(["eval", *map(str, [tmp_path / "out", "--text", tmp_path / "text.txt", "--length", 8])])
    assert "perplexity" in capsys.readouterr().out
