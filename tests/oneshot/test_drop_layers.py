"""Whole layers are removed: those that matter least, so that what stays computes what it computed before."""

import copy
from collections import OrderedDict

import pytest
import torch
from covering import quickly
from families import (
    DEEPSEEK,
    FAMILIES,
    GEMMA,
    JAMBA,
    SIZES,
    START,
    T5,
    TWO_SIDES,
    assert_equal_models,
    build,
    inputs,
    pairs,
    text,
)
from torch.nn import functional as F

from prunus.lab.data import TokenShape
from prunus.lab.models import GPT
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.drop_layers import drop_layers_
from prunus.oneshot.forward import replaced

DEEP = SIZES | {"num_hidden_layers": 5, "n_layer": 5, "n_embd": 16, "n_head": 2, "n_positions": 32, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SIDES = {"encoder_layers": 3, "decoder_layers": 3}
LINEAR = {f"linear_{key}": 8 for key in ("key_head_dim", "value_head_dim")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
MORE = {
    "llama": ("LlamaForCausalLM", DEEP, text),
    "gpt2": ("GPT2LMHeadModel", DEEP, text),
    "bert": ("BertModel", DEEP, text),
    "gemma2": ("Gemma2ForCausalLM", DEEP | GEMMA | {"num_hidden_layers": 5, "layer_types": KINDS}, text),
    "qwen2": ("Qwen2ForCausalLM", DEEP | {"use_sliding_window": True, "max_window_layers": 3}, text),
    "t5": ("T5ForConditionalGeneration", T5 | START | {"num_layers": 3}, pairs),
    "bart": ("BartForConditionalGeneration", TWO_SIDES | SIDES, pairs),
    "jamba": ("JambaForCausalLM", JAMBA | {"num_hidden_layers": 5}, text),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK | {"num_hidden_layers": 5, "first_k_dense_replace": 2}, text),
    "qwen3_next": ("Qwen3NextForCausalLM", DEEP | LINEAR | {"full_attention_interval": 2}, text),
    # what cannot lose a layer
    "albert": ("AlbertForMaskedLM", DEEP | {"embedding_size": 8}, text),
    "esm": ("EsmForMaskedLM", DEEP | {"mask_token_id": 3, "position_embedding_type": "rotary"}, text),
}


@pytest.fixture(autouse=True)
def with_more_layers(monkeypatch):
    for name, family in MORE.items():
        monkeypatch.setitem(FAMILIES, name, family)


def state_of(model):
    """All that a removal may change: modules, tensors, plain attributes, configurations, modes and flags."""
    modules = dict(model.named_modules())
    numbers = {
        (name, key): copy.deepcopy(value)
        for name, module in modules.items()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | list | tuple)
    }
    configs = {name: module.config.to_dict() for name, module in modules.items() if hasattr(module, "config")}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    return modules, numbers, configs, flags, [*map(id, model.parameters()), *map(id, model.buffers())]


def gpt(num_layers=4):
    torch.manual_seed(0)
    model = GPT(num_layers, 2, 16, TokenShape(64, 32))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model.eval()


def identity(x, *args, **kwargs):
    return x


@pytest.mark.parametrize("name", quickly([*MORE][:-2], "llama", "gpt2", "t5", "jamba"))
@torch.no_grad()
def test_the_smaller_model_is_the_one_that_its_folder_loads(name, tmp_path):
    model, batch = build(name), inputs(name)
    dropped = drop_layers_(Calibration(model, [batch]), 2)
    assert dropped.cuts.is_applied and dropped.num_dropped == len(dropped.distances) == 2 < dropped.num_layers
    model.save_pretrained(tmp_path)
    assert_equal_models(type(model).from_pretrained(tmp_path), model, batch)


@pytest.mark.parametrize("name", quickly(("llama", "gpt2", "bert", "gemma2"), "bert"))
@torch.no_grad()
def test_outputs_are_those_with_identities_in_place_of_the_layers(name):
    model, dense, batch = build(name), build(name), inputs(name)
    dropped = drop_layers_(Calibration(model, [batch]), 3)
    with replaced({dense.get_submodule(layer): identity for layer in dropped.names}):
        expected = dense(**batch)[0]
    assert torch.equal(model(**batch)[0], expected)


@pytest.mark.parametrize("size", quickly((None, 1, 3), 3))
@torch.no_grad()
def test_each_time_the_layer_goes_without_which_the_divergence_is_least(size):
    model, dense, batch = build("llama"), build("llama"), inputs("llama")
    logits, gone, expected = dense(**batch).logits.log_softmax(-1), [], []
    for _ in range(3):
        distances = {}
        for name in (f"model.layers.{i}" for i in range(5)):
            with replaced({dense.get_submodule(layer): identity for layer in [*gone, name]}):
                other = dense(**batch).logits.log_softmax(-1)
            distances[name] = F.kl_div(other, logits, log_target=True, reduction="none").sum(-1).mean().item()
        gone.append(min((name for name in distances if name not in gone), key=distances.__getitem__))
        expected.append(distances[gone[-1]])
    dropped = drop_layers_(Calibration(model, [batch], batch_size=size), 3)
    assert dropped.names == gone and dropped.loss == "KL divergence"
    assert dropped.distances == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_does_nothing_goes_first(dtype):
    model = build("llama").to(dtype)
    idle = model.model.layers[2]
    for weight in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
        weight.data.zero_()
    dropped = drop_layers_(Calibration(model, [inputs("llama")]), 1)
    assert dropped.names == ["model.layers.2"] and dropped.distances == [pytest.approx(0, abs=1e-6)]


@pytest.mark.slow
def test_of_equal_layers_the_first_goes():
    model = build("llama")
    for layer in model.model.layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.zero_()
    dropped = drop_layers_(Calibration(model, [inputs("llama")]), 4)
    assert dropped.names == [f"model.layers.{i}" for i in range(4)]


@pytest.mark.parametrize("name", quickly(("llama", "gemma2", "t5", "qwen3_next"), "llama"))
@torch.no_grad()
def test_a_loaded_model_generates_with_its_cache_what_it_generates_without(name, tmp_path):
    model, batch = build(name), inputs(name)
    drop_layers_(Calibration(model, [batch]), 2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    texts = [
        each.generate(batch["input_ids"], use_cache=cache, **options)
        for each, cache in ((loaded, True), (loaded, False), (model, True))
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_lists_by_layer_lose_the_entries_of_the_layers_that_went():
    model = build("gemma2")
    dropped = drop_layers_(Calibration(model, [inputs("gemma2")]), 2)
    gone = {int(name.rpartition(".")[2]) for name in dropped.names}
    assert model.config.layer_types == [kind for i, kind in enumerate(KINDS) if i not in gone]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(("t5", "bart"), "bart"))
def test_each_list_of_blocks_keeps_one(name):
    model = build(name)
    blocks = [model.get_encoder(), model.get_decoder()]
    dropped = drop_layers_(Calibration(model, [inputs(name)]), 4)
    lengths = [len(getattr(part, "layers" if name == "bart" else "block")) for part in blocks]
    assert lengths == [1, 1] and len({name.rpartition(".")[0] for name in dropped.names}) == 2


@pytest.mark.slow
def test_layers_whose_kind_follows_from_their_number_stay_where_they_are():
    model = build("jamba")
    kinds = [type(layer) for layer in model.model.layers]
    drop_layers_(Calibration(model, [inputs("jamba")]), 2)
    assert [type(layer) for layer in model.model.layers] == kinds[:3]


@torch.no_grad()
def test_blocks_of_a_plain_model_go():
    model, dense, batch = gpt(), gpt(), inputs("llama")["input_ids"]
    dropped = drop_layers_(Calibration(model, [batch]), 2)
    with replaced({dense.get_submodule(layer): identity for layer in dropped.names}):
        assert torch.equal(model(batch), dense(batch))
    assert len(model.blocks) == 2 and dropped.loss == "KL divergence"


def test_what_has_no_matrix_is_no_layer_and_names_stay():
    torch.manual_seed(0)
    names = ("first", "relu", "second", "norm", "third", "last")
    parts = (torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    parts += (torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    model = torch.nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
    x = torch.randn(4, 8)
    dropped = drop_layers_(Calibration(model, [x]), 2)
    assert {*dropped.names} < {"first", "second", "third"} and dropped.loss == "mean square"
    assert [*model._modules] == [name for name in names if name not in dropped.names]
    assert model(x).shape == (4, 3)


@pytest.mark.slow
def test_tokens_that_the_mask_leaves_out_do_not_count():
    batch = inputs("llama")
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 8:] = 0
    other = batch["input_ids"].clone()
    other[:, 8:] = 5
    results = [
        drop_layers_(Calibration(build("llama"), [{"input_ids": ids, "attention_mask": mask}]), 2)
        for ids in (batch["input_ids"], other)
    ]
    assert results[0].names == results[1].names and results[0].distances == pytest.approx(results[1].distances)


@pytest.mark.parametrize("name", quickly(("llama", "t5", "gemma2", "plain"), "gemma2", "plain"))
def test_undo_brings_the_same_modules_back_and_apply_removes_them_again(name):
    model = gpt() if name == "plain" else build(name)
    batch = inputs("llama")["input_ids"] if name == "plain" else inputs(name)
    before, values = state_of(model), copy.deepcopy(model.state_dict())
    dropped = drop_layers_(Calibration(model, [batch]), 2)
    smaller = state_of(model)
    dropped.cuts.undo_()
    assert state_of(model) == before and not dropped.cuts.is_applied
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    dropped.cuts.undo_()
    dropped.cuts.apply_()
    assert state_of(model) == smaller != before
    dropped.cuts.apply_()
    dropped.cuts.undo_()
    assert state_of(model) == before


@pytest.mark.parametrize("after", quickly((1, 4, 12, 14, 15, 16), 4, 16))
def test_an_exception_leaves_the_model_as_it_was(after):
    model, calls = build("llama"), []
    before = state_of(model)

    def fail(*_):
        calls.append(1)
        if len(calls) == after:
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        drop_layers_(Calibration(model, [inputs("llama")]), 2)
    handle.remove()
    assert state_of(model) == before


def test_modes_buffers_and_random_numbers_are_as_before():
    model = build("llama")
    model.train()
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    dropped = drop_layers_(Calibration(model, [inputs("llama")]), 1)
    assert torch.equal(torch.rand(2), expected)
    dropped.cuts.undo_()
    assert {module: module.training for module in model.modules()} == modes
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not model.model.norm.weight.requires_grad


def test_an_offloaded_model_loses_the_same_layers():
    results = [
        drop_layers_(Calibration(build("llama"), [inputs("llama")], offload=offload), 2) for offload in (None, "cpu")
    ]
    assert results[0].names == results[1].names and results[0].distances == pytest.approx(results[1].distances)


@pytest.mark.slow
@torch.no_grad()
def test_sixteen_samples_are_taken_evenly_from_all():
    torch.manual_seed(1)
    batches = [{"input_ids": torch.randint(3, 64, (num, length))} for num, length in ((20, 6), (5, 9), (15, 6))]
    chosen = {40 * i // 16 for i in range(16)}
    few, start = [], 0
    for batch in batches:
        own = [row for row in range(len(batch["input_ids"])) if start + row in chosen]
        start += len(batch["input_ids"])
        few.append({"input_ids": batch["input_ids"][own]})
    results = [drop_layers_(Calibration(build("llama"), each), 2) for each in (batches, few)]
    assert results[0].names == results[1].names
    assert results[0].distances == pytest.approx(results[1].distances, rel=1e-4)


@pytest.mark.parametrize("num", [0, -1, 0.01, 0.99, 2.0, True, None, "2", 5, 6])
def test_another_number_than_one_to_all_but_one_is_refused_in_one_line(num):
    model = build("llama")
    before = state_of(model)
    with pytest.raises(ValueError, match="layers") as error:
        drop_layers_(Calibration(model, [inputs("llama")]), num)
    assert "\n" not in str(error.value) and state_of(model) == before


@pytest.mark.parametrize(("name", "reason"), [("albert", "many times"), ("esm", "contact_head")])
def test_a_model_that_cannot_lose_a_layer_is_refused_with_the_reason(name, reason):
    model = build(name)
    before = state_of(model)
    with pytest.raises(ValueError, match=reason) as error:
        drop_layers_(Calibration(model, [inputs(name)]), 1)
    assert "\n" not in str(error.value) and state_of(model) == before


class Twice(torch.nn.Module):
    """Its blocks run two times, or share a weight."""

    def __init__(self, shares):
        super().__init__()
        self.times = 1 if shares else 2
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        if shares:
            self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x):
        for block in [*self.blocks] * self.times:
            x = x + block(x)
        return x


@pytest.mark.parametrize(("shares", "reason"), [(True, "share weights"), (False, "more than once")])
def test_blocks_that_run_twice_or_share_weights_are_refused(shares, reason):
    with pytest.raises(ValueError, match=reason):
        drop_layers_(Calibration(Twice(shares), [torch.randn(4, 8)]), 1)


class Numbered(torch.nn.Module):
    """Counts its blocks by itself, so that none can go."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.scales = [1.0, 2.0, 3.0]

    def forward(self, x):
        for i in range(3):
            x = x + self.scales[i] * self.blocks[i](x)
        return x


def test_a_model_that_needs_each_of_its_blocks_is_refused_and_stays():
    model = Numbered()
    with pytest.raises(ValueError, match="fails without it"):
        drop_layers_(Calibration(model, [torch.randn(4, 8)]), 1)
    assert len(model.blocks) == 3


def test_samples_that_are_not_finite_are_refused():
    model = build("llama")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(torch.nan)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="gives NaN for a sample"):
        drop_layers_(Calibration(model, [inputs("llama")]), 1)
