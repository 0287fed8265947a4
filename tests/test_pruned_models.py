"""A pruned model is a plain model: copied, saved, compiled, tied, fine-tuned and let go like any other."""

import copy
import gc
import io
import subprocess
import sys
import weakref

import pytest
import torch
from covering import each_once
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from toys import (
    NAMES,
    NUM_WEIGHTS,
    adamw,
    adamw_prune,
    assert_pruned_are_zero,
    backward,
    batch,
    net,
    num_pruned,
    train,
)

from prunus import Constant, Pruner, Ramp, Rate, Regrow

MAKERS = {"adamw": adamw, "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), "prune": adamw_prune}


def pruned(make=adamw, steps=3, **options):
    model = net()
    pruner = Pruner(model, make(model), **{"score": "magnitude", "schedule": Constant(0.5)} | options)
    train(model, pruner.optimizer, range(steps))
    return model, pruner


def zeros_of(model):
    return {name: p.detach() == 0 for name, p in model.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("given", ["masks", "zeros"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_masks_or_zeros_given_are_held_through_fine_tuning(make, given):
    source, _ = pruned()
    source.out.weight.data[0, 0] = -0.0
    masks = {name: ~zero for name, zero in zeros_of(source).items()}
    model = source if given == "zeros" else net(seed=4)
    pruner = Pruner(model, make(model), masks="zeros" if given == "zeros" else masks)
    for steps in (range(0), range(6)):
        train(model, pruner.optimizer, steps)
        assert all(torch.equal(pruner.masks[name], mask) for name, mask in masks.items())
        assert_pruned_are_zero(pruner)


def test_masks_of_some_weights_leave_the_others_dense():
    model = net()
    mask = torch.rand(13, 75) < 0.5
    pruner = Pruner(model, adamw(model), masks={"hidden.weight": mask})
    train(model, pruner.optimizer, range(3))
    assert num_pruned(pruner) == int((~mask).sum()) and not (model.conv.weight == 0).any()


def test_a_schedule_builds_on_the_masks_given():
    model = net()
    mask = torch.zeros(4, 13, dtype=torch.bool)
    pruner = Pruner(model, adamw(model), masks={"out.weight": mask}, schedule=Ramp(0.6, 0, 8), every=2)
    train(model, pruner.optimizer, range(10))
    assert not pruner.masks["out.weight"].any()
    assert num_pruned(pruner) == round(0.6 * NUM_WEIGHTS)


LET_GO = {
    "plain": {},
    "inputs": {"score": "wanda"},
    "regrowth": {"regrow": Regrow(0.3, "gradient")},
    "rates": {"rate": Rate(1)},
}


@pytest.mark.parametrize(("kind", "options"), each_once(MAKERS, LET_GO), ids=str)
def test_removing_leaves_the_zeros_and_lets_go_of_everything(kind, options):
    make = MAKERS[kind]
    model, pruner = pruned(make, 6, schedule=Ramp(0.5, 1, 4), every=3, **LET_GO[options])
    zeros = zeros_of(model)
    pruner.remove()
    assert all(torch.equal(zero, zeros_of(model)[name]) for name, zero in zeros.items())
    assert all("mask" not in state for state in pruner.optimizer.state.values())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    twin = copy.deepcopy(model)
    plain = make(twin)
    plain.load_state_dict(copy.deepcopy(pruner.optimizer.state_dict()))
    for each, optimizer in ((model, pruner.optimizer), (twin, plain)):
        train(each, optimizer, range(6, 9))
    assert pruner.step == 6 and not any(zero.any() for zero in zeros_of(model).values())
    assert all(map(torch.equal, model.parameters(), twin.parameters())), "rates and masks are an optimizer's own again"


@pytest.mark.parametrize("options", LET_GO)
def test_a_model_is_freed_though_its_pruner_waits_for_an_event(options):
    model, pruner = pruned(steps=4, schedule=Ramp(0.5, 1, 9), every=2, **LET_GO[options])
    freed = weakref.ref(pruner), weakref.ref(model.hidden)
    del pruner
    gc.collect()
    assert freed[0]() is None
    del model
    gc.collect()
    assert freed[1]() is None and not _has_any_global_hook()


def test_a_report_counts_the_zeros_of_every_weight_and_says_why_others_are_dense():
    model, pruner = pruned(exclude="out")
    report = pruner.report()
    assert [layer.name for layer in report.layers] == NAMES
    for layer in report.layers:
        weight = dict(model.named_parameters())[layer.name]
        assert layer.num_zeros == int((weight == 0).sum()) and layer.num_weights == weight.numel()
        assert layer.shape == tuple(weight.shape) and layer.sparsity == layer.num_zeros / layer.num_weights
    assert [layer.dense for layer in report.layers] == [None, None, "excluded"]
    total = sum(p.numel() for p in model.parameters())
    assert report.num_prunable == 27 + 975 and report.num_zeros == round(0.5 * 1002)
    assert pruner.sparsity == report.sparsity == 501 / 1002
    assert report.sparsity_of_all == 501 / total
    assert all(name in str(report) for name in NAMES) and "50.00" in str(report)
    model.hidden.weight.data.fill_(1.0)  # zeros are counted, not masks
    assert pruner.report().layers[1].num_zeros == 0


def test_a_copied_model_is_plain_and_leaves_the_original_alone():
    model, pruner = pruned()
    twin = copy.deepcopy(model)
    digest, before = pruner.digest(), copy.deepcopy(model.state_dict())
    train(twin, adamw(twin), range(3))
    assert not any(zero.any() for zero in zeros_of(twin).values())
    assert pruner.digest() == digest and pruner.step == 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_state_dict_has_plain_keys_and_a_whole_model_is_saved_and_loaded():
    model, _ = pruned()
    assert list(model.state_dict()) == list(net().state_dict())
    fresh = net(seed=3)
    fresh.load_state_dict(model.state_dict(), strict=True)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(fresh(batch(0)), model(batch(0))) and torch.equal(loaded(batch(0)), model(batch(0)))
    train(loaded, adamw(loaded), range(2))


@pytest.mark.slow
def test_a_saved_model_loads_where_prunus_is_not_installed(tmp_path):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = adamw(model)
    Pruner(model, optimizer, schedule=Constant(0.5))
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    torch.save({"state": model.state_dict(), "model": model}, tmp_path / "model.pt")
    program = """
import sys
sys.modules["prunus"] = None
import torch
from torch import nn
saved = torch.load(sys.argv[1], weights_only=False)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
model.load_state_dict(saved["state"])
x = torch.ones(1, 6)
assert torch.equal(model(x), saved["model"](x))
assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim == 2) == 20
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)


def test_a_compiled_model_has_plain_names_and_trains_as_the_plain_one():
    plain, first = pruned(schedule=Ramp(0.6, 0, 4), every=2, steps=6)
    model = torch.compile(net(), backend="eager")
    second = Pruner(model, adamw(model), score="magnitude", schedule=Ramp(0.6, 0, 4), every=2)
    train(model, second.optimizer, range(6))
    assert list(second.masks) == NAMES
    assert second.digest() == first.digest()
    assert [layer.name for layer in second.report().layers] == NAMES
    assert torch.equal(model.hidden.weight, plain.hidden.weight)


def test_a_wrapped_model_takes_over_the_state_of_a_plain_one():
    _, first = pruned()
    wrapped = nn.ModuleDict({"module": net()})
    second = Pruner(wrapped, adamw(wrapped), score="magnitude", schedule=Constant(0.5))
    second.load_state_dict(first.state_dict())
    assert second.digest() == first.digest()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(9, 6)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.two(self.one(self.wte(tokens)).tanh()).tanh()))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_tied_shared_and_frozen_weights(make):
    torch.manual_seed(0)
    model = Tied()
    before = model.frozen.weight.clone()
    optimizer = make(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5), include="wte.weight")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.arange(9)).square().mean().backward()
        optimizer.step()
    assert list(pruner.masks) == ["wte.weight", "one.weight"] and num_pruned(pruner) == 45
    assert model.head.weight is model.wte.weight and model.two.weight is model.one.weight
    assert_pruned_are_zero(pruner)
    assert torch.equal(model.frozen.weight, before)
    assert {layer.name: layer.dense for layer in pruner.report().layers}["frozen.weight"] == "frozen"


def test_weights_in_several_groups_and_outside_the_optimizer():
    model = net()
    groups = [{"params": [model.conv.weight], "weight_decay": 0.0}, {"params": [model.out.weight], "lr": 0.1}]
    pruner = Pruner(model, torch.optim.AdamW(groups), schedule=Constant(0.5))
    backward(model, 0)
    pruner.optimizer.step()
    assert list(pruner.masks) == ["conv.weight", "out.weight"] and num_pruned(pruner) == round(0.5 * 79)
    dense = {layer.name: layer.dense for layer in pruner.report().layers}
    assert dense["hidden.weight"] == "not held by the optimizer"
