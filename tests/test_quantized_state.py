"""Optimizer state that is not plain numbers is refused: zeroing its codes would change what they stand for."""

import pytest
import torch
from toys import NAMES, assert_pruned_are_zero, backward, net, num_pruned, train

from prunus import Constant, Pruner, Ramp

ZERO = 128  # the code that stands for 0


class Quantized(torch.Tensor):
    """Codes and a scale that look like a float tensor, in the manner of torchao's optimizer states."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def dequantized(self):
        return (self.codes.float() - ZERO) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = [a.dequantized() if isinstance(a, Quantized) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Coded(torch.optim.Optimizer):
    """Momentum in 8 bits; subclasses say how codes and scale are kept."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                momentum = (self.read(state) if state else torch.zeros_like(p)) * 0.9 + p.grad
                scale = momentum.abs().max().clamp(min=1e-12) / 127
                self.write(state, (momentum / scale).round().add(ZERO).to(torch.uint8), scale)
                p.sub_(momentum, alpha=group["lr"])


class Codes(Coded):
    def read(self, state):
        return (state["state1"].float() - ZERO) * state["absmax1"]

    def write(self, state, codes, scale):
        state["state1"], state["absmax1"] = codes, scale


class Subclass(Coded):
    def read(self, state):
        return state["exp_avg"].dequantized()

    def write(self, state, codes, scale):
        state["exp_avg"] = Quantized(codes, scale)


class Signs(Coded):
    def read(self, state):
        return torch.where(state["is_up"], state["size"], -state["size"])

    def write(self, state, codes, scale):
        state["is_up"], state["size"] = codes > ZERO, scale


EXPECTED = {Codes: ("state1", "uint8"), Subclass: ("exp_avg", "Quantized"), Signs: ("is_up", "bool")}


def refused(make, name=NAMES[0]):
    key, kind = EXPECTED[make]
    parts = (f"^{make.__name__}", key, name, kind, "AdamWPrune", "$")
    return pytest.raises(ValueError, match=r"[^\n]*".join(parts))


def snapshot(model, optimizer):
    """Weights and dequantised momentum."""
    weights = [p.detach().clone() for p in model.parameters()]
    return weights + [optimizer.read(optimizer.state[p]).clone() for p in model.parameters() if p in optimizer.state]


def assert_equal(before, after):
    assert len(before) == len(after) and all(map(torch.equal, before, after))


@pytest.mark.parametrize("make", EXPECTED)
def test_state_that_is_there_is_refused_before_anything_changes(make):
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    masks = {name: torch.rand(model.get_parameter(name).shape) > 0.5 for name in NAMES}
    for options in ({"masks": masks}, {"masks": "zeros"}, {"schedule": Constant(0.5), "score": "magnitude"}):
        with refused(make):
            Pruner(model, optimizer, **options)
        assert_equal(snapshot(model, optimizer), before)
        assert all("mask" not in state for state in optimizer.state.values())
    train(model, optimizer, [2])  # no hook is left


@pytest.mark.parametrize("make", EXPECTED)
def test_state_is_refused_when_the_first_step_has_made_it(make):
    model, twin = net(), net()
    optimizer = make(model.parameters())
    pruner = Pruner(model, optimizer, schedule=Ramp(0.5, 5, 9), score="magnitude")
    with refused(make):
        train(model, optimizer, [0])
    plain = make(twin.parameters())
    train(twin, plain, [0])
    assert_equal(snapshot(model, optimizer), snapshot(twin, plain))
    assert num_pruned(pruner) == 0


@pytest.mark.parametrize("make", EXPECTED)
def test_state_that_comes_later_is_refused_by_the_event_which_changes_nothing(make):
    model = net()
    optimizer, options = make(model.parameters()), {"exclude": ["conv", "hidden"], "score": "magnitude", "every": 1}
    pruner = Pruner(model, optimizer, schedule=Ramp(0.5, 0, 3), **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        if step < 2:
            model.out.weight.grad = None
            optimizer.step()
    mask = pruner.masks["out.weight"].clone()
    assert 0 < num_pruned(pruner) < round(0.5 * mask.numel())
    with refused(make, "out.weight"):
        optimizer.step()
    assert torch.equal(pruner.masks["out.weight"], mask) and torch.equal(model.out.weight != 0, mask)
    assert pruner.state_dict()["due"]


class Plain(Coded):
    """The same optimizer with its momentum in float32."""

    def read(self, state):
        return state["momentum"]

    def write(self, state, codes, scale):
        state["momentum"] = (codes.float() - ZERO) * scale


def test_the_same_optimizer_is_taken_with_plain_numbers():
    model = net()
    pruner = Pruner(model, Plain(model.parameters()), schedule=Ramp(0.5, 0, 4), score="magnitude", every=2)
    train(model, pruner.optimizer, range(6))
    assert num_pruned(pruner) == round(0.5 * 1054)
    for name, mask in pruner.masks.items():
        assert torch.equal(model.get_parameter(name) == 0, ~mask)
    assert_pruned_are_zero(pruner)
