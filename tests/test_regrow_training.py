"""While weights may come back the optimizer sees them all; after the ramp everything is as without regrowth."""

import pytest
import torch
from torch import nn
from toys import (
    NAMES,
    NUM_WEIGHTS,
    RAMP,
    adamw,
    adamw_prune,
    assert_pruned_are_zero,
    backward,
    net,
    num_pruned,
    regrowing,
    sgd,
    states_of,
    through_a_file,
    train,
)

from prunus import Pruner, Ramp, Regrow, Spam


@pytest.mark.parametrize("make", [adamw, lambda m: adamw(m, fused=True), lambda m: adamw(m, amsgrad=True), sgd])
def test_the_ramp_is_a_plain_training_whose_weights_are_zeroed_after_each_step(make):
    """Moments, weights and the norm that clips are those of an optimizer that nobody masked."""
    model, twin, masks, norms = net(), net(), [], []
    pruner = regrowing(model, make(model), score="magnitude", regrow=Regrow(0.3, "momentum"))
    for step in range(17):
        norms.append(clipped_step(model, pruner.optimizer, step))
        masks.append(dict(pruner.masks))
    plain = make(twin)
    for step in range(17):
        assert clipped_step(twin, plain, step) == norms[step]
        for name in NAMES:  # what comes back is zero until its next step
            twin.get_parameter(name).data[~(masks[step][name] & masks[max(0, step - 1)][name])] = 0
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in states_of(plain, q).items():
            assert torch.equal(value, pruner.optimizer.state[p][key])


def clipped_step(model, optimizer, step):
    optimizer.zero_grad()
    backward(model, step)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return norm.item()


def test_clipping_inside_the_step_sees_what_clipping_before_it_sees():
    model, twin = net(), net()
    inside = regrowing(model, adamw_prune(model, max_norm=0.05))
    outside = regrowing(twin, adamw(twin, foreach=False))
    for step in range(22):
        train(model, inside.optimizer, [step])
        norm = clipped_step(twin, outside.optimizer, step)
        assert inside.optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    assert inside.digest() == outside.digest()


@pytest.mark.parametrize("make", [adamw, adamw_prune, sgd])
def test_masks_are_exact_and_moments_warm_until_the_ramp_ends_and_then_all_are_zero(make):
    """What has just come back is zero until it is stepped."""
    model, events = net(), []
    options = {"score": "magnitude", "regrow": Regrow(0.3, "momentum"), "on_event": events.append}
    pruner = regrowing(model, make(model), **options)
    for step in range(24):
        train(model, pruner.optimizer, [step])
        asked = round(events[-1].sparsity * NUM_WEIGHTS) if events else 0
        just_back = events[-1].regrown if events and events[-1].step == pruner.step else 0
        assert num_pruned(pruner) == asked and pruner.report().num_zeros == asked + just_back
        for name, mask in pruner.masks.items():
            parameter = model.get_parameter(name)
            assert not parameter[~mask].any()
            if 6 <= pruner.step < 18:
                assert all(value[~mask].any() for value in states_of(pruner.optimizer, parameter).values())
    assert sum(event.regrown > 0 for event in events) > 1 and events[-1].regrown == 0
    assert_pruned_are_zero(pruner)


def test_a_weight_that_came_back_stays_zero_without_a_gradient():
    """Momentum and decay aside, a step moves a weight by its gradient alone."""
    model, events = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"score": "magnitude", "regrow": Regrow(0.3, "gradient"), "on_event": events.append}
    pruner = regrowing(model, optimizer, **options)
    train(model, optimizer, range(10))
    zeros = num_pruned(pruner) + events[-1].regrown
    assert events[-1].regrown and pruner.report().num_zeros == zeros
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    assert pruner.report().num_zeros == zeros


def test_after_the_ramp_it_trains_as_without_regrowth():
    model, twin = net(), net()
    pruner = regrowing(model, adamw(model))
    train(model, pruner.optimizer, range(18))
    twin.load_state_dict(model.state_dict())
    optimizer = adamw(twin)
    optimizer.load_state_dict(through_a_file(pruner.optimizer.state_dict()))
    held = Pruner(twin, optimizer, masks=dict(pruner.masks))
    for step in range(18, 24):
        assert clipped_step(model, pruner.optimizer, step) == clipped_step(twin, optimizer, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert held.digest() == pruner.digest()


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_a_weight_that_comes_back_takes_an_ordinary_first_step(make):
    """A cold one would jump by (1 - beta1) / sqrt(1 - beta2) = 3.2 learning rates, whatever its gradient is."""
    model, rate = net(), 1e-3
    optimizer = make(model, lr=rate)
    pruner = regrowing(model, optimizer, schedule=Ramp(0.7, 60, 160, "linear"), every=20)
    train(model, optimizer, range(99))
    before = dict(pruner.masks)
    train(model, optimizer, [99])
    back = {name: pruner.masks[name] & ~before[name] for name in NAMES}
    train(model, optimizer, [100])
    jumps = []
    for name, mask in back.items():
        parameter = model.get_parameter(name)
        state, t = optimizer.state[parameter], 101
        wanted = state["exp_avg"] / (1 - 0.9**t) / ((state["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + 1e-8)
        assert torch.allclose(parameter[mask], -rate * wanted[mask], rtol=1e-4, atol=1e-9)
        jumps.append(parameter[mask].abs() / rate)
    jumps = torch.cat(jumps)
    assert len(jumps) > 20 and jumps.max() < 1.5


@pytest.mark.parametrize(("by", "steps"), [("snr", [5, 13, 15, 23]), ("gradient", [5, 10, 15, 20])])
def test_events_wait_for_the_moments_that_regrowth_reads(by, steps):
    model, found = net(), []
    optimizer = adamw_prune(model, spam=Spam(every=10, warmup=4, hold=3))
    options = {"schedule": Ramp(0.5, 0, 20), "every": 5, "regrow": Regrow(0.3, by), "score": "magnitude"}
    pruner = regrowing(model, optimizer, **options, on_event=found.append)
    train(model, optimizer, range(22))
    warm = [optimizer.state[model.get_parameter(n)]["exp_avg"][~pruner.masks[n]].any() for n in NAMES]
    assert all(warm) if by == "snr" else not any(warm)
    train(model, optimizer, range(22, 30))
    assert [event.step for event in found] == steps
    assert num_pruned(pruner) == round(0.5 * NUM_WEIGHTS)
    assert_pruned_are_zero(pruner)


def test_bfloat16_keeps_its_counts():
    model = net(dtype=torch.bfloat16)
    counts = []
    pruner = regrowing(model, adamw(model), on_event=lambda e: counts.append(num_pruned(pruner)))
    train(model, pruner.optimizer, range(20))
    assert counts == [round(RAMP(step) * NUM_WEIGHTS) for step in (6, 10, 14, 18)]
