"""A GGUF file alone is enough: its tokenizer reads the text, and is written beside the pruned model."""

from types import SimpleNamespace

import pytest
import torch
from small_gguf import write_gguf, write_quantised_gguf

from prunus.cli import main
from prunus.export import huggingface

pytest.importorskip("gguf")


def gguf_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


@pytest.fixture
def prune(tmp_path, capsys):
    def call(*options):
        (tmp_path / "text.txt").write_text("abcdefghijkl cabbed " * 60)
        options = [*options, "--text", tmp_path / "text.txt", "--length", 8, "--samples", 4, "--out", tmp_path / "out"]
        main(["prune", *map(str, options)])
        assert "written" in capsys.readouterr().out
        main(["eval", *map(str, [tmp_path / "out", "--text", tmp_path / "text.txt", "--length", 8])])
        assert "perplexity" in capsys.readouterr().out

    return call


def test_a_gguf_file_is_pruned_by_text_and_its_tokenizer_is_written(tmp_path, prune):
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "unrelated.json").write_text("{}")
    prune(tmp_path / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = gguf_tokenizer(tmp_path)
    assert tokenizer("cabbed gab")["input_ids"] == own("cabbed gab")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcd")["input_ids"])[-2:] == ["ab", "cd"]
    assert not (tmp_path / "out" / "unrelated.json").exists()


def test_a_file_is_parsed_once_for_the_model(tmp_path, monkeypatch):
    import gguf

    write_gguf(tmp_path / "model.gguf")
    parsed, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed.append(path) or reader(path))
    mine = gguf.GGUFReader
    huggingface.load_any_model(tmp_path, gguf_file="model.gguf")
    assert len(parsed) == 1 and gguf.GGUFReader is mine
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(99))
    with pytest.raises(ValueError, match=r"model.gguf cannot be read"):
        huggingface.load_any_model(tmp_path, gguf_file="model.gguf")
    assert gguf.GGUFReader is mine


def test_the_dense_model_is_evaluated_from_its_gguf_file(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "text.txt").write_text("abcdefghijkl cabbed " * 60)
    model = huggingface.load_any_model(tmp_path, gguf_file="model.gguf")
    model.save_pretrained(tmp_path / "plain")
    gguf_tokenizer(tmp_path).save_pretrained(tmp_path / "plain")
    said = []
    for path in (tmp_path / "model.gguf", tmp_path / "plain"):
        main(["eval", *map(str, [path, "--text", tmp_path / "text.txt", "--length", 8, "--device", "cpu"])])
        said.append(capsys.readouterr().out.removeprefix(f"{path}: "))
    assert said[0] == said[1] and "perplexity" in said[0]


@pytest.mark.parametrize("option", [True, False], ids=["dequantised by option", "by a version without the option"])
def test_weights_that_transformers_could_keep_packed_are_plain_and_written(option, tmp_path, prune, monkeypatch):
    from transformers import AutoModelForCausalLM

    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf", reason="needs transformers 5.23")
    every_kind = SimpleNamespace(supports=lambda kind: True)  # on this machine there is no kernel
    monkeypatch.setattr(quantizer, "get_gguf_kernel", lambda: every_kind if option else False)
    if not option:
        monkeypatch.setattr(huggingface, "_dequantised", dict)
    write_quantised_gguf(tmp_path / "model.gguf")
    prune(tmp_path, "--gguf-file", "model.gguf", "--sparsity", 0.5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 7 and all((layer.weight == 0).float().mean() == 0.5 for layer in layers)
