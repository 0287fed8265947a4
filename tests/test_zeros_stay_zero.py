"""What is pruned stays exactly zero, in the weight and in every state of it, whatever trains the model."""

import pytest
import torch
from covering import each_once
from torch import nn
from toys import NAMES, adamw, adamw_prune, assert_pruned_are_zero, backward, net, num_pruned, train

from prunus import Constant, OneShot, Pruner, Ramp, Spam

OPTIMIZERS = {
    "adamw": lambda m: adamw(m, foreach=False),
    "adamw foreach": lambda m: adamw(m, foreach=True),
    "adamw fused": lambda m: adamw(m, fused=True),
    "adamw maximize": lambda m: adamw(m, maximize=True),
    "amsgrad": lambda m: adamw(m, amsgrad=True),
    "amsgrad foreach": lambda m: adamw(m, amsgrad=True, foreach=True),
    "amsgrad fused": lambda m: adamw(m, amsgrad=True, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1),
    "adam fused": lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1, fused=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.01, weight_decay=0.1),
    "nadam decoupled": lambda m: torch.optim.NAdam(m.parameters(), 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), 0.01, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.01, weight_decay=0.1),
    "sgd nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.001, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01, weight_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), weight_decay=0.1),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01, weight_decay=0.1),
    "adamw prune": adamw_prune,
    "adamw prune clipped": lambda m: adamw_prune(m, max_norm=0.1),
    "adamw prune spam": lambda m: adamw_prune(m, spam=Spam(theta=5.0, every=8, warmup=3, hold=2)),
}
FEW = ["adamw", "adamw foreach", "adamw fused", "sgd nesterov", "adamw prune"]


def score_for(name):
    return "bitter7" if "ad" in name and name not in ("adagrad", "adadelta", "adafactor") else "magnitude"


def pruner_for(name, model, **options):
    optimizer = OPTIMIZERS[name](model)
    return Pruner(model, optimizer, **{"score": score_for(name), "schedule": Ramp(0.7, 0, 12), "every": 3} | options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_every_optimizer(name):
    model = net()
    pruner = pruner_for(name, model)
    for step in range(20):
        train(model, pruner.optimizer, [step])
        assert_pruned_are_zero(pruner)
    assert num_pruned(pruner) == round(0.7 * 1054)


@pytest.mark.parametrize("name", FEW)
def test_in_half_precision_and_in_channels_last(name):
    for model in (net(dtype=torch.bfloat16), net().to(memory_format=torch.channels_last)):
        pruner = pruner_for(name, model)
        train(model, pruner.optimizer, range(16))
        assert_pruned_are_zero(pruner)
        assert num_pruned(pruner) == round(0.7 * 1054)


def several_backwards(model, optimizer, step):
    for part in range(3):
        backward(model, 3 * step + part)


def kept_gradients(model, optimizer, step):
    optimizer.zero_grad(set_to_none=False)
    backward(model, step)


def no_zeroing(model, optimizer, step):
    optimizer.zero_grad = lambda: None
    backward(model, step)


def the_same_gradient_again(model, optimizer, step):
    optimizer.zero_grad = lambda: None
    if step == 0:
        backward(model, step)


def by_hand(model, optimizer, step):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def in_place(model, optimizer, step):
    backward(model, step)
    for p in model.parameters():
        p.grad.add_(0.3)


def in_place_at_once(model, optimizer, step):
    backward(model, step)
    torch._foreach_add_([p.grad for p in model.parameters()], 0.3)


def replaced_twice(model, optimizer, step):
    backward(model, step)
    for p in model.parameters():
        p.grad = p.grad + 1
        p.grad = p.grad + 1


def in_a_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        backward(model, step)
        return 0.0

    if not hasattr(optimizer, "plain_step"):
        optimizer.plain_step = optimizer.step
    optimizer.step = lambda: optimizer.plain_step(closure)


WAYS = [
    several_backwards,
    kept_gradients,
    no_zeroing,
    the_same_gradient_again,
    by_hand,
    in_place,
    in_place_at_once,
    replaced_twice,
    in_a_closure,
]


@pytest.mark.parametrize(("name", "way"), each_once(FEW, WAYS), ids=lambda value: getattr(value, "__name__", value))
def test_however_the_gradient_came_about(name, way):
    model = net()
    pruner = pruner_for(name, model)
    for step in range(16):
        pruner.optimizer.zero_grad()
        way(model, pruner.optimizer, step)
        pruner.optimizer.step()
        assert_pruned_are_zero(pruner)
    assert num_pruned(pruner) == round(0.7 * 1054)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_what_is_not_finite_at_a_pruned_place_poisons_nothing(name, bad):
    model = net()
    pruner = pruner_for(name, model, schedule=Constant(0.5))
    train(model, pruner.optimizer, range(2))
    masks = dict(pruner.masks)
    for p, mask in zip((model.conv.weight, model.hidden.weight, model.out.weight), masks.values(), strict=True):
        p.register_hook(lambda grad, mask=mask: grad.masked_fill(~mask, bad))
    train(model, pruner.optimizer, range(2, 5))
    for name, mask in masks.items():
        dict(model.named_parameters())[name].grad[~mask] = bad
    pruner.optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("name", [name for name in FEW if name != "adamw prune"])
def test_clipping_before_the_step_sees_the_kept_gradients_only(name):
    model, twin = net(), net()
    pruner = pruner_for(name, model, schedule=Constant(0.6))
    train(model, pruner.optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    pruner.optimizer.zero_grad()
    for part in range(2):
        backward(model, part)
        backward(twin, part)
    for key, mask in pruner.masks.items():
        dict(twin.named_parameters())[key].grad[~mask] = 0
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()]).norm()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled first"])
def test_a_step_that_a_scaler_skips_is_not_counted_and_its_event_moves(name, unscale):
    model, events = net(), []
    pruner = pruner_for(name, model, schedule=OneShot(0.5, at=3), on_event=events.append)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    counted = []
    for call in range(8):
        pruner.optimizer.zero_grad()
        backward(model, call, scaler)
        if call in (2, 3, 6):
            model.hidden.weight.grad[pruner.masks["hidden.weight"].nonzero()[0].unbind()] = float("inf")
        if unscale:
            scaler.unscale_(pruner.optimizer)
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        scaler.step(pruner.optimizer)
        scaler.update()
        counted.append(pruner.step)
        if call in (2, 3, 6):
            assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
    assert counted == [1, 2, 2, 2, 3, 4, 4, 5]
    assert [event.step for event in events] == [3]
    assert num_pruned(pruner) == round(0.5 * 1054)
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("name", [name for name in FEW if name != "adamw prune"])  # which masks inside its step alone
def test_a_scaler_skips_no_step_for_a_pruned_weights_gradient(name):
    model = net()
    pruner = pruner_for(name, model, schedule=Constant(0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(model, pruner.optimizer, [0])
    mask = pruner.masks["hidden.weight"]
    model.hidden.weight.register_hook(lambda grad: grad.masked_fill(~mask, float("inf")))
    for step in range(1, 4):
        pruner.optimizer.zero_grad()
        backward(model, step, scaler)
        scaler.step(pruner.optimizer)
        scaler.update()
    assert pruner.step == 4 and scaler.get_scale() == 2.0**10
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_an_eps_of_zero_is_refused_or_divides_nothing_by_zero(make):
    model = net()
    try:
        pruner = Pruner(model, make(model, eps=0.0), schedule=Constant(0.5))
    except ValueError as error:
        assert "eps" in str(error)
    else:
        train(model, pruner.optimizer, range(3))
        assert_pruned_are_zero(pruner)
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", FEW)
def test_the_pruned_are_zero_the_kept_are_trained(name):
    model = net()
    pruner = pruner_for(name, model, schedule=Constant(0.5))
    train(model, pruner.optimizer, range(1))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    train(model, pruner.optimizer, range(1, 4))
    for key in NAMES:
        moved = dict(model.named_parameters())[key] != before[key]
        assert torch.equal(moved, pruner.masks[key])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda m: adamw(m, capturable=True),
        lambda m: adamw(m, capturable=True, foreach=True),
        lambda m: adamw(m, fused=True),
        lambda m: adamw(m, amsgrad=True, fused=True),
        adamw_prune,
        lambda m: adamw_prune(m, max_norm=0.1),
    ],
    ids=["capturable", "capturable foreach", "fused", "amsgrad fused", "adamw prune", "clipped"],
)
def test_on_a_gpu(make):
    model = net().cuda()
    optimizer = make(model)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.7, 0, 12), every=3)
    for step in range(20):
        optimizer.zero_grad()
        torch.manual_seed(step)
        (model(torch.randn(8, 1, 5, 5, device="cuda")) - 1).square().mean().backward()
        optimizer.step()
        assert_pruned_are_zero(pruner)
    assert num_pruned(pruner) == round(0.7 * 1054)
