"""Neurons and head groups of Hugging Face models are found without code by family, checked, and cut exactly."""

from copy import deepcopy
from operator import attrgetter

import pytest
import torch
from covering import each_once, quickly
from families import FAMILIES, GEMMA, SIZES, START, T5, assert_equal_models, build, inputs, pairs, text
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from prunus.oneshot import cuts as cutting
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.config_units import config_plan
from prunus.oneshot.cuts import Cuts
from prunus.oneshot.unit_check import UnitCheck
from prunus.oneshot.units import tensor_of

GROUPS = SIZES | {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MORE = {
    "llama, groups": ("LlamaForCausalLM", GROUPS | {"mlp_bias": True}, text),
    "llama, one key and value head": ("LlamaForCausalLM", SIZES | {"num_key_value_heads": 1}, text),
    "qwen2": ("Qwen2ForCausalLM", GROUPS, text),
    "qwen3": ("Qwen3ForCausalLM", GROUPS, text),
    "phi3": ("Phi3ForCausalLM", GROUPS, text),
    "gemma2": ("Gemma2ForCausalLM", GEMMA, text),
    "gpt2": ("GPT2LMHeadModel", GPT2, text),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES, text),
    "falcon": ("FalconForCausalLM", SIZES | {"new_decoder_architecture": True}, text),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16}, text),
    "umt5": ("UMT5ForConditionalGeneration", T5 | START, pairs),
    "olmo2": ("Olmo2ForCausalLM", SIZES, text),
    "bitnet": ("BitNetForCausalLM", SIZES, text),
}
# neurons and heads of a layer, by field
UNITS = {
    "llama, groups": {"intermediate_size": 24, "num_key_value_heads": 3},
    "llama, one key and value head": {"intermediate_size": 24, "num_attention_heads": 2},
    "qwen2": {"intermediate_size": 24, "num_key_value_heads": 3},
    "qwen3": {"intermediate_size": 24, "num_key_value_heads": 3},
    "phi3": {"intermediate_size": 24, "num_key_value_heads": 3},
    "gemma2": {"intermediate_size": 24, "num_key_value_heads": 2},
    "gpt2": {"n_inner": 64},
    "gpt_neox": {"intermediate_size": 24},
    "falcon": {"ffn_hidden_size": 64},
    "opt": {"ffn_dim": 24},
    "bert": {"intermediate_size": 24},
    "t5": {"d_ff": 24},
    "umt5": {"d_ff": 24, "num_heads": 2},
    "bart": {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    "vit": {"intermediate_size": 24, "num_attention_heads": 2},
    "mixtral": {"num_key_value_heads": 2},
    "llava": {"text_config.intermediate_size": 24, "text_config.num_key_value_heads": 2},
    "olmo2": {"intermediate_size": 24},
    "bitnet": {},
}
REASONS = {
    "gpt2": ("heads", "ties the size of its heads to its width"),
    "bert": ("heads", "remove neurons or layers instead"),
    "t5": ("heads", "layers share a bias"),
    "mixtral": ("neurons", "stacks experts, whose neurons stay; remove heads, experts or layers"),
    "olmo2": ("heads", "a norm reads all units"),
    "bitnet": ("neurons", "a norm reads all units"),
}
FEW = ("llama, groups", "phi3", "gpt2", "t5", "vit", "olmo2")


@pytest.fixture(autouse=True)
def with_more_families(monkeypatch):
    for name, family in MORE.items():
        monkeypatch.setitem(FAMILIES, name, family)


def model_of(name):
    """A model whose biases and norms are not those it began with."""
    model = build(name)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(name):
    """Arguments of a forward; a loss for classes would write into the configuration."""
    return {key: value for key, value in inputs(name).items() if key != "labels" or value.ndim > 1}


def plan_of(model, batch, **options):
    return config_plan(Calibration(model, [batch], **options))


def snapshot(model):
    """All that a plan must leave as it was."""
    tensors = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    own = {id(tensor): tensor.requires_grad for tensor in model.parameters()}
    modes = [module.training for module in model.modules()]
    numbers = [
        {key: repr(value) for key, value in vars(module).items() if not key.startswith("_")}
        for module in model.modules()
    ]
    config = model.config.to_dict() if hasattr(model, "config") else None
    return tensors, (own, modes, numbers, config, torch.get_rng_state().tolist())


def assert_same(before, after):
    assert before[1] == after[1]
    assert list(before[0]) == list(after[0])
    assert [name for name, value in before[0].items() if not torch.equal(value, after[0][name])] == []


def chosen(plan, share=0.3):
    """Units of each layer, different ones, as many as its field allows near the share."""
    rng, left = torch.Generator().manual_seed(3), {}
    for layer in plan.layers:
        most = layer.num - max(1, round(share * layer.num))
        left[layer.field] = max(num for num in plan.allowed(layer.field) if num <= most)
    return left, {layer: torch.randperm(layer.num, generator=rng)[left[layer.field] :] for layer in plan.layers}


@torch.no_grad()
def unread(model, gone, batch):
    """Outputs of a copy whose consumers do not read some units."""
    copy = deepcopy(model)
    for layer, units in gone.items():
        slices = layer.slices[layer.consumer]
        tensor_of(copy, layer.consumer).index_fill_(slices.dim, slices.places[units].flatten(), 0)
    return copy(**batch)[0]


def weights_per_unit(model, layer):
    """Elements of matrices that go with one unit."""
    tensors = {name: tensor_of(model, name) for name in layer.slices}
    return sum(
        tensor.numel() // tensor.shape[layer.slices[name].dim] * layer.slices[name].places.shape[1]
        for name, tensor in tensors.items()
        if tensor.ndim > 1
    )


@pytest.mark.parametrize("name", quickly(UNITS, *FEW))
def test_units_are_counted_cut_exactly_loaded_from_a_plain_folder_and_put_back(name, tmp_path):
    model, batch = model_of(name), inputs_of(name)
    before = snapshot(model)
    plan = plan_of(model, batch)
    assert_same(before, snapshot(model))
    assert {layer.field: layer.num for layer in plan.layers} == UNITS[name]
    if name in REASONS:
        kind, words = REASONS[name]
        assert words in plan.reasons[kind] and "\n" not in plan.reasons[kind]
        assert not any(layer.kind == kind for layer in plan.layers)
    left, gone = chosen(plan)
    wanted = unread(model, gone, batch)
    num_weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    num_gone = sum(weights_per_unit(model, layer) * len(units) for layer, units in gone.items())
    cuts = Cuts.of_units(model, gone, plan.numbers(left))
    cuts.apply_()
    assert sum(p.numel() for p in model.parameters() if p.ndim > 1) == num_weights - num_gone
    with torch.no_grad():
        torch.testing.assert_close(model(**batch)[0], wanted, rtol=1e-4, atol=1e-4)
    deepcopy(model).save_pretrained(tmp_path)  # it writes into the configuration
    loaded, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    assert_equal_models(loaded, model, batch)
    assert {field: attrgetter(field)(loaded.config) for field in left} == left
    cuts.undo_()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("name", "dtype"), each_once(["phi3", "t5", "olmo2"], [torch.bfloat16, torch.float16, torch.float64])
)
def test_a_type_changes_nothing_about_the_plan(name, dtype):
    model, batch = model_of(name), inputs_of(name)
    layers, plan = plan_of(model, batch).layers, plan_of(model.to(dtype), batch)
    assert len(plan.layers) == len(layers) > 0 and set(plan.reasons) == set(REASONS.get(name, ())[:1])
    for one, other in zip(layers, plan.layers, strict=True):
        assert all(torch.equal(one.slices[key].places, other.slices[key].places) for key in one.slices)


def test_weights_that_hardly_matter_change_nothing_about_the_plan():
    model, batch = build("phi3"), inputs_of("phi3")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(1e-3)
    assert {layer.field: layer.num for layer in plan_of(model, batch).layers} == UNITS["phi3"]


def test_offload_and_training_mode_change_nothing_about_the_plan():
    model, batch = model_of("llama, groups"), inputs_of("llama, groups")
    model.train().model.embed_tokens.requires_grad_(False)
    before = snapshot(model)
    plan = plan_of(model, batch, offload="cpu")
    assert {layer.field: layer.num for layer in plan.layers} == UNITS["llama, groups"]
    assert_same(before, snapshot(model))


class ToyConfig(PreTrainedConfig):
    """A configuration whose model says in ``layout`` how its fused weights lie."""

    model_type = "toy of layouts"

    def __init__(self, layout="", intermediate_size=8, num_attention_heads=6, num_key_value_heads=3, **more):
        super().__init__(**more)
        self.layout, self.intermediate_size, self.hidden_size, self.head_dim = layout, intermediate_size, 12, 2
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads


class Toy(PreTrainedModel):
    """Two layers of an attention without softmax and a gated MLP, whose weights are fused in one of many ways."""

    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        num, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "qkv": nn.Linear(12, (num + 2 * groups) * size), "o": nn.Linear(num * size, 12),
                "gate_up": nn.Linear(12, 2 * config.intermediate_size), "down": nn.Linear(config.intermediate_size, 12),
            })
            for _ in range(2)
        )  # fmt: skip
        if config.layout == "tied":
            self.layers[1]["down"].weight = self.layers[0]["down"].weight
        self.layout, self.groups, self.per_group, self.size = config.layout, groups, num // groups, size
        self.post_init()

    def split(self, x):
        """Queries (..., group, head, size), keys and values (..., group, size)."""
        groups, per_group, size = self.groups, self.per_group, self.size
        if self.layout == "by group":
            q, k, v = x.unflatten(-1, (groups, per_group + 2, size)).split([per_group, 1, 1], -2)
            return q, k.squeeze(-2), v.squeeze(-2)
        q, k, v = x.split([groups * per_group * size, groups * size, groups * size], -1)
        k, v = (part.unflatten(-1, (groups, size)) for part in (k, v))
        if self.layout == "strided":
            return q.unflatten(-1, (per_group, groups, size)).transpose(-2, -3), k, v
        return q.unflatten(-1, (groups, per_group, size)), k, v

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            q, k, v = self.split(layer["qkv"](x))
            out = (q * k.unsqueeze(-2)).cumsum(1) * v.unsqueeze(-2).tanh()
            out = (out.transpose(-2, -3) if self.layout == "strided" else out).flatten(-3)
            x = x + layer["o"](out)
            pairs = layer["gate_up"](x)
            interleaved = pairs.unflatten(-1, (-1, 2)).unbind(-1)
            gate, up = interleaved if self.layout == "interleaved" else pairs.chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * up)
        return (x,)


@pytest.mark.parametrize("layout", ["", "by group", "strided", "interleaved"])
def test_the_layout_of_fused_weights_is_found_and_every_other_one_is_refused(layout, monkeypatch):
    torch.manual_seed(0)
    model, batch = Toy(ToyConfig(layout)).eval(), {"input_ids": torch.arange(12)[None]}
    plan = plan_of(model, batch)
    assert {layer.field: layer.num for layer in plan.layers} == {"intermediate_size": 8, "num_key_value_heads": 3}
    left, gone = chosen(plan)
    wanted = unread(model, gone, batch)
    cuts = Cuts.of_units(model, gone, plan.numbers(left))
    cuts.apply_()
    torch.testing.assert_close(model(**batch)[0], wanted)
    cuts.undo_()

    faults, fault = [], UnitCheck.fault
    monkeypatch.setattr(UnitCheck, "fault", lambda *given: faults.append(fault(*given)) or "seen")
    refused = plan_of(model, batch)
    assert not refused.layers and len(faults) == 2 + 4 * 2
    assert sum(not said for said in faults) == 2, "one for neurons, one for heads"


@pytest.mark.parametrize("where", ["forward", "cut", "interrupt"])
def test_an_exception_leaves_the_model_as_it_was(where, monkeypatch):
    model, batch = model_of("llama, groups"), inputs_of("llama, groups")
    before, calls = snapshot(model), []
    error = KeyboardInterrupt if where == "interrupt" else MemoryError

    def failing(of):
        def run(*args, **kwargs):
            calls.append(of)
            if len(calls) == 4:
                raise error
            return of(*args, **kwargs)

        return run

    home, name = (cutting._Cut, "apply_") if where == "cut" else (type(model), "forward")
    monkeypatch.setattr(home, name, failing(getattr(home, name)))
    with pytest.raises(error):
        plan_of(model, batch)
    assert len(calls) == 4
    monkeypatch.undo()
    assert_same(before, snapshot(model))


def test_numbers_that_the_configuration_refuses_are_not_allowed():
    plan = plan_of(model_of("llama, groups"), inputs_of("llama, groups"))
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 24, "num_attention_heads": 6, "head_dim": 4} | {
        "num_key_value_heads": 6})).eval()  # fmt: skip
    assert plan.allowed("num_key_value_heads") == [1, 2, 3]
    plan = plan_of(model, text())
    assert plan.allowed("num_key_value_heads") == [1, 2, 3, 4, 6]  # divisors of the width
    assert plan.allowed("intermediate_size") == range(1, 25)
    with pytest.raises(ValueError, match="cannot be built with num_key_value_heads 5"):
        plan.numbers({"num_key_value_heads": 5})
    assert plan.numbers({"num_key_value_heads": 6, "intermediate_size": 24}) == []


def quantised(model):
    model.config.quantization_config = {"bits": 4}


def narrower(model):
    layer = model.model.layers[0].mlp
    layer.up_proj = nn.Linear(16, 20)


def whole_numbers(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [(quantised, "quantised"), (narrower, "has not the shape"), (whole_numbers, "int8; shrink the model in floating")],
)
def test_what_cannot_be_planned_is_refused_in_one_line(change, words):
    model = build("llama")
    change(model)
    with pytest.raises(ValueError, match=words) as refused:
        plan_of(model, text())
    assert "\n" not in str(refused.value)


def test_neurons_of_a_weight_that_two_layers_share_stay_and_heads_go():
    plan = plan_of(Toy(ToyConfig("tied")).eval(), {"input_ids": torch.arange(12)[None]})
    assert "is shared by several layers" in plan.reasons["neurons"]
    assert {layer.field for layer in plan.layers} == {"num_key_value_heads"}
