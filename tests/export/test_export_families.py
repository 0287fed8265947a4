"""Folders whose files name or shape tensors otherwise than the model: exported, loaded and read back equal."""

import json

import pytest
import torch
from covering import quickly
from families import assert_equal_models, build, inputs

from prunus import load_model, save_model
from prunus.cli import main

NAMES = (
    "mixtral", "gemma3", "vit", "marian", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss", "jamba", "llava",
    "qwen2_vl", "swin", "segformer", "detr", "esm", "bert classifier", "t5", "whisper",
)  # fmt: skip
CONVERTED = quickly(NAMES, "mixtral", "vit")


def pruned(name):
    """The model with half of its weights zero, as its folder gives it back."""
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter[torch.rand(parameter.shape) < 0.5] = 0
    return model


@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_is_exported_and_read_back_equal(name, tmp_path, capsys):
    model, batch = pruned(name), inputs(name)
    model.save_pretrained(tmp_path / "plain")
    main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "small"), "--check"])
    assert f"loaded as {type(model).__name__}" in capsys.readouterr().out
    wanted = type(model).from_pretrained(tmp_path / "plain")
    assert_equal_models(wanted, model, batch)
    assert_equal_models(load_model(tmp_path / "small"), wanted, batch)
    assert_equal_models(load_model(tmp_path / "plain"), wanted, batch)
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "back"), "--form", "dense", "--check"])
    assert_equal_models(type(model).from_pretrained(tmp_path / "back"), wanted, batch)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_from_memory_is_saved_and_read_back_equal(name, tmp_path):
    model, batch = pruned(name), inputs(name)
    save_model(model, tmp_path / "small")
    assert_equal_models(load_model(tmp_path / "small"), model, batch)
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "back"), "--form", "dense", "--check"])
    assert_equal_models(type(model).from_pretrained(tmp_path / "back"), model, batch)


def test_a_folder_that_loads_as_another_model_is_not_written(tmp_path, monkeypatch, capsys):
    from prunus.export import huggingface

    build("mixtral").save_pretrained(tmp_path / "plain")
    load = huggingface.load_model

    def changed(*args):
        model = load(*args)
        model.lm_head.weight.data.zero_()
        return model

    monkeypatch.setattr(huggingface, "load_model", changed)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "small"), "--check"])
    assert "'lm_head.weight' differs between" in capsys.readouterr().err and not (tmp_path / "small").exists()


def test_tensors_of_a_class_that_transformers_lacks_are_still_compared_and_it_is_said(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MyModel"]}))
    main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "small"), "--check"])
    said = capsys.readouterr().out
    assert "every bit read back" in said and "not loaded as a model" in said and "MyModel" in said


def test_a_class_may_name_what_is_ignored_by_a_single_pattern(tmp_path, monkeypatch):
    model, batch = pruned("llama"), inputs("llama")
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", "mask_predictions.*")
    save_model(model, tmp_path)
    assert_equal_models(load_model(tmp_path), model, batch)
