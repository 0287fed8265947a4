"""What a folder's config.json says runs nothing, fetches nothing and takes bounded time and memory."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers")

from prunus.export import load_model, save_model  # noqa: E402
from prunus.export.config_limits import bounded  # noqa: E402
from prunus.export.huggingface import load_plain_model, read_config  # noqa: E402
from prunus.sparse import load_packed  # noqa: E402


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
    "a mapping of classes": {"architectures": {"GPT2LMHeadModel": 1}},
    "a number of classes": {"architectures": 3},
    "a class alone": {"architectures": "GPT2LMHeadModel"},
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


FAMILIES = {
    "llama": transformers.LlamaForCausalLM,
    "bert": transformers.BertForSequenceClassification,
    "gptj": transformers.GPTJForCausalLM,
    "swin": transformers.SwinForImageClassification,
}
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {
    "llama": SMALL | {"max_position_embeddings": 32},
    "bert": SMALL | {"max_position_embeddings": 32},
    "gptj": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 8},
    "swin": {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
}


def write_model(family: str, folder: Path) -> None:
    model = FAMILIES[family](FAMILIES[family].config_class(**SIZES[family]))
    model.save_pretrained(folder / "plain")
    save_model(model, folder / "small")


ROPE = [3, [1], "linear", {"rope_type": "dynamic", "factor": "x"}, {"type": "linear", "factor": [{}]}]
ROPE += [{"rope_type": "yarn", "factor": float("inf")}, {"rope_type": "longrope", "factor": -1}, {"type": {"a": "b"}}]


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ROPE, ids=str)
@pytest.mark.parametrize("load", [load_model, load_plain_model, load_packed])
def test_odd_positions_are_one_line(field, value, load, tmp_path):
    write_model("llama", tmp_path)
    change(tmp_path, {field: value})
    with pytest.raises(ValueError, match=r"config\.json") as error:
        load(tmp_path / "plain")
    assert "\n" not in str(error.value)


HUGE = 10**8
ASKED = {  # what each field would have transformers make
    "llama": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_labels".split(),
    "bert": "vocab_size hidden_size num_hidden_layers max_position_embeddings type_vocab_size num_labels".split(),
    "gptj": "vocab_size n_embd n_layer n_positions rotary_dim".split(),
    "swin": "embed_dim depths num_labels window_size".split(),
}


def in_little_memory(load: Callable[[Path], object], folder: Path) -> str:
    """What a load says in a process that may take 256 MiB more than this one has."""
    reading, writing = os.pipe()
    import resource

    child = os.fork()
    if not child:
        said = "nothing"
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
            load(folder)
        except ValueError as error:
            said = str(error)
        except BaseException as error:
            said = f"raised {type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode()[:4000])
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        return file.read()


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize(("family", "field"), [(family, field) for family in ASKED for field in ASKED[family]])
def test_huge_sizes_are_compared_with_the_tensors_before_memory_is_taken(family, field, tmp_path):
    write_model(family, tmp_path)
    is_list = isinstance(SIZES[family].get(field), list)
    change(tmp_path, {field: [HUGE, HUGE] if is_list else HUGE})
    for form, load in [
        ("plain", load_plain_model),
        *((f, load) for f in LOADERS for load in (load_model, load_packed)),
    ]:
        said = in_little_memory(load, tmp_path / form)
        assert str(tmp_path / form) in said and "memory" not in said.replace(str(tmp_path), "").lower(), said


def test_limits_are_gone_with_their_context():
    with pytest.raises(ValueError, match="stores 10 numbers"), bounded(10, 1, Path("a.safetensors")):
        torch.nn.Linear(2000, 2000)
    torch.nn.Linear(2000, 2000)
