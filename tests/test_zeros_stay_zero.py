"""What is pruned stays exactly zero, in the weight and in every state of it, whatever trains the model."""

from functools import partial

import pytest
import torch
from covering import each_once
from torch import nn
from toys import adamw, adamw_prune, assert_pruned_are_zero, backward, net, num_pruned, through_a_file, train

from prunus import Constant, OneShot, Pruner, Ramp, Spam


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


MIXING = {  # which mix the elements of a weight, or are nobody's that is known
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=6),
    "lbfgs wolfe": lambda params: torch.optim.LBFGS(params, max_iter=6, line_search_fn="strong_wolfe"),
    "somebody's": Mixed,
    "a subclass": DecayToOne,
} | ({"muon": torch.optim.Muon} if hasattr(torch.optim, "Muon") else {})
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
    "adafactor foreach": lambda m: torch.optim.Adafactor(m.parameters(), weight_decay=0.1, foreach=True),
    "adadelta foreach": lambda m: torch.optim.Adadelta(m.parameters(), weight_decay=0.1, foreach=True),
    "radam decoupled": lambda m: torch.optim.RAdam(m.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop foreach": lambda m: torch.optim.RMSprop(m.parameters(), weight_decay=0.1, centered=True, foreach=True),
    "adamw prune": adamw_prune,
    "adamw prune clipped": lambda m: adamw_prune(m, max_norm=0.1),
    "adamw prune spam": lambda m: adamw_prune(m, spam=Spam(theta=5.0, every=8, warmup=3, hold=2)),
}
FEW = ["adamw", "adamw foreach", "adamw fused", "sgd nesterov", "adamw prune"]


def score_for(name):
    return "bitter7" if name.startswith(("adam", "ams", "nadam", "radam")) else "magnitude"


def pruner_for(name, model, **options):
    optimizer = OPTIMIZERS[name](model)
    return Pruner(model, optimizer, **{"score": score_for(name), "schedule": Ramp(0.7, 0, 12), "every": 3} | options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_every_optimizer(name):
    model = net()
    pruner = pruner_for(name, model)
    assert len(pruner.optimizer._optimizer_step_post_hooks) == 1  # for events: nothing is zeroed again
    for step in range(20):
        train(model, pruner.optimizer, [step])
        assert_pruned_are_zero(pruner)
    assert num_pruned(pruner) == round(0.7 * 1054)


# their states need not be zero where weights are pruned
STATEFUL = {
    f"{name}{' foreach' * foreach}": lambda params, kind=kind, foreach=foreach: kind(params, foreach=foreach)
    for name, kind in {
        "adamax": partial(torch.optim.Adamax, weight_decay=0.1),
        "asgd": partial(torch.optim.ASGD, weight_decay=0.1, t0=3),
        "rprop": torch.optim.Rprop,
    }.items()
    for foreach in (False, True)
}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 13, bias=False), nn.Tanh(), nn.Linear(13, 8, bias=False))


def step_by_closure(model, optimizer, seed):
    """As LBFGS needs it."""
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


def pruner_of_mlp(model, optimizer, **options):
    return Pruner(model, optimizer, **{"score": "magnitude", "schedule": Ramp(0.7, 0, 12), "every": 3} | options)


def assert_zeros_are_the_masks(pruner):
    for name, mask in pruner.masks.items():
        weight = pruner.model.get_parameter(name)
        assert torch.equal(weight == 0, ~mask) and weight.isfinite().all()


@pytest.mark.parametrize("name", [*MIXING, *STATEFUL])
def test_weights_stay_zero_behind_what_mixes_them_until_the_pruner_is_removed(name):
    model = mlp()
    pruner = pruner_of_mlp(model, (MIXING | STATEFUL)[name](model.parameters()))
    assert (len(pruner.optimizer._optimizer_step_post_hooks) > 1) == (name in MIXING)  # the first is for events
    for seed in range(20):
        step_by_closure(model, pruner.optimizer, seed)
        assert_zeros_are_the_masks(pruner)
    masks = dict(pruner.masks)
    assert num_pruned(pruner) == round(0.7 * 312)
    pruner.remove()
    held = pruner_of_mlp(model, pruner.optimizer, masks=masks, schedule=None)
    step_by_closure(model, pruner.optimizer, 20)
    assert_zeros_are_the_masks(held)
    held.remove()
    for seed in range(4):
        step_by_closure(model, pruner.optimizer, seed)
    assert name in STATEFUL or held.sparsity == 0


@pytest.mark.parametrize("name", MIXING)
def test_a_resumed_run_of_what_mixes_weights_ends_as_the_unbroken_one(name):
    def run(seed):
        model = mlp(seed)
        optimizer = MIXING[name](model.parameters())
        return model, optimizer, pruner_of_mlp(model, optimizer)

    def go(parts, seeds):
        for seed in seeds:
            step_by_closure(*parts[:2], seed)
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
    pruner = pruner_of_mlp(model, torch.optim.LBFGS(model.parameters(), lr=0.1), schedule=Ramp(0.7, 1, 8))
    losses = [step_by_closure(model, pruner.optimizer, 0).item() for _ in range(16)]
    assert losses[8] < 0.2 and losses[-1] < 0.002


def test_a_rate_schedule_and_a_wrapper_change_nothing():
    model = mlp()
    inner = Mixed(model.parameters())

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    rates = torch.optim.lr_scheduler.StepLR(inner, 3)
    pruner = pruner_of_mlp(model, Wrapper(inner))
    for seed in range(16):
        step_by_closure(model, inner, seed)
        rates.step()
        assert_zeros_are_the_masks(pruner)
    assert num_pruned(pruner) == round(0.7 * 312)


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
