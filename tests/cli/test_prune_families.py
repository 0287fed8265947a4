"""``prunus prune`` and ``eval`` of folders that hold no causal language model: what they were, they stay."""

import io
import json
import math
import zipfile

import numpy as np
import pytest
import torch
from covering import quickly
from families import FAMILIES, assert_equal_models, build, inputs
from test_prune_command import refused, rows_of, run

from prunus import load_model
from prunus.export.huggingface import load_plain_model

METRICS = {
    "llama": "perplexity", "llama classifier": "accuracy", "bert classifier": "accuracy", "bert": "divergence",
    "t5": "loss", "vit": "accuracy", "whisper": "loss", "mixtral": "perplexity",
}  # fmt: skip
MAGNITUDE = ["--score", "magnitude", "--no-repair"]


def save_batches(path, batch, times=3):
    np.savez(path, **{name: array.repeat(times, *[1] * (array.ndim - 1)).numpy() for name, array in batch.items()})
    return path


@pytest.mark.parametrize("name", quickly(METRICS, "t5", "vit", "bert classifier"))
def test_a_folder_is_pruned_and_written_as_what_it_was(name, tmp_path, capsys):
    model, batch, out, metric = build(name), inputs(name), tmp_path / "out", METRICS[name]
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    data = save_batches(tmp_path / "data.npz", batch)
    run("prune", tmp_path / "model", "--batches", data, *MAGNITUDE, "--samples", 4, "--out", out)
    result = json.loads((out / "result.json").read_text())
    rows, pruned = result["rows"], {row["name"] for row in result["layers"]}
    assert list(rows["dense"]) == ["sparsity", metric] and all(math.isfinite(row[metric]) for row in rows.values())
    assert rows["magnitude"]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    found = type(model).from_pretrained(out)
    for key, parameter in model.named_parameters():
        kept = found.get_parameter(key) != 0
        assert torch.equal(found.get_parameter(key)[kept], parameter[kept])
        assert key in pruned or torch.equal(found.get_parameter(key), parameter)
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (out / "preprocessor_config.json").is_file()
    assert_equal_models(load_plain_model(out), found, batch)
    capsys.readouterr()
    last = {key: array.repeat_interleave(3, 0)[-1:] for key, array in batch.items()}
    more = ["--dense", tmp_path / "model"] if metric == "divergence" else []
    run("eval", out, "--batches", save_batches(tmp_path / "held_out.npz", last, 1), *more)
    said, row = capsys.readouterr().out, rows["magnitude"]
    if FAMILIES[name][2].__name__ in ("classes", "pixels", "text"):  # as it was measured after pruning
        assert f"{metric} {row[metric]:.4f}"[:-1] in said
    assert f"{row['sparsity']:.4%} of" in said


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_models_that_read_tokens_take_token_files(name, tmp_path):
    build(name).save_pretrained(tmp_path / "model")
    np.random.default_rng(0).integers(0, 64, 600).astype("<u2").tofile(tmp_path / "data.u16")
    options = [*MAGNITUDE, "--samples", 4, "--length", 12, "--out", tmp_path / "out"]
    run("prune", tmp_path / "model", "--tokens", tmp_path / "data.u16", *options)
    rows = rows_of(tmp_path / "out")
    assert METRICS[name] in rows["dense"] and rows["magnitude"]["sparsity"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("load", [load_model, load_plain_model])
@pytest.mark.parametrize(
    ("saved", "other", "said"),
    [
        ("llama classifier", "LlamaForCausalLM", "lm_head.weight|score.weight"),
        ("llama", "LlamaForSequenceClassification", "lm_head.weight|score.weight"),
        ("bert classifier", "BertModel", "classifier"),
        ("bert", "BertForSequenceClassification", "classifier"),
    ],
)
def test_a_tensor_too_many_or_too_few_is_one_line(saved, other, said, load, tmp_path):
    build(saved).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [other]}))
    with pytest.raises(ValueError, match=said) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and ("which" in str(error.value))


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in members.items():
            file.writestr(f"{name}.txt", data)
    return out.getvalue()


def array() -> bytes:
    np.save(out := io.BytesIO(), np.ones((4, 6), int))
    return out.getvalue()


BAD = {
    "no such file": (None, "there is no file"),
    "a text as its member": (archive(notes=b"a text"), "its member 'notes.txt' is not an array"),
    "one array": (array(), "not an .npz file of named arrays"),
    "another kind of file": (b"not a zip", "not an .npz file of named arrays"),
    "rows that differ": ({"input_ids": np.ones((4, 6), int), "labels": np.ones(3, int)}, "one row per sample"),
    "no arrays": ({}, "got no arrays"),
    "an unknown name": ({"input_ids": np.ones((4, 6), int), "tokens": np.ones(4, int)}, "holds 'tokens', which"),
    "letters": ({"input_ids": np.full((4, 6), "a")}, "arrays must hold numbers"),
    "objects": ({"input_ids": np.full(4, None)}, "not an .npz file of named arrays"),
    "a wrong shape": ({"input_ids": np.ones((4, 6, 2, 2), int)}, "cannot read samples of input_ids"),
    "a single sample": ({"input_ids": np.ones((1, 6), int)}, "give more, or --eval-batches"),
}


@pytest.mark.parametrize("case", BAD)
def test_batches_that_do_not_fit_are_one_line_and_nothing_is_written(case, tmp_path, capsys):
    build("bert classifier").save_pretrained(tmp_path / "model")
    arrays, said = BAD[case]
    if isinstance(arrays, bytes):
        (tmp_path / "data.npz").write_bytes(arrays)
    elif arrays is not None:
        np.savez(tmp_path / "data.npz", **arrays)
    options = [*MAGNITUDE, "--samples", "1", "--out", tmp_path / "out"]
    assert said in refused(capsys, "prune", tmp_path / "model", "--batches", tmp_path / "data.npz", *options)
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together_are_one_line(tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    build("vit").save_pretrained(model)
    np.zeros(600, "<u2").tofile(tmp_path / "data.u16")
    unlabelled = {name: array for name, array in inputs("vit").items() if name != "labels"}
    tokens, arrays = ["--tokens", tmp_path / "data.u16"], ["--batches", save_batches(tmp_path / "a.npz", inputs("vit"))]
    prune = ["prune", model, "--out", out]
    for said, args in {
        "reads pixel_values, not tokens": [*prune, *tokens, "--length", 8, "--samples", 2],
        "--tokens and --batches": [*prune, *tokens, *arrays],
        "--batches and --eval-tokens are different kinds of samples": [*prune, *arrays, "--eval-tokens", out],
        "give its folder as --dense": ["eval", model, "--batches", save_batches(tmp_path / "b.npz", unlabelled)],
        "--tokens and": ["eval", model, *arrays, "--tokens", out],
    }.items():
        assert said in refused(capsys, *args)


@pytest.mark.parametrize("name", quickly(["bert classifier", "t5", "vit", "mixtral", "gemma3"], "bert classifier"))
def test_a_folder_goes_through_every_command_and_is_read_back_equal_by_plain_transformers(name, tmp_path, capsys):
    model, batch, out, small = build(name), inputs(name), tmp_path / "out", tmp_path / "small"
    model.save_pretrained(tmp_path / "model")
    data = save_batches(tmp_path / "data.npz", batch, 6)
    more = ["--exclude", "*vision*", "*multi_modal*"] if name == "gemma3" else []
    run("prune", tmp_path / "model", "--batches", data, "--samples", 16, *more, "--out", out)
    assert "% of all " in capsys.readouterr().out
    wanted = type(model).from_pretrained(out)
    assert_equal_models(load_plain_model(out), wanted, batch)
    run("export", out, "--out", small, "--check")
    assert f"loaded as {type(model).__name__}" in capsys.readouterr().out
    assert_equal_models(load_model(small), wanted, batch)
    run("export", small, "--out", tmp_path / "back", "--form", "dense")
    assert_equal_models(type(model).from_pretrained(tmp_path / "back"), wanted, batch)
    said = []
    for folder in (out, small):
        run("doctor", folder)
        assert "healthy" in capsys.readouterr().out
        run("eval", folder, "--batches", data)
        said.append(capsys.readouterr().out.partition(": ")[2])
    assert said[0] == said[1]
