"""``prunus recover`` and ``prunus prune --recover``: what they write and print, and their errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_prune_command import refused, run

from prunus import load_model, quantize, save_model
from prunus.export.huggingface import load_any_model
from prunus.grids import check_on_grid, on_grids

FAST = "--budget 400 --length 12 --batch 4 --eval-windows 6".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny Llama with a tokenizer, text of its words, and the model pruned to a half."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("recover")
    words = [f"w{i}" for i in range(38)]
    vocab = {word: i for i, word in enumerate(["<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / "dense")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=32, initializer_range=0.4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "dense")
    (folder / "corpus").mkdir()
    draw = np.random.default_rng(0)
    for name in ("a.txt", "b.txt"):
        text = "\n".join(" ".join(draw.choice(words, 12)) for _ in range(40))
        (folder / "corpus" / name).write_text(text)
    data = ("--text", folder / "corpus", "--samples", 8, "--length", 12, "--eval-windows", 6)
    run("prune", folder / "dense", *data, "--sparsity", 0.5, "--out", folder / "pruned")
    return folder


def zeros_of(folder):
    from safetensors.torch import load_file

    return {name: tensor == 0 for name, tensor in load_file(folder / "model.safetensors").items() if tensor.ndim > 1}


def recover(made, out, *more):
    data = ("--teacher", made / "dense", "--text", made / "corpus", *FAST)
    run("recover", made / "pruned", *data, "--out", out, *more)


def test_the_folder_is_complete_and_every_zero_is_where_it_was(made, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recover(made, tmp_path / "out")
    said = capsys.readouterr().out
    before, after = zeros_of(made / "pruned"), zeros_of(tmp_path / "out")
    assert all(torch.equal(after[name], zeros) for name, zeros in before.items()) and len(after) == len(before)
    num = sum(int(zeros.sum()) for zeros in before.values())
    assert f"{num:,} zeros kept" in said and "out: written" in said and "perplexity" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    AutoTokenizer.from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    figures = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert figures["after"]["kl"] < figures["before"]["kl"] and figures["settings"]["budget"] == "400"
    assert "- recovery: " in (tmp_path / "out" / "README.md").read_text()

    (tmp_path / ".out.unfinished").mkdir()  # as a kill leaves it right after the folder is in its place
    recover(made, tmp_path / "out")
    assert "out: already written" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_small_folder_with_codes_recovers_into_one_with_the_same_codes(made, tmp_path, capsys):
    model = load_any_model(made / "pruned").bfloat16()
    quantize(model, bits=4, progress=False)
    save_model(model, tmp_path / "small", source=made / "pruned")
    run("recover", tmp_path / "small", "--teacher", made / "dense", "--text", made / "corpus", *FAST,
        "--out", tmp_path / "out")  # fmt: skip
    assert "Codes of 14 layers stay fixed" in capsys.readouterr().out
    before, after = (load_model(tmp_path / name) for name in ("small", "out"))
    old, new = on_grids(before), on_grids(after)
    assert old.keys() == new.keys() and not torch.equal(*(next(iter(each.values())).scales for each in (old, new)))
    for name, on_grid in new.items():
        one, two = before.get_parameter(name), after.get_parameter(name)
        check_on_grid(name, two, on_grid)
        codes = [on_grid.grid.codes(w, g.scales)[one != 0] for w, g in ((one, old[name]), (two, on_grid))]
        assert torch.equal(*codes) and torch.equal(one == 0, two == 0)
    assert (
        "- recovery: " in (tmp_path / "out" / "README.md").read_text()
        and (tmp_path / "out" / "tokenizer.json").exists()
    )


def test_pruning_and_recovery_in_one_command(made, tmp_path, capsys):
    data = ("--text", made / "corpus", "--samples", 8, "--length", 12, "--eval-windows", 6)
    run("prune", made / "dense", *data, "--sparsity", 0.5, "--recover", 400, "--out", tmp_path / "out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(result["rows"]) == ["dense", "masks alone", "repaired", "recovered"]
    assert result["rows"]["recovered"]["sparsity"] == result["rows"]["repaired"]["sparsity"]
    assert result["recovery"]["after"]["kl"] <= result["recovery"]["before"]["kl"]
    assert "zeros kept" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_classifiers_learn_from_arrays(tmp_path, capsys):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(image_size=8, patch_size=4, num_labels=5, num_channels=1, initializer_range=0.4, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    images = np.random.default_rng(0).normal(size=(64, 1, 8, 8)).astype("float32")
    np.savez(tmp_path / "data.npz", pixel_values=images, labels=np.arange(64) % 5)
    run("prune", tmp_path / "dense", "--batches", tmp_path / "data.npz", "--samples", 16, "--out", tmp_path / "pruned")
    data = ("--batches", tmp_path / "data.npz", "--budget", 400, "--batch", 16)
    run("recover", tmp_path / "pruned", "--teacher", tmp_path / "dense", *data, "--out", tmp_path / "out")
    assert "accuracy" in capsys.readouterr().out
    before, after = zeros_of(tmp_path / "pruned"), zeros_of(tmp_path / "out")
    assert all(torch.equal(after[name], zeros) for name, zeros in before.items())


def test_bad_input_gets_one_line_and_writes_nothing(made, tmp_path, capsys):
    from transformers import AutoTokenizer, LlamaForCausalLM

    other = tmp_path / "other"
    LlamaForCausalLM.from_pretrained(made / "dense").save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(made / "dense")
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    (tmp_path / "short.txt").write_text("w1 w2")
    (tmp_path / "there").mkdir()
    before, _ = sorted(tmp_path.iterdir()), capsys.readouterr()
    text, teacher = ("--text", made / "corpus"), ("--teacher", made / "dense")
    cases = {
        "different tokenizers": (made / "pruned", "--teacher", other, *text),
        "is the pruned model itself": (made / "pruned", "--teacher", made / "pruned", *text),
        "neither a Hugging Face folder": (made / "pruned", "--teacher", tmp_path, *text),
        "not a Hugging Face folder": (tmp_path, *teacher, *text),
        "a budget is a number": (made / "pruned", *teacher, *text, "--budget", "many"),
        "needs samples": (made / "pruned", *teacher),
        "is there already": (made / "pruned", *teacher, *text, "--out", tmp_path / "there"),
        "a window has": (made / "pruned", *teacher, "--text", tmp_path / "short.txt"),
        "torchrun": (made / "pruned", *teacher, *text, "--parallel", "fsdp"),
        "must be at least 0": (made / "pruned", *teacher, *text, "--batch", "-1"),
    }
    for said, args in cases.items():
        out = () if "--out" in args else ("--out", tmp_path / "out")
        assert said in refused(capsys, "recover", *args, *out), said
        assert sorted(tmp_path.iterdir()) == before, said
    both = ("--text", made / "corpus", "--out", tmp_path / "out", "--recover")
    assert "a budget is a number" in refused(capsys, "prune", made / "dense", *both, "0")
    assert "not --calibrate self" in refused(
        capsys, "prune", made / "dense", "--calibrate", "self", "--eval-text", made / "corpus", *both[2:], "400"
    )


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["auto", "fsdp"])
def test_two_processes_write_one_folder(made, tmp_path, parallel):
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "prunus"]
    call += ["recover", made / "pruned", "--teacher", made / "dense", "--text", made / "corpus", *FAST]
    call += ["--parallel", parallel, "--out", tmp_path / "out"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(list(map(str, call)), capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = zeros_of(made / "pruned"), zeros_of(tmp_path / "out")
    assert all(torch.equal(after[name], zeros) for name, zeros in before.items())
    assert done.stdout.count("written") == 1 and [path.name for path in tmp_path.iterdir()] == ["out"]
