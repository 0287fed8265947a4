"""Quantised models are saved as codes and come back with their grids; plain folders hold ordinary values."""

import pytest
import torch
from on_grids import put_on_grids_
from test_compact import same
from test_export_models import assert_same_model, assert_same_state, gpt2, llama, pruned

from prunus import load_model, quantize, save_model
from prunus.cli import main
from prunus.export.huggingface import load_any_model
from prunus.files.reader import open_tensors
from prunus.grids import grid_of, on_grids

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")


def mixtral() -> torch.nn.Module:
    families = pytest.importorskip("families")
    return pruned(families.build("mixtral"))


MODELS = {"tied": llama, "untied": lambda: llama(False), "in, out": gpt2, "stacked experts": mixtral}


def assert_same_grids(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    a, b = on_grids(found), on_grids(wanted)
    assert set(a) == set(b) and all(a[name].grid == b[name].grid for name in b)
    assert all(same(a[name].scales, b[name].scales) for name in b)


def tensor_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


@pytest.mark.parametrize("is_drawn", [True, False], ids=["put on grids", "quantised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("limit", [10**9, 5000], ids=["one file", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_grids_comes_back_with_them_and_saves_to_the_same_bytes(name, limit, dtype, is_drawn, tmp_path):
    model = MODELS[name]().to(dtype)
    put_on_grids_(model) if is_drawn else quantize(model, bits=4)
    saved = save_model(model, tmp_path / "small", max_shard_bytes=limit)
    coded = {row.name for row in saved.rows if row.encoding == "codes"}
    assert on_grids(model) and {row.bits for row in saved.rows} == {4, None}
    found = load_model(tmp_path / "small")
    assert_same_state(found, model)
    assert coded == set(on_grids(found))
    if is_drawn:  # quantize puts weights without a zero on grids too, which are stored dense
        assert_same_grids(found, model)
    save_model(found, tmp_path / "again", max_shard_bytes=limit)
    assert tensor_bytes(tmp_path / "small") == tensor_bytes(tmp_path / "again")


def test_a_dense_model_on_grids_is_stored_as_before(tmp_path):
    model = transformers.LlamaForCausalLM(llama().config)
    quantize(model, bits=4)
    saved = save_model(model, tmp_path / "small")
    assert on_grids(model) and not any(row.bits for row in saved.rows)
    assert_same_state(load_model(tmp_path / "small"), model.eval())


def test_a_weight_under_two_names_has_the_grid_of_either(tmp_path):
    model = put_on_grids_(llama(False))
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    first.weight, second.weight = second.weight, second.weight
    del first.weight_grid  # what is left is on the module whose name is not stored
    save_model(model, tmp_path / "small")
    found = load_model(tmp_path / "small")
    assert_same_model(found, model)
    up = [layer.mlp.up_proj for layer in found.model.layers]
    assert up[0].weight is up[1].weight and grid_of(up[0]) is not None


@pytest.mark.slow
def test_compiled_and_wrapped_models_are_saved_as_codes_too(tmp_path):
    model = put_on_grids_(llama())
    saved = save_model(torch.nn.DataParallel(torch.compile(model)), tmp_path / "small")
    assert {row.name for row in saved.rows if row.encoding == "codes"} == set(on_grids(model))
    assert_same_grids(load_model(tmp_path / "small"), model)


def test_a_weight_that_left_its_grid_is_refused_by_name_and_no_folder_is_made(tmp_path):
    model = put_on_grids_(llama())
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight has .* weights off its 4-bit grid"):
        save_model(model, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_save_pretrained_writes_ordinary_values_that_transformers_loads(tmp_path):
    model = put_on_grids_(llama())
    model.save_pretrained(tmp_path / "plain")
    with open_tensors(tmp_path / "plain") as tensors:
        assert not tensors.is_small and not any("scales" in name for name in tensors.records)
    assert_same_model(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain").eval(), model)
    assert not on_grids(load_any_model(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "in, out"])
def test_export_keeps_codes_between_small_folders_and_writes_values_to_plain_ones(name, tmp_path, capsys):
    model = put_on_grids_(MODELS[name]().bfloat16())
    save_model(model, tmp_path / "small")
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "copy"), "--check"])
    assert tensor_bytes(tmp_path / "small") == tensor_bytes(tmp_path / "copy")
    assert "codes" in capsys.readouterr().out
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "plain"), "--form", "dense", "--check"])
    assert_same_state(load_any_model(tmp_path / "plain"), model)
    main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "sparse"), "--check"])
    assert_same_state(load_model(tmp_path / "sparse"), model)


def test_the_card_says_how_many_bits_kept_weights_have(tmp_path):
    save_model(put_on_grids_(llama()), tmp_path / "small")
    assert "are zero; kept weights of 14 of 15 matrices are in 4 bits." in (tmp_path / "small/README.md").read_text()
    save_model(llama(), tmp_path / "other")
    assert "bits" not in (tmp_path / "other/README.md").read_text()
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "plain"), "--form", "dense"])
    summary = (tmp_path / "plain/README.md").read_text()
    assert "are zero. From its source" in summary or "are zero.\n" in summary
