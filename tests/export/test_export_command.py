"""``prunus export``: folders, files and training checkpoints, there and back, and mistakes in one line."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_compact import same
from test_export_models import assert_same_model, gpt2, llama

from prunus import load_model, save_model
from prunus.cli import main
from prunus.cli.shared_options import size_in_bytes
from prunus.files.torch_file import write_torch_file
from prunus.lab.checkpoint import load_checkpoint
from prunus.lab.trained_run import load_exported

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

MODELS = Path(os.environ.get("PRUNUS_DATA", "nowhere")) / "models"


def folder_of(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("make", [llama, lambda: llama(False), gpt2], ids=["tied", "untied", "gpt2"])
@pytest.mark.parametrize("limit", ["1GB", "5KB"])
def test_the_command_converts_a_folder_there_and_back(make, limit, tmp_path, capsys):
    model = make()
    plain, small, back = folder_of(model, tmp_path / "plain"), tmp_path / "small", tmp_path / "back"
    main(["export", str(plain), "--out", str(small), "--check", "--max-shard-size", limit])
    said = capsys.readouterr().out
    assert "bitmask" in said and "every bit read back" in said and ("1 file" in said) == (limit == "1GB")
    assert_same_model(load_model(small), model)
    main(["export", str(small), "--out", str(back), "--form", "dense", "--check", "--max-shard-size", limit])
    assert_same_model(transformers.AutoModelForCausalLM.from_pretrained(back), model)
    names = {path.name for path in plain.iterdir()} - {"model.safetensors"}
    assert names <= {path.name for path in small.iterdir()} & {path.name for path in back.iterdir()}
    assert not any(path.name.endswith(".part") for path in tmp_path.iterdir())


def test_a_tied_model_from_memory_becomes_a_plain_folder_that_transformers_loads(tmp_path):
    model = llama()
    save_model(model, tmp_path / "small")
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "back"), "--form", "dense", "--check"])
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")
    assert_same_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back"), model)


@pytest.mark.parametrize("num_zeros", [0, 40, 64 * 32])
def test_a_model_that_is_not_pruned_is_said_to_gain_nothing(num_zeros, tmp_path, capsys):
    weight = torch.rand(64, 64) + 1
    weight.view(-1)[:num_zeros] = 0
    save_file({"weight": weight}, tmp_path / "plain.safetensors")
    main(["export", str(tmp_path / "plain.safetensors"), "--out", str(tmp_path / "small.safetensors")])
    assert ("saves nothing" in capsys.readouterr().out) == (num_zeros < 64 * 32)


def test_the_command_converts_single_files_and_counts_zeros_with_a_sign(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(64, 64)
    tensors = {"w": weight * (weight.abs() > 0.7), "b": torch.tensor([-0.0])}
    save_file(tensors, "plain.safetensors")
    main("export plain.safetensors --out small.safetensors --check".split())
    said, number = capsys.readouterr().out, int(((weight < 0) & (weight.abs() <= 0.7)).sum()) + 1
    assert f"{number:,} elements are -0.0" in said and "stored as" in said.splitlines()[0]
    assert all(len(line) <= 60 and "…" not in line for line in said.splitlines()[:3])  # the table is whole
    main("export small.safetensors --out back --form dense".split())
    found = load_file("back/model.safetensors")
    assert found.keys() == tensors.keys() and all(same(found[name], tensors[name]) for name in tensors)
    save_file({"w": weight}, "plain.safetensors")
    main("export plain.safetensors --out small.safetensors --check".split())
    assert "-0.0" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    options = "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --warmup 1".split()
    main(["train", *options, "--data", str(folder / "data.txt"), "--out", str(folder / "run")])
    return folder / "run"


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_a_training_checkpoint_becomes_a_folder_that_loads(form, run_folder, tmp_path, capsys):
    main(["export", str(run_folder), "--out", str(tmp_path / "out"), "--form", form, "--check"])
    wanted = load_checkpoint(run_folder / "checkpoint.pt")
    model = load_exported(tmp_path / "out")
    assert all(same(tensor, wanted["model"][name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    assert json.loads((tmp_path / "out" / "run.json").read_text())["run"] == wanted["run"]
    assert "6 file" not in capsys.readouterr().out
    if form == "sparse":
        small = (tmp_path / "out" / "sparse.safetensors").stat().st_size
        assert small < 0.6 * sum(tensor.nbytes for tensor in wanted["model"].values())


def test_a_checkpoint_whose_mask_is_broken_is_refused(run_folder, tmp_path, capsys):
    state = load_checkpoint(run_folder / "checkpoint.pt")
    name = next(iter(state["pruner"]["masks"]))
    state["model"][name].fill_(1.0)
    write_torch_file(tmp_path / "checkpoint.pt", state)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "checkpoint.pt"), "--out", str(tmp_path / "out")])
    assert f"{name} has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere", "--out", "new"], "there is no file or folder nowhere"),
        ([".", "--out", "new"], "holds no tensors"),
        (["mine.safetensors", "--out", "new"], "mine.safetensors cannot be read"),
        (["mine.safetensors"], "--out"),
        (["mine.safetensors", "--out", "new", "--max-shard-size", "much"], "5GB"),
        (["mine.safetensors", "--out", "new", "--form", "tiny"], "form"),
        (["mine.pt", "--out", "new"], "damaged, or not a checkpoint of prunus"),
        (["mine.pt", "--out", "new.safetensors"], "becomes a folder"),
        (["mine.pt", "--out", "new.pt"], "--out is a folder to make or a .safetensors file"),
        (["mine.safetensors", "--out", "new.bin"], "new.bin looks like another file"),
        (["model", "--out", "new", "--form", "dense"], "config.json cannot be read"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.safetensors", "mine.pt"):
        Path(name).write_text("mine")
    Path("model").mkdir()
    save_file({"w": torch.ones(2)}, "model/model.safetensors")
    Path("model/config.json").write_text("{")
    with pytest.raises(SystemExit) as stop:
        main(["export", *args])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and said in shown.err and len(shown.err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.pt", "mine.safetensors", "model"]


def test_a_copy_that_differs_is_found_by_the_check(tmp_path, monkeypatch, capsys):
    from prunus.export import convert

    folder_of(llama(), tmp_path / "plain")
    inner = convert.write

    def damaged(source, plan, report=None):
        saved = inner(source, plan)
        data = bytearray(saved.files[0].read_bytes())
        data[-5] ^= 4
        saved.files[0].write_bytes(data)
        return saved

    monkeypatch.setattr(convert, "write", damaged)
    for form in ("sparse", "dense"):
        with pytest.raises(SystemExit):
            main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / form), "--check", "--form", form])
        assert re.search(r"damaged in|differs from its source", capsys.readouterr().err)
        assert not (tmp_path / form).exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("700", 700), ("2k", 2000)])
def test_sizes_are_read_with_their_unit(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.slow
@pytest.mark.skipif(not MODELS.is_dir(), reason="PRUNUS_DATA names no folder with models")
@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_a_real_model_at_half_comes_back_and_is_as_small_as_promised(name, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(MODELS / name, plain, copy_function=shutil.copyfile)
    tensors = load_file(plain / "model.safetensors")
    weights = [tensor for key, tensor in tensors.items() if "proj" in key]
    for weight in weights:
        weight.view(-1)[weight.abs().flatten().argsort()[: weight.numel() // 2]] = 0
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    main(["export", str(plain), "--out", str(tmp_path / "small"), "--check"])
    sparse, all_bytes = sum(w.nbytes for w in weights), sum(t.nbytes for t in tensors.values())
    small = (tmp_path / "small" / "sparse.safetensors").stat().st_size
    assert small <= all_bytes - sparse + 0.535 * sparse + 20_000
    wanted = transformers.AutoModelForCausalLM.from_pretrained(plain)
    assert_same_model(load_model(tmp_path / "small"), wanted.eval())
