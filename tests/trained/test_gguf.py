"""A GGUF file alone is enough: its tokenizer reads the text, and is written beside the pruned model."""

import pytest
from small_gguf import write_gguf

from prunus.cli import main

pytest.importorskip("gguf")


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
