"""What a folder's config.json says runs nothing, fetches nothing and takes bounded time and memory."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers")

from prunus.export import load_model, save_model  # noqa: E402
from prunus.export.huggingface import load_plain_model, read_config  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "plain")
    save_model(model, tmp_path / "small")
    return tmp_path


def change(folder: Path, values: dict) -> None:
    for path in folder.glob("*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


LOADERS = {"small": load_model, "plain": load_plain_model}


@pytest.mark.parametrize("form", LOADERS)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", "kernels-community/flash-attn2", {"": "evil/kernel"}])
def test_a_kernel_that_a_file_names_is_not_fetched(form, key, value, folder, monkeypatch):
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    fetched: list[str] = []

    def get_kernel(name: str, *args: object, **options: object) -> ModuleType:
        fetched.append(name)
        kernel = ModuleType("kernel")
        kernel.flash_attn_varlen_func = None
        return kernel

    stub = ModuleType("kernels")
    stub.get_kernel = get_kernel
    monkeypatch.setitem(sys.modules, "kernels", stub)
    for name in ("get_kernel", "get_kernel_hub"):
        monkeypatch.setattr(hub, name, get_kernel, raising=False)
    monkeypatch.setattr(hub, "is_kernels_available", lambda *args: True, raising=False)
    change(folder, {key: value})
    model = LOADERS[form](folder / form)
    assert not fetched and model.config._attn_implementation in ("sdpa", "eager")
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 64)
    if key == "attn_implementation" and isinstance(value, str) and form == "plain":
        with suppress(Exception):  # without our care transformers calls the stub
            transformers.AutoModelForCausalLM.from_pretrained(folder / form)
        assert fetched


NONSENSE = {
    "a million layers": {"n_layer": 1_000_000},
    "a huge width": {"n_embd": 2**40, "n_head": 1},
    "no width": {"n_embd": 0},
    "negative layers": {"n_layer": -3},
    "a string": {"n_embd": "wide"},
    "a list": {"n_layer": [2]},
    "null": {"vocab_size": None},
    "a huge vocabulary": {"vocab_size": 2**62},
    "another class": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "no such class": {"architectures": ["os.system"], "model_type": "nothing"},
    "a list of classes": {"architectures": [["GPT2LMHeadModel"]], "model_type": 3},
    "code": {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}, "model_type": "evil"},
    "more layers than stored": {"n_layer": 3},
    "another width": {"n_embd": 32},
}


@pytest.mark.parametrize("form", LOADERS)
@pytest.mark.parametrize("case", NONSENSE)
def test_a_nonsensical_configuration_is_one_line(case, form, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / form / "evil.py").write_text("from pathlib import Path; Path('executed').touch()")
    change(folder, NONSENSE[case])
    with pytest.raises(ValueError) as error:
        LOADERS[form](folder / form)
    assert "\n" not in str(error.value) and str(form) in str(error.value)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\0", '{"model_type": "gpt2", "n_layer": 1e400}'])
def test_a_configuration_that_is_no_object_is_one_line(text, folder):
    (folder / "plain" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(folder / "plain")


@pytest.mark.parametrize("size", [0, 3, 24, 200])
def test_a_gguf_file_cut_short_is_one_line(size, tmp_path):
    data = b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 2 + bytes(1000)
    (tmp_path / "model.gguf").write_bytes(data[:size])
    with pytest.raises(ValueError, match=r"model\.gguf (cannot be read|is no GGUF file, or damaged)"):
        load_plain_model(tmp_path, gguf_file="model.gguf")
