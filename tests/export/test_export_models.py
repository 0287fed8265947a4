"""Hugging Face models come back from a small folder, with their ties; what does not fit is refused."""

import json
import re
import subprocess
import sys
import warnings

import pytest
import torch
from test_compact import same

from prunus import load_model, load_sparse, save_model, save_sparse
from prunus.cli import main

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

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


def assert_same_state(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    a, b = found.state_dict(), wanted.state_dict()
    assert list(a) == list(b) and all(same(a[name].cpu(), b[name].cpu()) for name in b)


def assert_same_model(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    assert_same_state(found, wanted)
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


def test_parts_in_half_precision_and_ties_of_the_users_own_stay(tmp_path):
    model = llama(False).bfloat16()
    model.model.norm.float()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    save_model(model, tmp_path / "small")
    found = load_model(tmp_path / "small")
    assert {name: p.dtype for name, p in found.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert torch.get_default_dtype() == torch.float32
    assert found.model.layers[1].mlp.up_proj.weight is found.model.layers[0].mlp.up_proj.weight
    assert_same_state(found, model)


@pytest.mark.slow
def test_a_plain_folder_that_stores_a_tied_weight_once_is_loaded_by_a_process_that_only_loads(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "small")])
    code = "import sys; from prunus import load_model\nmodel = load_model(sys.argv[1])\n"
    code += "assert model.lm_head.weight is model.model.embed_tokens.weight"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "small")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiled_and_wrapped_models_are_saved_under_their_own_names(tmp_path):
    model = llama()
    save_model(torch.nn.DataParallel(torch.compile(model)), tmp_path / "small")
    assert_same_model(load_model(tmp_path / "small"), model)


@pytest.mark.parametrize("name", ["gpt2 of before", "a prefix too many"])
def test_names_that_transformers_knows_to_translate_are_found(name, tmp_path):
    model = gpt2()
    tensors = model.state_dict()
    if name == "gpt2 of before":  # saved from the inner model, with buffers that are computed today
        tensors = {
            name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if "lm_head" not in name
        }
        tensors["h.0.attn.bias"] = tensors["h.1.attn.bias"] = torch.ones(1, 1, 4, 4)
    else:
        model = model.transformer
        tensors = {f"transformer.{name}": tensor for name, tensor in model.state_dict().items()}
    save_model(model, tmp_path / "small")
    save_sparse(tensors, tmp_path / "small" / "sparse.safetensors")
    assert_same_state(load_model(tmp_path / "small"), model)


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
    assert names == beside | {"config.json", "generation_config.json", "sparse.safetensors", "README.md", "layers.svg"}
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


def test_a_folder_in_use_is_not_touched_and_transformers_refuses_a_small_one(tmp_path):
    save_model(llama(), tmp_path / "small")
    with pytest.raises(OSError, match=r"model\.safetensors"):  # where it could invent weights
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="not empty"):
        save_model(llama(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


class OwnLlama(transformers.LlamaForCausalLM):
    """A class that transformers does not have, with a configuration that it has."""


def own_llama() -> torch.nn.Module:
    return pruned(OwnLlama(transformers.LlamaConfig(**TINY)))


def own_model() -> torch.nn.Module:
    return pruned(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)))


@pytest.mark.parametrize("make", [own_model, own_llama])
@pytest.mark.parametrize("limit", [10**9, 1000], ids=["one file", "several"])
def test_what_loads_a_model_that_is_not_of_transformers_is_said_when_it_is_saved(make, limit, tmp_path):
    model, other, folder = make(), make(), tmp_path / "small"
    with pytest.warns(UserWarning, match=f"transformers models, and {type(model).__name__} is not one") as said:
        save_model(model, folder, max_shard_bytes=limit)
    code = f'model.load_state_dict(load_sparse("{folder}"))'
    assert len(said) == 1 and str(said[0].message).endswith(code) and "\n" not in str(said[0].message)
    exec(code, {"model": other, "load_sparse": load_sparse})
    assert all(same(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=re.escape(code) if make is own_model else "names the class 'OwnLlama'"):
        load_model(folder)


def test_nothing_is_said_of_a_model_that_load_model_loads(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_model(llama(), tmp_path / "small")
        save_model(own_model(), tmp_path / "own", source=tmp_path / "small")  # whose configuration may be meant for it


@pytest.mark.parametrize(
    "save", [save_model, lambda model, path: save_sparse(model.state_dict(), f"{path}.safetensors")]
)
def test_a_model_without_values_is_refused_and_nothing_is_written(save, tmp_path):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with pytest.raises(ValueError, match=r"^model\.embed_tokens\.weight is on the meta device.*load the weights first"):
        save(model, tmp_path / "small")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architectures": ["os"]}, "names the class 'os'"),
        ({"architectures": ["LlamaConfig"]}, "names the class"),
        ({"architectures": []}, "names the class"),
        ({"num_hidden_layers": 1}, "which the model does not have"),
        ({"num_hidden_layers": 3}, "which the model has"),
        ({"intermediate_size": 32}, "shape of"),
        ({"tie_word_embeddings": True}, "but they differ"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(values, said, tmp_path):
    save_model(llama(tied=False), tmp_path / "small")
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path / "small")


@pytest.mark.gpu
def test_a_model_goes_straight_to_the_gpu(tmp_path):
    model = llama()
    save_model(model.cuda(), tmp_path / "small")
    found = load_model(tmp_path / "small", device="cuda")
    assert all(parameter.is_cuda for parameter in found.parameters())
    assert_same_state(found, model)
    assert all(tensor.is_cuda for tensor in load_sparse(tmp_path / "small", device="cuda").values())
