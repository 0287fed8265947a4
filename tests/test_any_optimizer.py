"""Zeros stay zero behind optimizers that mix the elements of a weight, and behind those that nobody knows."""

import pytest
import torch
from torch import nn
from toys import through_a_file

from prunus import AdamWPrune, Constant, Pruner, Ramp

NUM_WEIGHTS = 16 * 13 + 13 * 8


class Mixed(torch.optim.Optimizer):
    """A made-up optimizer of somebody else's: the sign of a product of the whole weight steers every element."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p @ p.T @ p + p.grad).sign() + 0.1, alpha=group["lr"])


class DecayToOne(torch.optim.AdamW):
    """A subclass of an optimizer that holds zeros, which itself does not."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(torch.ones_like(p), 0.01)


MIXING = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=6),
    "lbfgs wolfe": lambda params: torch.optim.LBFGS(params, max_iter=6, line_search_fn="strong_wolfe"),
    "somebody's": Mixed,
    "a subclass": DecayToOne,
} | ({"muon": torch.optim.Muon} if hasattr(torch.optim, "Muon") else {})

OWN = {
    "adamax": lambda params: torch.optim.Adamax(params, weight_decay=0.1),
    "adamax foreach": lambda params: torch.optim.Adamax(params, weight_decay=0.1, foreach=True),
    "asgd": lambda params: torch.optim.ASGD(params, weight_decay=0.1, t0=3),
    "asgd foreach": lambda params: torch.optim.ASGD(params, weight_decay=0.1, t0=3, foreach=True),
    "rprop": torch.optim.Rprop,
    "rprop foreach": lambda params: torch.optim.Rprop(params, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, weight_decay=0.1),
    "adafactor foreach": lambda params: torch.optim.Adafactor(params, weight_decay=0.1, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, weight_decay=0.1, lr_decay=0.1),
    "adadelta foreach": lambda params: torch.optim.Adadelta(params, weight_decay=0.1, foreach=True),
    "radam decoupled": lambda params: torch.optim.RAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adamw prune": AdamWPrune,
    "rmsprop foreach": lambda params: torch.optim.RMSprop(params, weight_decay=0.1, centered=True, foreach=True),
}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 13, bias=False), nn.Tanh(), nn.Linear(13, 8, bias=False))


def step(model, optimizer, seed):
    """One step by a closure, as LBFGS needs it."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, Mixed):
        closure()
        return optimizer.step()
    return optimizer.step(closure)


def pruner_of(model, optimizer, **options):
    return Pruner(model, optimizer, **{"score": "magnitude", "schedule": Ramp(0.7, 0, 12), "every": 3} | options)


def assert_zeros_are_the_masks(pruner):
    for name, mask in pruner.masks.items():
        assert torch.equal(pruner.model.get_parameter(name) == 0, ~mask)


@pytest.mark.parametrize("name", [*MIXING, *OWN])
def test_zeros_are_where_the_masks_say_after_every_step(name):
    model = mlp()
    pruner = pruner_of(model, (MIXING | OWN)[name](model.parameters()))
    zeroes_again = len(pruner.optimizer._optimizer_step_post_hooks) > 1  # the first is for events
    assert zeroes_again == (name in MIXING)
    for seed in range(20):
        step(model, pruner.optimizer, seed)
        assert_zeros_are_the_masks(pruner)
        assert all(torch.isfinite(p).all() for p in model.parameters())
    assert pruner.sparsity == round(0.7 * NUM_WEIGHTS) / NUM_WEIGHTS


@pytest.mark.parametrize("name", MIXING)
def test_masks_given_at_the_start_are_held(name):
    model = mlp()
    masks = {key: torch.rand(p.shape) > 0.5 for key, p in model.named_parameters()}
    pruner = pruner_of(model, MIXING[name](model.parameters()), masks=masks, schedule=None)
    for seed in range(4):
        step(model, pruner.optimizer, seed)
        assert_zeros_are_the_masks(pruner)
    assert all(torch.equal(pruner.masks[key], masks[key]) for key in masks)


@pytest.mark.parametrize("name", MIXING)
def test_a_removed_pruner_zeroes_nothing_more(name):
    model = mlp()
    pruner = pruner_of(model, MIXING[name](model.parameters()), schedule=Constant(0.5))
    step(model, pruner.optimizer, 0)
    pruner.remove()
    for seed in range(1, 4):
        step(model, pruner.optimizer, seed)
    assert pruner.sparsity == 0


@pytest.mark.parametrize("name", MIXING)
def test_a_run_resumed_ends_as_the_unbroken_one(name):
    def run(seed):
        model = mlp(seed)
        optimizer = MIXING[name](model.parameters())
        return model, optimizer, pruner_of(model, optimizer)

    def go(parts, seeds):
        for seed in seeds:
            step(*parts[:2], seed)
        return parts

    whole, first, second = go(run(0), range(16)), go(run(0), range(8)), run(9)
    for part, saved in zip(second, through_a_file([part.state_dict() for part in first]), strict=True):
        part.load_state_dict(saved)
    go(second, range(8, 16))
    assert second[2].digest() == whole[2].digest()
    assert all(torch.equal(p, q) for p, q in zip(second[0].parameters(), whole[0].parameters(), strict=True))


@pytest.mark.slow
def test_lbfgs_learns_on_after_an_event():
    """With the curvature of weights that are gone it is at 0.35, then at 0.009."""
    model = mlp()
    pruner = pruner_of(model, torch.optim.LBFGS(model.parameters(), lr=0.1), schedule=Ramp(0.7, 1, 8))
    losses = [step(model, pruner.optimizer, 0).item() for _ in range(16)]
    assert losses[8] < 0.2 and losses[-1] < 0.002


def test_a_rate_schedule_and_a_wrapper_change_nothing():
    model = mlp()
    inner = Mixed(model.parameters())

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    rates = torch.optim.lr_scheduler.StepLR(inner, 3)
    pruner = pruner_of(model, Wrapper(inner))
    for seed in range(16):
        step(model, inner, seed)
        rates.step()
        assert_zeros_are_the_masks(pruner)
    assert pruner.sparsity == round(0.7 * NUM_WEIGHTS) / NUM_WEIGHTS
