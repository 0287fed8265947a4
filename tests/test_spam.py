"""SPAM clips spikes by the moment from before, resets on one counter, warms up, and makes events wait."""

import math

import pytest
import torch
from torch import nn
from toys import adamw_prune, assert_pruned_are_zero, backward, net, num_pruned, train

from prunus import AdamWPrune, OneShot, Pruner, Ramp, Spam
from prunus.optim import spike_clipped


@pytest.mark.parametrize("theta", [1.0, 2.5, 5000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_spike_is_cut_to_its_limit_and_keeps_its_sign(theta, dtype):
    v = torch.rand(1000, dtype=dtype)
    g = torch.randn(1000, dtype=dtype) * (2 * theta) ** 0.5
    v[:100], g[50:150] = 0, 0
    before, limited = (g.clone(), v.clone()), spike_clipped(g, v, theta)
    spike = (v > 0) & (g**2 > theta * v)
    assert spike.any() and torch.equal(limited[~spike], g[~spike])  # also where no moment is known
    assert torch.allclose(limited[spike], g.sign()[spike] * (theta * v[spike]).sqrt())
    assert torch.equal(g, before[0]) and torch.equal(v, before[1])


def by_definition(gradients, spam, lr, betas=(0.9, 0.999), eps=1e-8):
    """Weight after all steps, in float64 and without decay, and the learning rates used."""
    w, m, v, t, rates = 1.0, 0.0, 0.0, 0, []
    for i, g in enumerate(gradients):
        since = i % spam.every + 1
        warm = i >= spam.every and since <= spam.warmup
        rates.append(lr * (0.5 * (1 - math.cos(math.pi * since / spam.warmup)) if warm else 1.0))
        if v > 0 and g * g > spam.theta * v:
            g = math.copysign(math.sqrt(spam.theta * v), g)
        t += 1
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w -= rates[-1] * m / (1 - betas[0] ** t) / (math.sqrt(v / (1 - betas[1] ** t)) + eps)
        if (i + 1) % spam.every == 0:
            m, v, t = 0.0, 0.0, 0
    return w, rates


@pytest.mark.rounding
def test_a_run_with_spikes_resets_and_warm_ups_is_the_definition_and_logs_the_rate_it_uses():
    spam = Spam(theta=50.0, every=10, warmup=4, hold=3)
    gradients = (torch.randn(35, dtype=torch.float64) * 10.0 ** torch.randint(-2, 3, (35,))).tolist()
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = AdamWPrune([weight], lr=0.05, weight_decay=0.0, spam=spam)
    used = []
    for g in gradients:
        weight.grad = torch.full_like(weight, g)
        used.append(optimizer.param_groups[0]["lr"] * optimizer.lr_scale)
        optimizer.step()
    expected, rates = by_definition(gradients, spam, 0.05)
    assert used == pytest.approx(rates, rel=1e-12)
    assert weight.item() == pytest.approx(expected, rel=1e-9)


def test_the_clip_uses_the_moment_from_before_the_step():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = AdamWPrune([weight], spam=Spam(theta=4.0))
    weight.grad = torch.tensor([1e3, 1.0])
    optimizer.step()  # no moment yet: nothing is clipped
    v = optimizer.state[weight]["exp_avg_sq"].clone()
    assert v[0].item() == pytest.approx(1e3)
    weight.grad = torch.tensor([1e3, 1e3])
    optimizer.step()
    clipped = (4 * v).sqrt()
    clipped[0] = min(clipped[0].item(), 1e3)
    expected = v * 0.999 + clipped.square() * 0.001
    assert torch.allclose(optimizer.state[weight]["exp_avg_sq"], expected, rtol=1e-5)


def test_one_counter_serves_all_groups():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = AdamWPrune([{"params": [p]} for p in params], spam=Spam(every=4, warmup=2, hold=1))
    resets = []
    for step in range(1, 13):
        for p in params:
            p.grad = torch.ones(3)
        optimizer.step()
        steps = [optimizer.state[p]["step"].item() for p in params]
        assert len(set(steps)) == 1 and steps[0] == step % 4
        if all(not optimizer.state[p]["exp_avg"].any() and not optimizer.state[p]["exp_avg_sq"].any() for p in params):
            resets.append(step)
    assert resets == [4, 8, 12] and optimizer.num_steps == 12


def test_the_rate_is_whole_before_the_first_reset_and_after_each_warm_up():
    spam = Spam(every=500, warmup=150)
    assert [spam.lr_scale(n) for n in (0, 1, 499, 649, 650, 999)] == [1.0] * 6
    assert spam.lr_scale(500) == pytest.approx(0.5 * (1 - math.cos(math.pi / 150)))
    assert spam.lr_scale(574) == pytest.approx(0.5) and spam.lr_scale(1500) == spam.lr_scale(500)
    scales = [spam.lr_scale(n) for n in range(500, 650)]
    assert scales == sorted(scales) and scales[0] > 0
    assert {Spam(every=5, warmup=0, hold=1).lr_scale(n) for n in range(20)} == {1.0}


@pytest.mark.parametrize(
    "options",
    [{"theta": 0.0}, {"every": 0}, {"warmup": -1}, {"hold": 0}, {"every": 50, "hold": 50}],
    ids=str,
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="hold"):
        Spam(**options)


def events_with(score, schedule, every=5, steps=40, **spam):
    model, found = net(), []
    optimizer = adamw_prune(model, spam=Spam(**{"every": 10, "warmup": 4, "hold": 3} | spam))
    pruner = Pruner(model, optimizer, score=score, schedule=schedule, every=every, on_event=found.append)
    train(model, optimizer, range(steps))
    return pruner, [event.step for event in found]


def test_events_of_moments_wait_for_the_end_of_the_hold_and_those_of_weights_do_not():
    ramp = Ramp(0.5, 0, 25)
    assert events_with("bitter7", ramp)[1] == [5, 13, 15, 23, 25]
    assert events_with("magnitude", ramp)[1] == [5, 10, 15, 20, 25]
    assert events_with("random", ramp)[1] == [5, 10, 15, 20, 25]


@pytest.mark.parametrize("score", ["bitter3", "bitter7", "fisher", lambda weight, exp_avg: exp_avg.abs()])
def test_the_last_event_waits_too_and_reaches_the_final_sparsity(score):
    pruner, steps = events_with(score, Ramp(0.5, 0, 20))
    assert steps == [5, 13, 15, 23]
    assert num_pruned(pruner) == round(0.5 * sum(mask.numel() for mask in pruner.masks.values()))
    assert_pruned_are_zero(pruner)


def test_an_event_in_the_hold_is_taken_together_with_the_one_before():
    assert events_with("bitter7", OneShot(0.5, at=12))[1] == [13]
    assert events_with("bitter7", OneShot(0.5, at=13))[1] == [13]
    assert events_with("bitter7", Ramp(0.5, 9, 14), every=1)[1] == [13, 14]


def test_a_layer_without_a_gradient_since_the_reset_is_named_not_divided_by():
    model = net()
    optimizer = adamw_prune(model, spam=Spam(every=10, warmup=4, hold=3))
    Pruner(model, optimizer, schedule=OneShot(0.5, at=14))
    train(model, optimizer, range(10))
    with pytest.raises(ValueError, match=r"out\.weight"):
        for step in range(10, 14):
            optimizer.zero_grad()
            backward(model, step)
            model.out.weight.grad = None
            optimizer.step()
