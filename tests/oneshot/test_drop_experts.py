"""Whole experts are dropped, exactly and with their router rows; what stays is the model with them masked out."""

import json

import pytest
import torch
from covering import quickly
from families import DEEPSEEK, EXPERTS, FAMILIES, SIZES, assert_equal_models, build, inputs, text

from prunus import prune, shrink

NUM = 8
GROUPS = {"n_routed_experts": NUM, "n_group": 2, "topk_group": 1}
MORE = {
    "qwen2_moe": ("Qwen2MoeForCausalLM", SIZES | EXPERTS | {"shared_expert_intermediate_size": 12, "num_experts": NUM}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | EXPERTS | {"head_dim": 8, "num_experts": NUM, "mlp_only_layers": [0]}),
    "olmoe": ("OlmoeForCausalLM", SIZES | {"num_experts": NUM, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK | {"n_routed_experts": NUM}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK | {"n_routed_experts": NUM}),
    "deepseek_v3, groups": ("DeepseekV3ForCausalLM", DEEPSEEK | GROUPS),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", SIZES | {
        "moe_num_experts": NUM, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 0}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", SIZES | {"num_local_experts": NUM, "num_experts_per_tok": 2, "head_dim": 8}),
    "llama4": ("Llama4ForCausalLM", SIZES | {
        "num_local_experts": NUM, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "head_dim": 8,
        "intermediate_size_mlp": 24}),
}  # fmt: skip
for name in ("mixtral", "gpt_oss", "granitemoe"):
    kind, values, _ = FAMILIES[name]
    MORE[name] = kind, values | {"num_local_experts": NUM}
FEW = ("mixtral", "gpt_oss")


@pytest.fixture(autouse=True)
def with_more_families(monkeypatch):
    for name, (kind, values) in MORE.items():
        monkeypatch.setitem(FAMILIES, name, (kind, values, text))


def model_of(name):
    """The model; biases of routers, where there are some, are not zero."""
    model = build(name)
    torch.manual_seed(1)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("router.bias", "e_score_correction_bias", "experts.down_proj_bias")):
            tensor.data.normal_(0, 0.1)
    return model


def masked_by(model, dropped):
    """Routers whose logits, and biases of the choice, are minus infinity for the dropped experts."""
    linear, handles = torch.nn.functional.linear, []
    for layer in dropped:
        block = model.get_submodule(layer.name.rpartition(".")[0])
        router = getattr(block, "gate", None) or block.router

        def before(module, args, gone=layer.dropped):
            def masked(x, weight, bias=None):
                logits = linear(x, weight, bias)
                return logits.index_fill(-1, torch.tensor(gone), -torch.inf)

            torch.nn.functional.linear = masked

        def after(*_):
            torch.nn.functional.linear = linear

        handles += [router.register_forward_pre_hook(before), router.register_forward_hook(after, always_call=True)]
        for key, buffer in [*block.named_buffers(), *router.named_parameters()]:
            if key.endswith("e_score_correction_bias"):
                buffer.data[..., list(layer.dropped)] = -1e9
    return handles


@pytest.mark.parametrize("name", quickly(MORE, "qwen3_moe", "deepseek_v3, groups", *FEW))
@torch.no_grad()
def test_what_stays_is_the_model_with_dropped_experts_masked_out_of_the_routing(name, tmp_path):
    dense, model, batch = model_of(name), model_of(name), inputs(name)
    result = shrink(model, [batch], experts=0.25)
    small, whole = model.state_dict(), dense.state_dict()
    blocks = {layer.name.rpartition(".")[0]: layer for layer in result.experts}
    assert blocks and all(len(layer.dropped) == NUM // 4 == NUM - len(layer.kept) for layer in blocks.values())
    num_cut = 0
    for key, tensor in whole.items():
        layer = next((layer for path, layer in blocks.items() if key.startswith(f"{path}.")), None)
        if small[key].shape == tensor.shape:
            assert torch.equal(small[key], tensor)
        else:
            dim = next(d for d, (a, b) in enumerate(zip(small[key].shape, tensor.shape, strict=True)) if a != b)
            assert torch.equal(small[key], tensor.index_select(dim, torch.tensor(layer.kept)))
            num_cut += 1
    assert num_cut >= 3 * len(blocks)

    found, unmasked = model(**batch).logits, dense(**batch).logits
    handles = masked_by(dense, result.experts)
    wanted = dense(**batch).logits
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) and len(handles) == 2 * len(blocks)
    assert not torch.allclose(found, unmasked, rtol=1e-4, atol=1e-5)

    model.save_pretrained(tmp_path)
    assert_equal_models(type(model).from_pretrained(tmp_path), model, batch)
    counts = {value for key, value in json.loads((tmp_path / "config.json").read_text()).items() if key in COUNTS}
    assert counts == {NUM - NUM // 4}


COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_importance_is_the_mean_over_routed_tokens_of_router_weight_times_output_norm(name):
    model, batch = model_of(name), inputs(name)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1:, 9:] = 0
    counted = batch["attention_mask"].flatten().bool()
    sums = {}

    def add(module, args):
        x, index, weights = args
        for expert in range(NUM):
            token, place = torch.where((index == expert) & counted[:, None])
            if name == "gpt_oss":
                hidden = module._apply_gate(x[token] @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert])
                out = hidden @ module.down_proj[expert] + module.down_proj_bias[expert]
            else:
                gate, up = (x[token] @ module.gate_up_proj[expert].T).chunk(2, -1)
                out = (module.act_fn(gate) * up) @ module.down_proj[expert].T
            sums.setdefault(module, []).append(out.norm(dim=1) * weights[token, place])

    paths = [path for path, module in model.named_modules() if path.endswith(".experts")]
    handles = [model.get_submodule(path).register_forward_pre_hook(add) for path in paths]
    model(**batch)
    for handle in handles:
        handle.remove()
    wanted = [sums[model.get_submodule(path)] for path in paths]
    layers = shrink(model, [batch], experts=0.5).experts
    assert [layer.name for layer in layers] == paths
    for layer, parts in zip(layers, wanted, strict=True):
        means = torch.stack([part.mean() if len(part) else torch.zeros(()) for part in parts])
        assert torch.allclose(torch.tensor(layer.importance), means, rtol=1e-4)
        assert layer.num_tokens == tuple(map(len, parts))
        assert layer.dropped == tuple(sorted(means.argsort()[: NUM // 2].tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", *FEW])
@torch.no_grad()
def test_undo_puts_experts_back_bit_for_bit_and_apply_drops_them_again(name):
    model, batch = model_of(name), inputs(name)
    before, config = {key: value.clone() for key, value in model.state_dict().items()}, model.config.to_dict()
    parameters, dense = list(model.parameters()), model(**batch).logits
    result = shrink(model, [batch], experts=0.25)
    shrunk = model(**batch).logits
    for _ in range(2):
        result.undo_()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert model.config.to_dict() == config and torch.equal(model(**batch).logits, dense)
        assert all(own is was for own, was in zip(model.parameters(), parameters, strict=True))
        result.apply_()
        assert torch.equal(model(**batch).logits, shrunk)


def test_prune_answers_the_old_call_with_the_line_to_write():
    model = model_of("mixtral")
    with pytest.raises(ValueError, match=r"call shrink\(model, batches, experts=0\.25\), then prune"):
        prune(model, [text()], experts=0.25)
    with pytest.raises(TypeError, match="unexpected keyword argument 'expert'"):
        prune(model, [text()], expert=0.25)


def test_a_model_without_some_experts_is_pruned_as_any_other():
    model, batch = model_of("mixtral"), inputs("mixtral")
    shrunk = shrink(model, [batch], experts=0.25)
    result = prune(model, [batch], 0.5)
    assert result.sparsity == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match="trained or changed after it was shrunk"):
        shrunk.undo_()
    result.undo_()
    shrunk.undo_()
    assert model.config.num_local_experts == NUM


def test_groups_of_experts_lose_as_many_each():
    layers = shrink(model_of("deepseek_v3, groups"), [text()], experts=0.5).experts
    assert all([expert < NUM // 2 for expert in layer.dropped].count(True) == NUM // 4 for layer in layers)


LINES = {
    "none": ("llama", 0.25, "LlamaForCausalLM has no experts to drop"),
    "top-k": ("mixtral", 0.9, "1 of 8 experts per layer would stay, but each token goes to 2; drop at most 0.75"),
    "rounds to none": ("mixtral", 0.05, "0.05 of 8 experts per layer is none of them"),
    "rounds to all": ("mixtral", 0.99, "0.99 of 8 experts per layer is all of them"),
    "all": ("mixtral", 8, "8 of 8 experts per layer is all of them"),
    "fraction": ("mixtral", 1.5, "or a fraction between 0 and 1, got 1.5"),
    "groups": ("deepseek_v3, groups", 0.125, "drop a multiple of 2, not 1 of 8; for example 0.25"),
    "in groups": ("deepseek_v3, groups", 0.75, "1 experts would stay in each of 2 groups"),
}


@pytest.mark.parametrize("case", LINES)
def test_what_cannot_be_dropped_is_refused_in_one_line_and_nothing_changes(case):
    name, fraction, line = LINES[case]
    model = model_of(name)
    before, config = {key: value.clone() for key, value in model.state_dict().items()}, model.config.to_dict()
    with pytest.raises(ValueError) as error:
        shrink(model, [text()], experts=fraction)
    assert line in str(error.value) and "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config


def test_experts_need_samples_and_a_config_that_fits_the_model():
    model, other = model_of("mixtral"), model_of("mixtral")
    with pytest.raises(ValueError, match="no calibration samples"):
        shrink(model, [], experts=0.25)
    model.model.layers[0].mlp.gate.weight = torch.nn.Parameter(torch.zeros(6, 16))
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight has not the shape that the model's config says"):
        shrink(model, [text()], experts=0.25)
    other.model.layers[0].mlp.register_buffer("number_of_token", torch.arange(3))
    with pytest.raises(ValueError, match="number_of_token has not the shape"):
        shrink(other, [text()], experts=0.25)


def test_experts_that_are_separate_modules_are_refused(monkeypatch):
    kind = "SwitchTransformersForConditionalGeneration"
    values = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "num_experts": 4}
    values |= {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1}
    monkeypatch.setitem(FAMILIES, "switch", (kind, values, text))
    with pytest.raises(ValueError, match="are separate modules"):
        shrink(build("switch"), [text() | {"labels": text()["input_ids"]}], experts=0.25)


@pytest.mark.parametrize("batches", [torch.zeros(2, 2, 8).long(), {"input_ids": torch.zeros(2, 8).long()}, 0.5])
def test_what_are_no_batches_is_refused_before_experts_are_dropped(batches):
    model = model_of("mixtral")
    with pytest.raises(ValueError, match=r"put it into a list|iterable of batches"):
        shrink(model, batches, experts=0.25)
