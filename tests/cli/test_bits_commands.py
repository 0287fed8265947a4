"""``prunus prune --bits`` and ``prunus export --bits``: what they write, print and refuse."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_prune_command import MINE, data_of, folder, prune, refused, rows_of, run

from prunus import load_model, load_sparse
from prunus.cli.console import Terminal
from prunus.cli.prune_tables import quantised_table
from prunus.export.huggingface import load_any_model
from prunus.oneshot import quantizer
from prunus.oneshot.result import Layer

__all__ = ["folder"]
pytest.importorskip("transformers", reason="needs pip install prunus[hf]")


def zeros_of(model):
    return {name: p == 0 for name, p in model.named_parameters() if p.ndim > 1}


def num_values(model, name):
    """The most different values in a group of 128 columns of a row."""
    weight = model.get_parameter(name).detach()
    return max(len(row[row != 0].unique()) for part in weight.split(128, 1) for row in part)


def pruned_folder(folder: Path) -> Path:
    return prune(folder, "--sparsity", 0.6, out="pruned")[0]


TUNED = pytest.param(8, ["--tune"], marks=pytest.mark.slow)


@pytest.mark.parametrize("bits, options", [(4, []), (3, ["--no-repair"]), TUNED], ids=str)
def test_prune_writes_few_bits_with_the_zeros_it_counts_and_says_what_they_cost(folder, bits, options, capsys):
    out, result = prune(folder, "--sparsity", 0.6, "--bits", bits, *options)
    said = " ".join(capsys.readouterr().out.split())
    model = load_model(out)
    for layer in result["layers"]:
        assert int((model.get_parameter(layer["name"]) == 0).sum()) == layer["num_pruned"]
        assert num_values(model, layer["name"]) <= 2**bits and layer["bits"] == bits and layer["bits_error"] > 0
    last = f"{'wanda' if '--no-repair' in options else 'repaired'}, {bits} bits"
    assert next(iter(rows_of(out))) == "dense" and [*rows_of(out)][-1] == last and last in said
    assert f"in {bits} bits" in said and f"{result['bits_a_weight']:.2f} bits a weight" in said
    size = (out / "sparse.safetensors").stat().st_size
    assert f"became {size:,}" in said and not (out / "model.safetensors").exists()
    assert f"--bits {bits}" in (out / "README.md").read_text() and "load_model" in (out / "README.md").read_text()
    assert (out / "tokenizer.json").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "out", "valid.u16"]


@pytest.mark.slow
def test_the_figure_of_the_last_row_is_that_of_the_folder(folder, capsys):
    out, _ = prune(folder, "--bits", 4)
    capsys.readouterr()
    run("eval", out, "--tokens", folder / "valid.u16", "--length", 12, "--eval-windows", 6)
    assert f"{rows_of(out)['repaired, 4 bits']['perplexity']:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_after_a_recovery_the_recovered_weights_are_rounded(folder, capsys):
    out, result = prune(folder, "--sparsity", 0.6, "--bits", 4, "--recover", 400)
    said = capsys.readouterr().out
    rows = result["rows"]
    assert [*rows] == ["dense", "masks alone", "repaired", "recovered", "recovered, 4 bits"]
    assert len({rows[name]["sparsity"] for name in [*rows][1:]}) == 1
    assert all(layer["bits"] == 4 and layer["error"] is not None for layer in result["layers"])
    assert "in 4 bits alone" in said and "zeros kept" in said and "recovery" in result
    assert all(num_values(load_model(out), layer["name"]) <= 16 for layer in result["layers"])
    assert not (folder / ".out.unfinished").exists()


@pytest.mark.parametrize("options", [["--samples", 4, "--length", 12], []], ids=["calibrated", "nearest"])
def test_export_rounds_what_is_pruned_and_keeps_every_zero(folder, options, capsys):
    pruned = pruned_folder(folder)
    capsys.readouterr()
    data = ["--tokens", folder / "calib.u16"] if options else []
    run("export", pruned, "--bits", 4, *data, *options, "--out", folder / "small")
    said = " ".join(capsys.readouterr().out.split())
    before, after = load_model(pruned), load_model(folder / "small")
    wanted, zeros = zeros_of(before), zeros_of(after)
    assert all(torch.equal(zeros[name], own) for name, own in wanted.items())
    result = json.loads((folder / "small" / "result.json").read_text())
    assert all(num_values(after, layer["name"]) <= 16 and layer["bits"] == 4 for layer in result["layers"])
    assert torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert "weights quantised to 4 bits" in said and "bits a weight" in said and "bytes before" in said
    assert ("rounded to the nearest" in said) == (not options) == (" error " not in said)
    assert [*result["rows"]] == (["as it came", "in 4 bits"] if options else [])
    assert "prunus export pruned" in (folder / "small" / "README.md").read_text()
    assert (folder / "small" / "tokenizer.json").is_file() and not list(folder.glob(".*"))


@pytest.mark.slow
def test_the_nearest_values_lose_more_than_calibrated_ones(folder):
    pruned = pruned_folder(folder)
    run("export", pruned, "--bits", 3, "--tokens", folder / "calib.u16", "--length", 12, "--out", folder / "a")
    run("export", pruned, "--bits", 3, "--out", folder / "b")
    ids = torch.from_numpy(np.fromfile(folder / "calib.u16", "<u2")[:384].astype(np.int64)).view(32, 12)
    wanted = load_model(pruned)(ids).logits
    lost = [(load_model(folder / name)(ids).logits - wanted).square().mean().item() for name in "ab"]
    assert lost[0] < lost[1]


@pytest.mark.slow
def test_other_commands_read_the_folder(folder, capsys):
    small, _ = prune(folder, "--sparsity", 0.6, "--bits", 4, out="small")
    run("doctor", small)
    run("export", small, "--form", "dense", "--out", folder / "plain", "--check")
    run("report", small)
    values, plain = load_model(small).state_dict(), load_model(folder / "plain").state_dict()
    assert all(torch.equal(values[name], plain[name]) for name in values)


@pytest.mark.slow
def test_pruning_a_folder_of_few_bits_further_says_that_the_result_is_of_full_size_without_bits(folder, capsys):
    small, _ = prune(folder, "--sparsity", 0.6, "--bits", 4, out="small")
    for options, is_full in (([], True), (["--bits", 4], False)):
        capsys.readouterr()
        out = folder / f"full {is_full}"
        run("prune", small, *data_of(folder), "--sparsity", 0.8, *options, "--out", out)
        assert (
            ("without --bits the pruned model is written in full size" in capsys.readouterr().out)
            == is_full
            == (out / "model.safetensors").exists()
        )


@pytest.mark.slow
def test_the_folder_writes_text_takes_advice_and_recovers(folder, capsys):
    small, _ = prune(folder, "--sparsity", 0.6, "--bits", 4, out="small")
    run("generate", small, "--tokens", 1, 2, 3, "--max-new-tokens", 4, "--device", "cpu")
    assert len(capsys.readouterr().out.splitlines()[-1].split()) == 7
    run("export", small, "--advise", "--prompt-tokens", 4)
    data = ("--tokens", folder / "calib.u16", "--budget", 200, "--length", 12, "--batch", 4, "--lr", "1e-3")
    run("recover", small, "--teacher", folder / "model", *data, "--out", folder / "recovered")
    assert "zeros kept" in capsys.readouterr().out
    assert all(
        torch.equal(own, zeros_of(load_model(small))[name])
        for name, own in zeros_of(load_any_model(folder / "recovered")).items()
    )


@pytest.mark.parametrize("command", ["prune --sparsity 0 --no-repair", "export"])
def test_a_dense_model_is_told_which_tools_are_for_it(folder, command, capsys):
    name, *options = command.split()
    more = data_of(folder) if name == "prune" else ["--tokens", folder / "calib.u16"]
    run(name, folder / "model", *options, *more, "--samples", 4, "--length", 12, "--bits", 4, "--out", folder / "out")
    said = capsys.readouterr().out
    assert (
        "has no zeros" in said
        and "bits a kept weight" not in said
        and all(tool in said for tool in ("torchao", "llm-compressor", "llama.cpp"))
    )
    load_model(folder / "out")


def test_a_function_of_a_users_own_is_written_with_the_line_that_loads_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_bits.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run(*"prune mine_bits:subject --sparsity 0.6 --bits 4 --out out".split())
    assert 'model.load_state_dict(load_sparse("out"))' in capsys.readouterr().out
    model = sys.modules["mine_bits"].subject()["model"]
    model.load_state_dict(load_sparse("out"))
    assert num_values(model, "0.weight") <= 16
    run("doctor", "out")


@pytest.mark.slow
@pytest.mark.usefixtures("few_weights")
@pytest.mark.parametrize("command", [pytest.param("prune", marks=pytest.mark.slow), "export"])
def test_a_run_of_train_is_rounded_on_its_own_data_and_evaluated(tmp_path, command, capsys):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    options = "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --warmup 1".split()
    run("train", *options, "--data", tmp_path / "data.txt", "--out", tmp_path / "run")
    capsys.readouterr()
    run(command, tmp_path / "run", "--bits", 4, "--samples", 4, "--out", tmp_path / "small")
    perplexity = [*rows_of(tmp_path / "small").values()][-1]["perplexity"]
    capsys.readouterr()
    run("eval", tmp_path / "small")
    assert f"{perplexity:.3f}" in capsys.readouterr().out
    run("doctor", tmp_path / "small")


RECOVERED = pytest.param("prune --recover 200", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", RECOVERED])
def test_interrupted_it_goes_on_with_the_next_layers_and_writes_the_same(folder, command, monkeypatch):
    name, *options = command.split()
    data = ["--bits", 4, *options, "--tokens", folder / "calib.u16", "--samples", 4, "--length", 12]
    source = folder / "model" if options else pruned_folder(folder)
    run(name, source, *data, "--out", folder / "whole")
    solved, calls = quantizer._solved, []

    def stopping(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return solved(*args)

    monkeypatch.setattr(quantizer, "_solved", stopping)
    with pytest.raises(SystemExit):
        run(name, source, *data, "--out", folder / "out")
    assert (folder / ".out.unfinished" / "bits").is_dir() and not (folder / "out").exists()
    run(name, source, *data, "--out", folder / "out")
    assert len(calls) == 9  # of two blocks with four groups each, the one that was interrupted is done again
    first, second = (load_sparse(folder / name) for name in ("whole", "out"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (folder / ".out.unfinished").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--bits", "5"], "--bits"),
        (["--bits", "4", "--form", "dense"], "leave off --form"),
        (["--bits", "4", "--check"], "leave off --check"),
        (["--bits", "4", "--max-shard-size", "1GB"], "leave off --max-shard-size"),
        (["--bits", "4", "--advise"], "--advise measures and writes nothing"),
        (["--bits", "4", "--batch", "2"], "--batch says what --advise measures"),
        (["--text", "story.txt"], "--text says what --bits calibrates on"),
        (["--device", "cuda"], "--device says what --advise measures"),
        (["--bits", "4", "--samples", "4"], "nothing reads --samples"),
        (["--bits", "4", "--length", "4"], "nothing reads --length"),
        (["--bits", "4", "--tokens", "nowhere.u16"], "nowhere.u16"),
        (["--bits", "4", "--device", "nowhere"], "nowhere"),
        (["--bits", "4", "--private"], "without --push"),
        (["--bits", "4", "--out", "small.safetensors"], "--bits writes a folder"),
        (["--bits", "4", "--out", __file__ + "/out"], "is not a folder that you can write to"),
    ],
    ids=str,
)
def test_a_mistake_in_export_is_one_line_and_writes_nothing(folder, options, said, capsys):
    assert said in refused(capsys, "export", folder / "model", "--out", folder / "out", *options)
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "valid.u16"]


def test_sources_without_a_model_are_refused(folder, capsys):
    for source in (folder / "model" / "model.safetensors", folder):
        said = refused(capsys, "export", source, "--bits", 4, "--out", folder / "out")
        assert "--bits runs the model" in said
    assert "there is no --out" not in refused(capsys, "export", folder / "model", "--bits", 4)
    shutil.rmtree(folder / "model")
    assert "neither a Hugging Face folder" in refused(capsys, "export", folder / "model", "--bits", 4, "--out", "out")


def test_a_mistake_in_prune_is_one_line_and_writes_nothing(folder, capsys):
    command = ["prune", folder / "model", *data_of(folder), "--out", folder / "out"]
    assert "--bits is one of 3, 4, 8; got '5'" in refused(capsys, *command, "--bits", 5)
    assert "prune, then quantise" in refused(capsys, *command, "--bits", 4, "--probe", "block")
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "valid.u16"]


def test_the_table_of_quantised_layers_fits_eighty_columns():
    name = "model.layers.0.self_attn.q_proj.weight"
    layers = [Layer(name, (8, 8), 64, 32, 32, bits=4, bits_error=0.12)]
    console = Terminal(width=80)
    with console.capture() as shown:
        console.print(quantised_table(SimpleNamespace(layers=layers), {}, 80))
    assert max(map(len, shown.get().splitlines())) <= 80 and " model.layers.*.self_attn.q_proj " in shown.get()
    assert all(heading in shown.get() for heading in (" error ", " bits a weight ", " after "))
