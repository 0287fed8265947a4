"""The speed of a model in several states: what is counted, in which order, and what is left behind."""

import pytest
import torch
from torch import nn

from prunus.trained import speed
from prunus.trained.speed import compare_speed


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)


def timed(model, batches, **states):
    return compare_speed(model, batches, states or {"dense": lambda: None})


def llama(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes, **options))


@pytest.mark.parametrize("longest", [2, 8, 2048])
def test_text_is_counted_in_tokens_however_short_the_model_reads(longest):
    found = timed(llama(max_position_embeddings=longest), [torch.arange(24).view(2, 12)])
    assert found.unit == "tokens" and found.per_second["dense"] > 0


@pytest.mark.parametrize(
    ("batch", "unit"),
    [
        (torch.randn(3, 1, 4, 4), "images"),
        ((torch.randn(3, 1, 4, 4), torch.zeros(3).long()), "images"),
        (torch.randn(3, 16), "samples"),
    ],
    ids=["images", "pairs", "rows"],
)
def test_other_inputs_are_counted_one_by_one(batch, unit):
    sizes = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    assert timed(model, [batch]).unit == unit and set(sizes) == {1}


def test_states_take_turns_the_last_stays_and_the_mode_is_as_before():
    model, calls = nn.Linear(4, 4).train(), []
    found = timed(
        model,
        [torch.randn(2, 4)],
        dense=lambda: calls.append("dense"),
        shrunk=lambda: calls.append("shrunk"),
    )
    assert calls == ["dense", "shrunk"] * speed.ROUNDS and list(found.per_second) == ["dense", "shrunk"]
    assert model.training


def test_a_slow_model_is_timed_on_few_tokens_and_once(monkeypatch):
    monkeypatch.setattr(speed, "SLOW", 1e-9)
    monkeypatch.setattr(speed, "LONGEST", 0.0)
    model, lengths = llama(), []
    generate = model.generate
    model.generate = lambda *args, **how: (
        lengths.append(how["generation_config"].max_new_tokens) or generate(*args, **how)
    )
    timed(model, [torch.arange(24).view(2, 12)])
    assert lengths == [1, 1, 1]
