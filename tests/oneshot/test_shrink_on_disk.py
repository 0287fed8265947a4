"""A model on disk is shrunk to the bits of the model in memory."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

from prunus.export.huggingface import load_any_model  # noqa: E402
from prunus.oneshot import shrink  # noqa: E402
from prunus.oneshot.disk_offload import disk_offload_of  # noqa: E402
from prunus.oneshot.model_folder import model_on_disk, save_from_disk  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64}
LLAMA = transformers.LlamaConfig(intermediate_size=48, num_key_value_heads=2, **SIZES)
OPT = transformers.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **SIZES)  # with biases


@pytest.fixture(params=[LLAMA, OPT], ids=["llama", "opt"])
def folder(request, tmp_path):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(request.param).save_pretrained(tmp_path / "model")
    return tmp_path


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (4, 16), generator=generator) for _ in range(3)]


@pytest.mark.parametrize("how", [{"size": 0.7}, {"neurons": 0.25}], ids=str)
def test_the_smaller_model_has_the_bits_of_one_that_was_shrunk_in_memory(folder, how):
    held, on_disk = load_any_model(folder / "model"), model_on_disk(folder / "model")
    expected = shrink(held, batches(), progress=False, **how)
    result = shrink(on_disk, batches(), progress=False, state=folder / "state", **how)
    assert result.layers == expected.layers and result.after == expected.after
    (folder / "small").mkdir()
    save_from_disk(on_disk, folder / "model", folder / "small")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "small")
    for (name, value), whole in zip(again.state_dict().items(), held.state_dict().values(), strict=True):
        assert torch.equal(value, whole), name


def test_a_run_that_was_done_before_is_read_back(folder):
    first, second = model_on_disk(folder / "model"), model_on_disk(folder / "model")
    for model in (first, second):
        shrink(model, batches(), size=0.7, progress=False, state=folder / "state")
    values, again = disk_offload_of(first), disk_offload_of(second)
    assert all(torch.equal(values.value(name), again.value(name)) for name in values.names)


def test_what_needs_the_whole_model_is_refused_and_nothing_is_cut(folder):
    model = model_on_disk(folder / "model")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for how in ({"layers": 1}, {"size": 0.7, "tune": True}, {"size": 0.7, "split": "measured"}):
        with pytest.raises(ValueError, match="whole model"):
            shrink(model, batches(), state=folder / "state", progress=False, **how)
    with pytest.raises(ValueError, match="give state="):
        shrink(model, batches(), size=0.7, progress=False)
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}
