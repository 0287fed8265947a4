"""``prunus prune``: the folder it writes, the comparison it prints, and its errors."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import quickly
from safetensors.torch import load_file
from small_gguf import write_gguf

from prunus import load_sparse
from prunus.cli import main
from prunus.cli.console import Terminal
from prunus.cli.prune_tables import _kinds
from prunus.files.lock import try_lock
from prunus.oneshot.result import Layer
from prunus.plot import layers_svg
from prunus.trained.quality import token_quality

DATA = os.environ.get("PRUNUS_DATA")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a folder in which nobody can write")
FAST = "--samples 4 --length 12 --eval-windows 6".split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama in a Hugging Face folder, with token files beside it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    draw = np.random.default_rng(0)
    for name in ("calib", "valid"):
        draw.integers(0, 40, 400).astype("<u2").tofile(tmp_path / f"{name}.u16")
    return tmp_path


def run(*args):
    main([str(arg) for arg in args])


def rows_of(out):
    return json.loads((out / "result.json").read_text())["rows"]


def data_of(folder):
    return ["--tokens", folder / "calib.u16", "--eval-tokens", folder / "valid.u16"]


def prune(folder, *args, out="out"):
    run("prune", folder / "model", *FAST, *data_of(folder), "--out", folder / out, *args)
    return folder / out, json.loads((folder / out / "result.json").read_text())


def assert_equal_folders(*folders):
    """The same tensors and figures."""
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    first, second = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert first["layers"] == second["layers"] and first["rows"] == second["rows"]


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]  # transformers shows its progress there, too


def test_a_small_folder_is_pruned_as_the_plain_one(folder):
    plain, _ = prune(folder, "--no-repair", out="plain")
    run("export", folder / "model", "--out", folder / "small")
    shutil.move(folder / "model", folder / "dense")
    shutil.move(folder / "small", folder / "model")
    assert_equal_folders(plain, prune(folder, "--no-repair", out="again")[0])


@pytest.mark.parametrize(
    "options",
    [
        ["--score", "magnitude", "--no-repair"],
        ["--scope", "2:4", "--no-repair"],
        ["--score", "wanda", "--probe", "block", "--tau", "0.05"],
        ["--score", "magnitude", "--probe", "sequential", "--tau", "target"],
        ["--score", "fisher", "--probe", "joint", "--tau", "adaptive", "--scope", "layer"],
    ],
    ids=" ".join,
)
def test_a_hugging_face_folder_comes_back_as_one_that_transformers_reads(folder, options, capsys):
    transformers = pytest.importorskip("transformers")
    out, result = prune(folder, *options)
    said = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    zeros = {row["name"]: int((model.get_parameter(row["name"]) == 0).sum()) for row in result["layers"]}
    assert zeros == {row["name"]: row["num_pruned"] for row in result["layers"]}
    for name, parameter in model.named_parameters():
        kept = parameter != 0
        assert torch.equal(parameter[kept], dense.get_parameter(name)[kept])
    assert (out / "tokenizer.json").is_file() and not (folder / "out.part").exists()
    last = list(result["rows"].values())[-1]
    ids = np.fromfile(folder / "valid.u16", "<u2").astype(np.int64)
    windows = torch.from_numpy(ids[: 33 * 12].reshape(33, 12)[[2, 8, 13, 19, 24, 30]])  # the middles of six parts
    assert token_quality(model, windows).perplexity == pytest.approx(last["perplexity"], rel=1e-6)
    assert token_quality(dense, windows).perplexity == pytest.approx(result["rows"]["dense"]["perplexity"], rel=1e-6)
    assert ("probed" in result["rows"]) == ("--probe" in options) and "dense" in said
    if "target" in options or "--probe" not in options:
        assert last["sparsity"] == pytest.approx(0.5, abs=1e-3)
    if "--probe" in options:
        (alone,) = [row for name, row in result["rows"].items() if name.endswith("alone")]
        assert alone["sparsity"] == pytest.approx(last["sparsity"], abs=0.04)


REPAIRED = [], ["--scope", "2:4"], ["--score", "wanda"]


@pytest.mark.parametrize(
    "options",
    quickly([*REPAIRED, ["--allocate", "fisher"], ["--probe", "joint", "--repair-probe"]], *REPAIRED),
    ids=" ".join,
)
def test_by_default_the_weights_that_stay_are_repaired(folder, options, capsys):
    transformers = pytest.importorskip("transformers")
    out, result = prune(folder, *options)
    said, rows = capsys.readouterr().out, result["rows"]
    assert next(iter(rows)) == "dense" and [*rows][-2:] == ["masks alone", "repaired"]
    assert rows["masks alone"]["sparsity"] == rows["repaired"]["sparsity"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for row in result["layers"]:
        assert int((model.get_parameter(row["name"]) == 0).sum()) == row["num_pruned"]
        assert row["error"] <= row["mask_error"]
    assert "error, mask alone" in said and "repaired" in said
    assert "model.layers.*.mlp.up_proj" in said and "model.layers.1.mlp.up_proj" not in said
    assert (out / "layers.svg").read_text() == layers_svg(result["layers"])
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "out", "valid.u16"]


def test_figures_of_a_recovery_before_the_pruning_are_not_copied(folder):
    (folder / "model" / "recovery.json").write_text("{}")
    out, _ = prune(folder)
    assert not (out / "recovery.json").exists() and (out / "tokenizer.json").exists()


@pytest.mark.slow
def test_what_recovers_learns_from_the_data_as_well_where_that_is_asked(folder):
    recovered = [prune(folder, "--recover", 400, *more, out=f"out{len(more)}")[0] for more in ([], ["--hard", 0.5])]
    first, second = (load_file(out / "model.safetensors") for out in recovered)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name] == 0, second[name] == 0) for name in first if "proj" in name)


def test_every_layer_is_shown_on_request_and_the_report_has_table_and_picture(folder, capsys):
    out, result = prune(folder, "--every-layer")
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().out
    run("report", out)
    page = (out / "report.html").read_text()
    assert (out / "layers.svg").read_text() in page and "50% of the weights are zero" in page
    assert all(f"{row['perplexity']:.4f}" in page for row in result["rows"].values())
    result["layers"][0]["name"] = "<script>"
    (out / "result.json").write_text(json.dumps(result))
    run("report", out)
    assert "<script>" not in (out / "report.html").read_text()
    (out / "result.json").write_text(json.dumps(result | {"layers": [{"name": "w"}]}))
    assert "layers[0].sparsity should be a number from 0 to 1" in refused(capsys, "report", out)


@pytest.mark.slow
def test_calibration_text_may_be_the_models_own(folder, capsys):
    command = ["prune", folder / "model", *FAST, "--eval-tokens", folder / "valid.u16", "--calibrate", "self", "--out"]
    for out in ("first", "second"):
        run(*command, folder / out)
    assert_equal_folders(folder / "first", folder / "second")
    assert "repaired" in rows_of(folder / "first")
    assert "leave off --tokens" in refused(capsys, *command, folder / "third", "--tokens", folder / "calib.u16")


def test_batches_cannot_be_held_out_where_the_model_writes_the_text(folder, capsys):
    np.savez(folder / "rows.npz", input_ids=np.zeros((4, 8), np.int64))
    command = ["prune", folder / "model", "--eval-batches", folder / "rows.npz", "--calibrate", "self"]
    assert "must be text, too: give --eval-text" in refused(capsys, *command, "--out", folder / "out")
    assert not (folder / "out").exists()


def test_lengths_that_an_evaluation_could_not_use_are_refused(folder, capsys):
    np.savez(folder / "rows.npz", input_ids=np.zeros((4, 8), np.int64))
    how = ["--batches", folder / "rows.npz", "--length", "4"]
    assert "--length is for text and tokens; leave it off" in refused(capsys, "eval", folder / "model", *how)
    how = ["--tokens", folder / "valid.u16", "--length", "4096"]
    assert "--length 4096 is more than the" in refused(capsys, "eval", folder / "model", *how)


def test_killed_when_only_its_own_folder_was_left_to_remove_the_same_command_removes_it(folder, capsys):
    command = ["prune", folder / "model", *FAST, *data_of(folder), "--no-repair", "--out", folder / "out"]
    run(*command)
    written = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    (folder / ".out.unfinished" / ".out.host.1.01234567.part").mkdir(parents=True)
    assert "is there already" in refused(capsys, *command, "--sparsity", "0.3")  # another command's
    assert (folder / ".out.unfinished").is_dir()
    run(*command)
    assert "out: already written" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "out", "valid.u16"]
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == written


@pytest.mark.parametrize("options", [[], ["--no-repair"], ["--recover", "2k"], ["--bits", "4"]], ids=str)
def test_a_dry_run_says_what_it_takes_and_writes_nothing(options, folder, capsys):
    before = sorted(folder.rglob("*"))
    run("prune", folder / "model", *FAST, *data_of(folder), "--out", folder / "out", "--dry-run", *options)
    said = capsys.readouterr().out
    assert "2 blocks of at most" in said and "Nothing was written." in said
    assert ("recovery is not part" in said) == ("--recover" in options)
    assert ("first block" in said) == ("--no-repair" not in options)
    assert sorted(folder.rglob("*")) == before


def test_two_at_once_do_not_share_a_folder_to_work_in(folder, capsys):
    (folder / ".out.unfinished").mkdir()
    with try_lock(folder / ".out.unfinished"):
        line = refused(capsys, "prune", folder / "model", "--out", folder / "out")
    assert "another process is working in" in line and "choose another place" in line


@pytest.mark.slow
def test_a_profile_says_where_the_time_went_and_what_to_change(folder, capsys):
    _, result = prune(folder, "--probe", "sequential", "--tau", "0.05", "--profile")
    said, profile = capsys.readouterr().out, result["profile"]
    assert set(profile["seconds"]) == {"scores", "inspection", "records", "evaluation", "other"}
    assert profile["rows"] > 0 and profile["used_bytes"] > 0 and profile["left_bytes"] > 0
    assert profile["utilisation"] is None and "GPU busy" not in said
    assert all(line in said for line in profile["advice"]) and any("CPU thread" in line for line in profile["advice"])
    assert all(part in said for part in ("where time and memory went", "memory left", *profile["seconds"]))


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--probe", "block", "--tau", "0.05"], []], ids=" ".join)
def test_offloaded_it_comes_to_the_same(folder, options):
    assert_equal_folders(prune(folder, *options)[0], prune(folder, *options, "--offload", out="moved")[0])


def test_with_little_memory_for_activations_it_comes_to_the_same(folder, capsys):
    out, _ = prune(folder)
    assert_equal_folders(out, prune(folder, "--memory", "1KB", out="limited")[0])
    figures = []
    for memory in ([], ["--memory", "1KB"]):
        capsys.readouterr()
        run("eval", out, "--tokens", folder / "valid.u16", "--length", 12, *memory)
        figures.append(capsys.readouterr().out)
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_bfloat16_stays_bfloat16(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").bfloat16()
    model.save_pretrained(folder / "model")
    out, _ = prune(folder, "--probe", "block", "--tau", "0.05")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert all(parameter.dtype == torch.bfloat16 for parameter in again.parameters())


@pytest.mark.slow
def test_a_gguf_file_comes_back_as_a_folder_of_plain_weights(folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    options = ["--probe", "block", "--tau", "0.05"]
    for name in ("calib.u16", "valid.u16"):
        (np.fromfile(folder / name, "<u2") % 16).tofile(folder / name)
    shutil.rmtree(folder / "model")
    (folder / "packed").mkdir()
    write_gguf(folder / "packed" / "small.gguf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "packed", gguf_file="small.gguf")
    vars(loaded.config).pop("quantization_config", None)
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder / "model")
    plain, _ = prune(folder, *options, out="plain")
    shutil.move(folder / "model", folder / "loaded")
    shutil.move(folder / "packed", folder / "model")
    assert_equal_folders(plain, prune(folder, *options, "--gguf-file", "small.gguf")[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sparsity", "1.0"], "[0, 1)"),
        (["--probe", "block", "--tau", "much"], "much"),
        (["--tau", "2.0"], "without --probe nothing reads --tau"),
        (["--zero-gradient", "keep"], "without --probe nothing reads --zero-gradient"),
        (["--probe", "block", "--tau", "-1"], "at least 0"),
        (["--samples", "4000"], "there are 33"),
        (["--tokens", "nowhere.u16"], "nowhere.u16"),
        (["--exclude", "nothing.*"], "nothing.*"),
        (["--tokens", "story.txt"], "story.txt is not a file of uint16 tokens"),
        (["--eval-tokens", "story.txt.gz"], "tokenizer.encode"),
        (["--scope", "2:4", "--sparsity", "0.3"], "--scope 2:4 removes half, not 0.3"),
        (["--scope", "2:4", "--probe", "block"], "--probe less than that"),
        (["--hard", "0.5"], "without --recover nothing reads --hard"),
        (["--no-repair", "--damping", "0.1"], "without a repair nothing reads --damping"),
        (["--repair-probe"], "without --probe nothing reads --repair-probe"),
        (["--scope", "row", "--allocate", "erk"], "use --scope layer"),
        (["--allocate", "moments"], "has none: they are in a checkpoint of prunus"),
        (["--out", __file__ + "/out"], "is not a folder that you can write to"),
        pytest.param(["--out", "/proc/out"], "/proc/.out.unfinished", marks=LINUX),
        (["--out", __file__], "is there already"),
        (["--device", "nowhere"], "nowhere"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--dtype", "float17"], "float17"),
        (["--eval-windows", "-3"], "--eval-windows must be at least 0"),
        (["--length", "-3"], "--length must be at least 0"),
        (["--samples", "0"], "at least 1"),
        (["--memory", "much"], "a size is a positive number with B, KB, MB or GB"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(folder, options, said, capsys):
    command = ["prune", folder / "model", *FAST, *data_of(folder), "--out", folder / "out", *options]
    assert said in refused(capsys, *command)
    assert sorted(path.name for path in folder.iterdir()) == ["calib.u16", "model", "valid.u16"]


def test_what_is_there_is_not_overwritten_and_what_is_not_there_is_named(folder, capsys):
    (folder / "out").mkdir()
    new = ["--out", folder / "new"]
    assert "is there already" in refused(capsys, "prune", folder / "model", "--out", folder / "out")
    assert "neither a folder" in refused(capsys, "prune", folder / "nowhere", *new)
    assert "--tokens" in refused(capsys, "prune", folder / "model", *new)
    assert "nomodule" in refused(capsys, "prune", "nomodule:f", *new)
    np.full(400, 50).astype("<u2").tofile(folder / "calib.u16")
    assert "token 50" in refused(capsys, "prune", folder / "model", *data_of(folder), *new)


@pytest.mark.parametrize(
    ("asked", "num"),
    [([], "20 of 200"), (["--eval-windows", 7], "7 of 200"), (["--eval-windows", 0], "all 200")],
)
def test_prune_and_eval_report_the_same_figure_of_the_same_windows(asked, num, folder, capsys, monkeypatch):
    monkeypatch.setattr("prunus.trained.quality.EVAL_WINDOWS", 20)
    easy, hard = np.zeros(1200), np.random.default_rng(1).integers(0, 40, 1200)  # the beginning is no sample of it all
    np.concatenate([easy, hard]).astype("<u2").tofile(folder / "valid.u16")
    options = [*data_of(folder), "--samples", 4, "--length", 12, "--no-repair", *asked]
    run("prune", folder / "model", *options, "--out", folder / "out")
    said, row = capsys.readouterr().out, rows_of(folder / "out")["wanda"]
    run("eval", folder / "out", "--tokens", folder / "valid.u16", "--length", 12, *asked)
    evaluated = capsys.readouterr().out
    assert f"perplexity {row['perplexity']:.3f}, " in evaluated
    assert f"Evaluated on {num} held-out windows" in said and f"on {num} held-out windows" in evaluated


def test_what_was_written_is_evaluated_to_the_same_figures_in_every_form(folder, capsys):
    out, result = prune(folder, "--score", "magnitude", "--sparsity", "0.6", "--no-repair")
    row, forms = result["rows"]["magnitude"], {form: folder / form for form in ("sparse", "dense")}
    for form, path in forms.items():
        run("export", out, "--out", path, "--form", form)
    for path in (out, *forms.values()):
        capsys.readouterr()
        run("eval", path, "--tokens", folder / "valid.u16", "--length", 12, "--eval-windows", 6)
        said = capsys.readouterr().out
        assert f"perplexity {row['perplexity']:.3f}, " in said and f"; {row['sparsity']:.4%} of" in said


def test_a_model_without_data_of_its_own_is_told_what_it_needs(folder, capsys):
    np.full(40, 41, "<u2").tofile(folder / "other.u16")
    np.full(20, 4, "<u2").tofile(folder / "few.u16")
    tokens = ["--tokens", folder / "valid.u16"]
    for said, options in {
        "needs --tokens": [],
        "--data is for runs": [*tokens, "--data", "stdlib"],
        "give --tokens": ["--validation", folder / "valid.u16"],
        "--length must be at least 0": [*tokens, "--length", -1],
        "more than the 32 tokens that the model reads": [*tokens, "--length", 500],
        "fewer than a window": ["--tokens", folder / "few.u16", "--length", 30],
        "holds token 41": ["--tokens", folder / "other.u16"],
    }.items():
        assert said in refused(capsys, "eval", folder / "model", *options)


@pytest.mark.skipif(sys.platform != "linux", reason="limits files as Linux does")
def test_a_full_disk_is_one_line_and_the_same_command_goes_on_when_there_is_room(folder, capsys):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))  # of a model of 20 kB
    try:
        command = ["prune", folder / "model", *FAST, *data_of(folder), "--no-repair", "--out", folder / "out"]
        assert "File too large" in refused(capsys, *command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.iterdir() if "out" in path.name] == [".out.unfinished"]
    run(*command)
    assert (folder / "out" / "model.safetensors").is_file() and not (folder / ".out.unfinished").exists()


RECIPES = {
    "eps": ["--score", "bitter7", "--eps", "1e-6"],
    "exponent": ["--score", "fisher", "--exponent", "0.25"],
    "regrow": ["--regrow", "0.1", "--regrow-by", "momentum"],
    "replay": ["--score", "none", "--rate-power", "0", "--replay", "pruned"],
    "spam": ["--optimizer", "adamwprune", "--spam"],
}


@pytest.mark.usefixtures("few_weights")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_pruned_and_evaluated_wherever_it_lies_whatever_it_was_trained_with(recipe, tmp_path, capsys):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    train = "--model gpt2-tiny --context 8 --batch 2 --steps 8 --every 2 --eval-size 3 --warmup 1 --data".split()
    for name, options in {"pruned": [], "run": RECIPES[recipe]}.items():
        if name == "run" or recipe == "replay":
            run("train", *train, tmp_path / "data.txt", "--out", tmp_path / "runs" / name, *options)
    shutil.move(tmp_path / "runs" / "run", tmp_path / "moved")
    capsys.readouterr()
    trained = json.loads((tmp_path / "moved" / "result.json").read_text())
    run("eval", tmp_path / "moved")
    assert f"loss {trained['loss']:.4f}, " in capsys.readouterr().out
    command = ["prune", tmp_path / "moved", "--samples", 4, "--out", tmp_path / "out"]
    assert "leave off --offload" in refused(capsys, *command, "--offload")
    run(*command, *"--sparsity 0.75 --allocate moments --scope layer".split())
    said, rows = capsys.readouterr().out, rows_of(tmp_path / "out")
    assert rows["dense"]["perplexity"] == pytest.approx(trained["perplexity"], rel=1e-5)
    assert rows["repaired"]["sparsity"] == pytest.approx(0.75, abs=1e-3) and "Evaluated on 3 of " in said
    layers = json.loads((tmp_path / "out" / "result.json").read_text())["layers"]
    assert len({round(layer["sparsity"], 3) for layer in layers}) > 2
    run("eval", tmp_path / "out")
    assert f"perplexity {rows['repaired']['perplexity']:.3f}" in capsys.readouterr().out
    run("report", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()
    assert "has no config.json" in refused(capsys, "generate", tmp_path / "out", "--prompt", "a")


MINE = """
import torch
from torch import nn

def subject():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    return {
        "model": model, "batches": [(x, y)], "loss": nn.functional.cross_entropy,
        "evaluate": lambda m: nn.functional.cross_entropy(m(x), y).item(), "metric": "loss",
    }

def nothing():
    return 5
"""


def test_a_function_of_a_users_own_gives_model_and_data_for_other_commands_or_it_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run(*"prune mine:subject --probe sequential --tau 0.2 --out out".split())
    said, saved, rows = capsys.readouterr().out, load_file("out/model.safetensors"), rows_of(tmp_path / "out")
    zeros = sum(int((saved[name] == 0).sum()) for name in ("0.weight", "2.weight"))
    assert zeros == round(rows["probed"]["sparsity"] * 56) and set(rows["dense"]) == {"sparsity", "loss"}
    assert "prunus eval cannot" in said and said.index("prunus eval cannot") < said.index("pruned weights by kind")
    assert "must return a dict" in refused(capsys, "prune", "mine:nothing", "--out", "new")
    run(*"export out --out small --check".split())
    found = load_sparse(tmp_path / "small")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    run("doctor", "out")
    assert "no checkpoint of prunus" in refused(capsys, "eval", "out")


THEIRS = """
import torch, transformers

def subject():
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    tokens = torch.arange(24).view(3, 8)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    return {"model": model, "batches": [tokens], "evaluate": lambda m: m(tokens, labels=tokens).loss.item()}
"""


def test_a_model_of_transformers_that_a_function_gave_becomes_a_folder_of_its_own(folder, monkeypatch, capsys):
    pytest.importorskip("transformers")
    (folder / "theirs.py").write_text(THEIRS)
    monkeypatch.chdir(folder)
    run(*"prune theirs:subject --no-repair --score magnitude --out out".split())
    assert "cannot" not in capsys.readouterr().out
    run(*"eval out --tokens valid.u16 --length 12".split())
    assert "50.0000% of" in capsys.readouterr().out


@pytest.mark.parametrize("sparsity, reached", [(0.3, 0.5), (0.75, 0.75)])
def test_zeros_of_a_model_that_is_sparse_already_are_counted_and_said(sparsity, reached, tmp_path, monkeypatch, capsys):
    zeroed = "8, 3))\n    for p in (model[0].weight, model[2].weight): p.data.flatten()[::2] = 0"
    (tmp_path / "mine_sparse.py").write_text(MINE.replace("8, 3))", zeroed))
    monkeypatch.chdir(tmp_path)
    run(*f"prune mine_sparse:subject --no-repair --score magnitude --sparsity {sparsity} --out out".split())
    said, saved, rows = capsys.readouterr().out, load_file("out/model.safetensors"), rows_of(tmp_path / "out")
    assert sum(int((saved[name] == 0).sum()) for name in ("0.weight", "2.weight")) == 56 * reached
    assert rows["dense"]["sparsity"] == 0.5 and rows["magnitude"]["sparsity"] == reached
    assert "50.0000% of the prunable weights were already zero" in said and "as it came" in said
    assert ("more than the 30.0000% requested" in said) == (sparsity < reached)


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="needs PRUNUS_DATA, the folder of real models and tokens")
def test_a_trained_model_keeps_its_perplexity_at_a_low_sparsity(tmp_path):
    calib, valid = (Path(DATA) / f"tokens/tinystories_{part}.tok512.u16" for part in ("calib", "valid"))
    options = ["--samples", 8, "--length", 64, "--eval-windows", 40, "--sparsity", 0.2, "--out", tmp_path / "out"]
    run("prune", Path(DATA) / "models/stories260K", "--tokens", calib, "--eval-tokens", valid, *options)
    rows = rows_of(tmp_path / "out")
    assert rows["dense"]["perplexity"] < rows["repaired"]["perplexity"] < 1.1 * rows["dense"]["perplexity"]


@pytest.mark.parametrize("bits", [{}, {"bits": 4, "bits_error": 0.12}], ids=["without bits", "in bits"])
@pytest.mark.parametrize("is_recovered", [False, True])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_of_kinds_fits_the_terminal_and_cuts_no_name(width, is_recovered, bits):
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkvo"]
    layers = [Layer(name, (64, 64), 4096, 2048, 2048, mask_error=0.2, error=0.1, **bits) for name in names]
    console = Terminal(width=width)
    with console.capture() as shown:
        console.print(_kinds(layers, width, is_recovered=is_recovered))
    said = shown.get()
    assert max(map(len, said.splitlines())) <= width and "…" not in said and ("in 4 bits" in said) == bool(bits)
    assert all(f" model.layers.*.self_attn.{part}_proj " in said for part in "qkvo")
    assert bits or ("worst" in said) == (width > 100)
