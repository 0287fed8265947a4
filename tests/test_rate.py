"""Factors on learning rates: steps scale by them, weight decay does not, and nobody else sees them."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from prunus import AdamWPrune, Constant, Pruner, Ramp, Spam
from prunus.rate import GroupLrFactors, Rate, parameter_groups

MAKE = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "nadam decoupled": lambda groups: torch.optim.NAdam(groups, lr=1e-2, decoupled_weight_decay=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}
COUPLED = ("adam", "sgd", "rmsprop", "adagrad")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def train(net, optimizer, steps=3):
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def scaled(optimizer, weights, *factors):
    """Factors on the learning rates of some weights, attached to the optimizer."""
    lr_factors = GroupLrFactors(optimizer, {str(i): weight for i, weight in enumerate(weights)})
    lr_factors.set({str(i): factor for i, factor in enumerate(factors)})
    lr_factors.attach()
    return lr_factors


@pytest.mark.parametrize("power", [0, 0.5, 0.75, 1, 2])
@pytest.mark.parametrize("density", [0.0, 1e-9, 0.02, 0.1, 0.5, 1.0])
def test_the_factor_is_a_power_of_the_density_down_to_the_floor(power, density):
    assert Rate(power)(density) == pytest.approx((1 / max(density, 0.02)) ** power)
    assert Rate(0)(density) == 1.0 and Rate(power)(1.0) == 1.0


@pytest.mark.parametrize(
    "options", [{"power": -0.1}, {"power": 2.1}, {"power": math.nan}, {"power": "1"}, {"floor": 0}, {"floor": 1.5}]
)
def test_a_rate_that_cannot_be_meant_is_one_line(options):
    with pytest.raises(ValueError, match=next(iter(options))) as error:
        Rate(**options)
    assert "\n" not in str(error.value)


def test_groups_hold_every_parameter_once_and_prunable_weights_alone():
    net = model()
    groups = parameter_groups(net, weight_decay=0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, net.parameters())) and len(set(held)) == len(held)
    alone = [group["params"][0] for group in groups[:2]]
    assert alone[0] is net[0].weight and alone[1] is net[2].weight
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("decay", "factors"), [(0.0, (4.0, 0.5)), (0.3, (4.0, 0.5)), (0.1, (1.0, 1.0))], ids=str)
def test_a_step_is_that_of_scaled_rates_with_decay_as_it_was(name, decay, factors):
    net, reference = model(), model()
    optimizer = MAKE[name](parameter_groups(net, weight_decay=decay))
    scaled(optimizer, [net[0].weight, net[2].weight], *factors)
    groups = parameter_groups(reference, weight_decay=decay)
    for group, factor in zip(groups, factors, strict=False):
        group["lr"] = torch.tensor(1e-2) * factor if "tensor" in name else 1e-2 * factor
        if name not in COUPLED and decay:
            group["weight_decay"] = decay / factor
    expected = train(reference, MAKE[name](groups))
    assert all(map(torch.equal, train(net, optimizer), expected))
    assert [float(group["lr"]) for group in optimizer.param_groups] == [pytest.approx(1e-2)] * 3
    assert [group.get("weight_decay", 0) for group in optimizer.param_groups] == [decay, decay, 0.0]


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("groups", [parameter_groups, lambda net: list(net.parameters())], ids=["split", "one"])
@pytest.mark.parametrize("where", ["closure", "step", "hook"])
def test_a_step_that_failed_leaves_the_groups_as_they_were_made_for_all_that_follows(groups, where):
    net = model()
    optimizer = Failing(groups(net), lr=1e-2, weight_decay=0.1)
    made = optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def fails(*_):
        raise RuntimeError("no loss today")

    hook = optimizer.register_step_post_hook(fails) if where == "hook" else None
    lr_factors = scaled(optimizer, [net[0].weight, net[2].weight], 3.0, 2.0)
    optimizer.fails = where == "step"
    with pytest.raises(RuntimeError):
        optimizer.step(fails) if where == "closure" else train(net, optimizer, 1)
    optimizer.fails = False
    if hook:
        hook.remove()
    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.param_groups[0]["weight_decay"] = 0.3
    lr = optimizer.param_groups[0]["lr"]
    train(net, optimizer, 1)
    lr_factors.detach()
    assert optimizer.param_groups is made and lr == 0.005 and made[0]["weight_decay"] == 0.3
    assert [group["lr"] for group in made] == [0.005] * (len(made) - 1) + [1e-2]
    assert sum(len(group["params"]) for group in made) == 1 + len(list(net.parameters()))


@pytest.mark.parametrize("is_first", [True, False])
def test_rates_that_are_set_while_it_steps_stay(is_first):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if not is_first:
        scaled(optimizer, [net[0].weight], 3.0)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    if is_first:
        scaled(optimizer, [net[0].weight], 3.0)
    train(net, optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.000625)] == scheduler.get_last_lr()


def test_adamwprune_scales_its_step_and_not_its_decay_and_without_factors_keeps_every_bit():
    for factor, is_same in ((4.0, partial(torch.allclose, rtol=1e-6, atol=1e-7)), (1.0, torch.equal)):
        net, reference = model(), model()
        optimizer = AdamWPrune(parameter_groups(net, weight_decay=0.3), lr=1e-2)
        optimizer.lr_factors = {net[0].weight: torch.tensor(factor, dtype=torch.float64)}
        other = torch.optim.AdamW(parameter_groups(reference, weight_decay=0.3), lr=1e-2, foreach=False)
        if factor != 1:
            scaled(other, [reference[0].weight], factor)
        assert all(map(is_same, train(net, optimizer), train(reference, other)))


@pytest.mark.parametrize("name", ["LBFGS", "Rprop", "Adafactor", "ASGD"])
def test_optimizers_that_cannot_follow_are_refused(name):
    net = model()
    with pytest.raises(ValueError, match=f"{name} .* AdamWPrune"):
        GroupLrFactors(getattr(torch.optim, name)(net.parameters()), {"0": net[0].weight})
    with pytest.raises(ValueError, match=r"0.weight shares one with 5 more; [^\n]*parameter_groups\(model[^\n]*$"):
        GroupLrFactors(Counting(net.parameters()), {"0.weight": net[0].weight})
    with pytest.raises(ValueError, match="weight_decay=0"):
        GroupLrFactors(Counting([{"params": [p], "weight_decay": 0.1} for p in net.parameters()]), {"0": net[0].weight})


@pytest.mark.parametrize("name", MAKE)
def test_weights_that_share_a_group_step_as_those_that_stand_alone(name):
    """The groups that people and trainers make: one of all, or one with decay and one without."""
    net, split = model(), model()

    def two(of):
        matrices, rest = ([p for p in of.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        return [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]

    optimizers = [MAKE[name](two(net)), MAKE[name](parameter_groups(split, weight_decay=0.3))]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for it, optimizer in zip((net, split), optimizers, strict=True):
        Pruner(it, optimizer, score="magnitude", schedule=Ramp(0.75, 1, 5), every=2, rate=Rate())
    shapes = [len(group["params"]) for group in optimizers[0].param_groups]
    for _ in range(7):
        ours, alone = train(net, optimizers[0], 1), train(split, optimizers[1], 1)
        assert all(map(torch.equal, ours, alone))
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()[:2]
        groups = optimizers[0].state_dict()["param_groups"]
        assert [len(group["params"]) for group in groups] == shapes
        assert [group.get("weight_decay", 0) for group in groups] == [0.3, 0.0]
    one = torch.optim.AdamW((other := model()).parameters())  # as a README begins
    pruner = Pruner(other, one, score="magnitude", schedule=Constant(0.5), rate=Rate())
    train(other, one)
    assert pruner.sparsity == pytest.approx(0.5, abs=0.02)
    assert max(layer.lr_factor for layer in pruner.report().layers) > 1.5


def test_a_closure_sees_the_groups_as_they_were_made():
    net, plain = model(), model()
    seen = []
    optimizers = [torch.optim.AdamW(it.parameters(), lr=1e-2) for it in (net, plain)]
    for it, optimizer in zip((net, plain), optimizers, strict=True):
        Pruner(it, optimizer, score="magnitude", schedule=Constant(0.75), rate=Rate())

    def closure():
        seen.append([(len(group["params"]), group["lr"]) for group in optimizers[0].param_groups])
        optimizers[0].zero_grad()
        loss = net(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizers[0].step(closure)
    assert seen == [[(6, 1e-2)]] * 3
    assert all(map(torch.equal, net.parameters(), train(plain, optimizers[1])))


class Counting(torch.optim.Optimizer):
    """Not torch's, and counts its steps in its groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": 0})

    def step(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] *= 0.5
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("apart", [False, True])
def test_what_an_optimizer_writes_into_itself_and_its_groups_stays_there(apart):
    net = model()
    optimizer = Counting([{"params": group["params"]} for group in parameter_groups(net)])
    both = [net[0].weight, net[2].weight]
    for weights in [both[:1], both[1:]] if apart else [both]:  # of one Pruner, or of two
        scaled(optimizer, weights, *[3.0] * len(weights))
    train(net, optimizer, 4)
    assert optimizer.num_steps == 4
    assert [(group["count"], group["lr"]) for group in optimizer.param_groups] == [(4, pytest.approx(0.1 / 16))] * 3


@pytest.mark.slow
def test_a_compiled_step_takes_the_factors():
    nets = [model() for _ in range(2)]
    for net, is_compiled in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scaled(optimizer, [net[0].weight], 3.0)
        if is_compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(net, optimizer)
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


def test_the_step_of_a_parent_class_scales_no_rate_again():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on steps of the parent class call hooks too
    nets = [model() for _ in range(2)]
    for net, make in zip(nets, (Failing, torch.optim.SGD), strict=True):
        optimizer = make(net.parameters(), lr=1e-2, momentum=0.9)
        scaled(optimizer, [net[0].weight], 3.0)
        train(net, optimizer)
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


def pruned(optimizer_of, rate, steps=9, seed=0):
    """Weights, masks and factors of a training to 75 % by a Pruner with ``rate``."""
    net = model()
    optimizer = optimizer_of(net)
    pruner = Pruner(net, optimizer, score="magnitude", schedule=Ramp(0.75, 2, 7), every=1, rate=rate)
    weights = train(net, optimizer, steps)
    return weights, pruner, optimizer


OPTIMIZERS = {
    "adamwprune": lambda net: AdamWPrune(net.parameters(), lr=1e-2),
    "adamwprune clipped": lambda net: AdamWPrune(net.parameters(), lr=1e-2, max_norm=0.1),
    "adamwprune spam": lambda net: AdamWPrune(
        net.parameters(), lr=1e-2, spam=Spam(theta=5.0, every=4, warmup=2, hold=1)
    ),
    **{name: lambda net, make=make: make(parameter_groups(net, weight_decay=0.1)) for name, make in MAKE.items()},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_zero_and_factors_follow_the_masks(name):
    weights, pruner, _ = pruned(OPTIMIZERS[name], Rate(power=1))
    for layer in pruner.report().layers:
        mask = pruner.masks[layer.name]
        density = mask.float().mean().item()
        assert layer.lr_factor == pytest.approx(1 / max(density, 0.02))
        assert not dict(pruner.model.named_parameters())[layer.name][~mask].any()
    assert pruner.sparsity == pytest.approx(0.75, abs=0.02) and "lr x" in str(pruner.report())
    assert not all(map(torch.equal, weights, pruned(OPTIMIZERS[name], None)[0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_power_zero_changes_no_bit(name):
    assert all(map(torch.equal, pruned(OPTIMIZERS[name], Rate(power=0))[0], pruned(OPTIMIZERS[name], None)[0]))


@pytest.mark.parametrize("name", ["adamwprune", "adamw", "adam", "sgd"])
def test_a_scaler_that_skips_a_step_leaves_rates_and_weights_alone(name):
    net = model()
    optimizer = OPTIMIZERS[name](net)
    pruner = Pruner(net, optimizer, score="magnitude", schedule=Constant(0.75), rate=Rate(1))
    train(net, optimizer, 1)
    plain = copy.deepcopy((net, optimizer.state_dict(), [group["lr"] for group in optimizer.param_groups]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        scaler.scale(net(inputs).square().mean()).backward()
        if bad:
            net[0].bias.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert [group["lr"] for group in optimizer.param_groups] == plain[2]
        if bad:
            assert all(map(torch.equal, net.parameters(), plain[0].parameters()))
    other = plain[0]
    unscaled = OPTIMIZERS[name](other)
    Pruner(other, unscaled, score="magnitude", masks=dict(pruner.masks), rate=Rate(1))
    unscaled.load_state_dict(plain[1])
    for ours, theirs in zip(train(other, unscaled, 1), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
