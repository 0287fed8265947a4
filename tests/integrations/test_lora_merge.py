"""Merging adapters into a pruned model keeps every zero, changes nothing else, and says what that cost."""

import copy

import pytest
import torch
from tiny import batch, gpt2
from torch import nn

from prunus import AdamWPrune, PerRow, prune

peft = pytest.importorskip("peft")
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from prunus.integrations.peft import merge  # noqa: E402


class Odd(nn.Module):
    """What else adapters go on: convolution, attention with one matrix for all three, experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = Experts()
        self.tokens = nn.Embedding(7, 8, padding_idx=0)
        self.head = nn.Linear(8, 3)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, 8, 6))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip


BASES = {
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "linear": (llama, {"target_modules": ["q_proj", "down_proj"]}),
    "bfloat16": (lambda: llama().bfloat16(), {"target_modules": ["q_proj", "down_proj"]}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "conv1d dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "modules to save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}),
    "all linear": (llama, {"target_modules": "all-linear"}),
    "convolution": (Odd, {"target_modules": ["conv", "head"]}),
    "attention": (Odd, {"target_modules": ["attention"]}),
    "experts": (Odd, {"target_modules": ["head"], "target_parameters": ["experts.gate"]}),
    "embedding": (Odd, {"target_modules": ["tokens", "head"]}),
}


def adapted(kind, adapters=("default",)):
    """A model with 60 % of its matrices pruned, embeddings dense, with adapters that have learnt something."""
    make, options = BASES[kind]
    torch.manual_seed(1)
    model = make()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not any(parameter is m.weight for m in model.modules() if is_embedding(m)):
            parameter.data[torch.rand(parameter.shape) < 0.6] = 0
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    tuned = peft.get_peft_model(model, config, adapters[0])
    for name in adapters[1:]:
        tuned.add_adapter(name, config)
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name:
            parameter.data += torch.randn(parameter.shape).to(parameter.dtype)
    return tuned


def is_embedding(module):
    return isinstance(module, nn.Embedding)


def matrices(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("kind", BASES)
def test_every_zero_stays_and_all_else_is_as_in_a_plain_merge(kind):
    tuned = adapted(kind)
    before = matrices(copy.deepcopy(tuned).unload())
    if "modules_to_save" in BASES[kind][1]:  # which unload takes from the adapter
        originals = [(n, p) for n, p in tuned.get_base_model().named_parameters() if "original_module" in n]
        before |= {name.replace("original_module.", ""): p for name, p in originals}
    plain = matrices(copy.deepcopy(tuned).merge_and_unload())
    merged = merge(tuned)
    after = matrices(merged.model)
    assert after.keys() == plain.keys() == before.keys()
    changed = [name for name in after if not torch.equal(plain[name], before[name])]
    assert changed
    for name in after:
        masked = torch.where(before[name] != 0, plain[name], 0)
        free = is_embedding(merged.model.get_submodule(name.rpartition(".")[0]))
        assert torch.equal(after[name], plain[name] if free or name not in changed else masked), name
    names = [name for name in changed if "tokens" not in name]
    assert sorted(row.name for row in merged.weights) == sorted(names)
    assert merged.sparsity_of_plain_merge < merged.sparsity_before <= merged.sparsity

    updates = [(plain[n].float() - before[n].float()).double() for n in names]
    dropped = [update * (before[n] == 0) for n, update in zip(names, updates, strict=True)]
    share = sum(d.square().sum() for d in dropped) / sum(u.square().sum() for u in updates)
    assert merged.dropped == pytest.approx(float(share), rel=1e-6) and 0.3 < merged.dropped < 0.9


@pytest.mark.parametrize("adapters", [["first"], ["first", "second"], None])
def test_one_or_several_adapters_are_merged(adapters):
    tuned = adapted("linear", ["first", "second"])
    plain = matrices(copy.deepcopy(tuned).merge_and_unload(adapter_names=adapters))
    before = matrices(copy.deepcopy(tuned).unload())
    after = matrices(merge(tuned, adapters=adapters).model)
    assert all(torch.equal(after[name], torch.where(before[name] != 0, plain[name], 0)) for name in after)


def test_masks_that_are_given_take_the_place_of_zeros():
    tuned = adapted("linear")
    name = "model.layers.0.self_attn.q_proj.weight"
    mask = torch.rand(16, 16) < 0.5
    merged = merge(tuned, masks={name: mask, "model.embed_tokens.weight": torch.ones(29, 16, dtype=torch.bool)})
    assert torch.equal(merged.model.get_parameter(name) != 0, mask)
    assert "% of the update" in str(merged)


def with_nan(tuned):
    next(p for p in tuned.parameters() if p.requires_grad).data[0, 0] = float("nan")
    return tuned


def merged_before(tuned):
    tuned.merge_adapter()
    return tuned


@pytest.mark.parametrize(
    ("spoil", "options", "text"),
    [
        (lambda tuned: tuned, {"adapters": ["typo"]}, "typo.*default"),
        (lambda tuned: tuned, {"masks": {"typo.weight": torch.ones(2)}}, "typo.weight"),
        (lambda tuned: tuned, {"masks": {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}}, r"16, 16"),
        (with_nan, {}, "not finite"),
        (merged_before, {}, "merged already"),
    ],
    ids=["adapter", "mask", "shape", "nan", "merged"],
)
def test_what_cannot_be_merged_is_one_line_and_changes_nothing(spoil, options, text):
    tuned = spoil(adapted("linear"))
    before = {name: p.clone() for name, p in tuned.named_parameters()}
    with pytest.raises(ValueError, match=text) as error:
        merge(tuned, **options)
    assert "\n" not in str(error.value)
    now = dict(tuned.named_parameters())
    assert all(torch.equal(now[name].nan_to_num(7), before[name].nan_to_num(7)) for name in before)


def test_a_pruned_model_tuned_by_lora_ends_with_its_sparsity():
    model = gpt2()
    result = prune(model, [batch(0)], sparsity=0.4, score="magnitude", select=PerRow(), repair=None)
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    )
    optimizer = AdamWPrune([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    for number in range(20):
        tuned(**batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = merge(tuned)
    zeros = sum(int((p == 0).sum()) for name, p in merged.model.named_parameters() if ".c_" in name and p.ndim > 1)
    assert zeros == sum(int((~mask).sum()) for mask in result.masks.values())
    assert merged.sparsity == merged.sparsity_before > merged.sparsity_of_plain_merge
