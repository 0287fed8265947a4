"""Whole models: Hugging Face folders and training checkpoints, to the small form and back, on the command line too."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_compact import same

from prunus import load_model, load_sparse, save_model
from prunus.cli import main
from prunus.cli.export import num_bytes
from prunus.lab.checkpoint import load_checkpoint, save_checkpoint
from prunus.lab.exported import load_exported

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

MODELS = Path(os.environ.get("PRUNUS_DATA", "nowhere")) / "models"
TINY = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


def pruned(model: torch.nn.Module) -> torch.nn.Module:
    """The model with half of each weight matrix zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand(parameter.shape) < 0.5] = 0
    return model.eval()


def llama(tied: bool = True) -> torch.nn.Module:
    return pruned(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=tied)))


def gpt2() -> torch.nn.Module:
    return pruned(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)))


def bert() -> torch.nn.Module:
    return pruned(transformers.BertForSequenceClassification(transformers.BertConfig(**TINY)))


def assert_same_model(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    a, b = found.state_dict(), wanted.state_dict()
    assert list(a) == list(b) and all(same(a[name], b[name]) for name in b)
    tokens = torch.arange(10)[None]
    assert torch.equal(found(tokens).logits, wanted(tokens).logits)
    assert not found.training and type(found) is type(wanted)
    assert len(list(found.parameters())) == len(list(wanted.parameters()))


@pytest.mark.parametrize("make", [llama, lambda: llama(False), gpt2, bert], ids=["tied", "untied", "gpt2", "bert"])
@pytest.mark.parametrize("limit", [10**9, 5000], ids=["one file", "several"])
def test_a_model_comes_back_with_its_ties(make, limit, tmp_path):
    model = make()
    saved = save_model(model, tmp_path / "small", max_shard_bytes=limit)
    assert_same_model(load_model(tmp_path / "small"), model)
    assert all(path.is_file() for path in saved.files)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert saved.dense_bytes >= size and saved.stored_bytes < 0.75 * size


def test_parts_in_half_precision_stay_so(tmp_path):
    model = llama().bfloat16()
    model.model.norm.float()
    save_model(model, tmp_path / "small")
    found = load_model(tmp_path / "small")
    assert {name: p.dtype for name, p in found.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert torch.get_default_dtype() == torch.float32


def test_ties_of_the_users_own_stay(tmp_path):
    model = llama(False)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    save_model(model, tmp_path / "small")
    found = load_model(tmp_path / "small")
    assert found.model.layers[1].mlp.up_proj.weight is found.model.layers[0].mlp.up_proj.weight
    assert_same_model(found, model)


def test_compiled_and_wrapped_models_are_saved_under_their_own_names(tmp_path):
    model = llama()
    save_model(torch.nn.DataParallel(torch.compile(model)), tmp_path / "small")
    assert_same_model(load_model(tmp_path / "small"), model)


def test_tokenizer_and_generation_settings_travel_with_the_model(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "LICENSE", "model.safetensors", "evil.py"):
        (source / name).write_text("{}")
    model = llama()
    model.generation_config.max_new_tokens = 7
    save_model(model, tmp_path / "small", source=source)
    names = {path.name for path in (tmp_path / "small").iterdir()}
    beside = {"tokenizer.json", "tokenizer_config.json", "merges.txt", "LICENSE"}
    assert names == beside | {"config.json", "generation_config.json", "sparse.safetensors"}
    assert load_model(tmp_path / "small").generation_config.max_new_tokens == 7


def test_a_model_with_a_weight_that_its_mask_says_is_pruned_is_refused(tmp_path):
    model = llama()
    masks = {name: p != 0 for name, p in model.named_parameters() if "proj" in name}
    save_model(model, tmp_path / "small", masks=masks)
    name = "model.layers.1.mlp.up_proj.weight"
    masks[name] &= torch.rand(masks[name].shape) < 0.5
    with pytest.raises(ValueError, match=re.escape(name)):
        save_model(model, tmp_path / "other", masks=masks)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_folder_in_use_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save_model(llama(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_transformers_refuses_a_small_folder_and_does_not_invent_weights(tmp_path):
    save_model(llama(), tmp_path / "small")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def config_of(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architectures": ["os"]}, "names the class 'os'"),
        ({"architectures": ["LlamaConfig"]}, "names the class"),
        ({"architectures": []}, "names the class"),
        ({"num_hidden_layers": 1}, "which the model does not have"),
        ({"num_hidden_layers": 3}, "which the model has"),
        ({"intermediate_size": 32}, "shape of"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(values, said, tmp_path):
    save_model(llama(), tmp_path / "small")
    config_of(tmp_path / "small", **values)
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path / "small")


def test_a_tie_that_the_file_contradicts_is_refused(tmp_path):
    save_model(llama(False), tmp_path / "small")
    config_of(tmp_path / "small", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="holds two that differ"):
        load_model(tmp_path / "small")


@pytest.mark.gpu
def test_a_model_goes_straight_to_the_gpu(tmp_path):
    model = llama()
    save_model(model.cuda(), tmp_path / "small")
    found = load_model(tmp_path / "small", device="cuda")
    assert all(parameter.is_cuda for parameter in found.parameters())
    a, b = found.state_dict(), model.state_dict()
    assert all(same(a[name].cpu(), b[name].cpu()) for name in b)
    assert all(tensor.is_cuda for tensor in load_sparse(tmp_path / "small", device="cuda").values())


def folder_of(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("make", [llama, lambda: llama(False), gpt2], ids=["tied", "untied", "gpt2"])
@pytest.mark.parametrize("limit", ["1GB", "5KB"])
def test_the_command_converts_a_folder_there_and_back(make, limit, tmp_path, capsys):
    model = make()
    plain, small, back = folder_of(model, tmp_path / "plain"), tmp_path / "small", tmp_path / "back"
    main(["export", str(plain), "--out", str(small), "--check", "--max-shard", limit])
    said = capsys.readouterr().out
    assert "bitmask" in said and "every bit read back" in said and ("1 file" in said) == (limit == "1GB")
    assert_same_model(load_model(small), model)
    main(["export", str(small), "--out", str(back), "--form", "dense", "--check", "--max-shard", limit])
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


def test_the_command_converts_single_files(tmp_path):
    tensors = {"w": torch.randn(40, 40) * (torch.rand(40, 40) < 0.3), "b": torch.randn(3)}
    save_file(tensors, tmp_path / "plain.safetensors")
    main(["export", str(tmp_path / "plain.safetensors"), "--out", str(tmp_path / "small.safetensors"), "--check"])
    main(["export", str(tmp_path / "small.safetensors"), "--out", str(tmp_path / "back"), "--form", "dense"])
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(same(found[name], tensors[name]) for name in tensors)


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
    save_checkpoint(tmp_path / "checkpoint.pt", state)
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
        (["mine.safetensors", "--out", "new", "--max-shard", "much"], "5GB"),
        (["mine.safetensors", "--out", "new", "--form", "tiny"], "form"),
        (["mine.pt", "--out", "new"], "not a whole checkpoint"),
        (["mine.pt", "--out", "new.safetensors"], "becomes a folder"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.safetensors", "mine.pt"):
        Path(name).write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["export", *args])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and said in shown.err and len(shown.err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.pt", "mine.safetensors"]


def test_a_copy_that_differs_is_found_by_the_check(tmp_path, monkeypatch, capsys):
    from prunus.export import convert

    folder_of(llama(), tmp_path / "plain")
    inner = convert.write

    def damaged(source, plan):
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
    assert num_bytes(text) == size


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
