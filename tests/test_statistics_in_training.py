"""Movement sums and input norms are gathered while training, at the right steps, and leave no hooks behind."""

import copy
import gc
import io
from functools import partial

import pytest
import torch
from reference import keep_largest, same
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils.checkpoint import checkpoint
from toys import NAMES, NUM_WEIGHTS, adamw, adamw_prune, assert_pruned_are_zero, backward, batch, net, num_pruned, train

from prunus import OneShot, Pruner, Ramp, Spam


def weights_of(model):
    return {name: model.get_parameter(name) for name in NAMES}


def assert_close(first, second):
    assert list(first) == list(second)
    assert all(torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-9) for name in first)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda m: adamw(m, fused=True),
        adamw_prune,
        lambda m: adamw_prune(m, spam=Spam(theta=1e12, every=4, warmup=3, hold=1)),
        lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9),
    ],
    ids=["adamw", "fused", "adamw prune", "spam", "sgd"],
)
def test_movement_is_the_sum_of_minus_rate_gradient_weight(make):
    model = net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    pruner = Pruner(model, optimizer, score="movement", schedule=OneShot(0.6, at=8))
    sums = {name: torch.zeros_like(p) for name, p in weights_of(model).items()}
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step)
        rate = optimizer.param_groups[0]["lr"] * getattr(optimizer, "lr_scale", 1.0)
        for name, p in weights_of(model).items():
            sums[name] -= rate * p.grad * p.detach()
        optimizer.step()
        scheduler.step()
    assert_close(pruner.state_dict()["movement"], sums)
    assert same(dict(pruner.masks), keep_largest(pruner.state_dict()["movement"], round(0.6 * NUM_WEIGHTS)))
    train(model, optimizer, range(8, 12))
    assert_pruned_are_zero(pruner)


def movement_after(make, step_with, steps=5):
    model = net()
    optimizer = make(model)
    pruner = Pruner(model, optimizer, score="movement", schedule=OneShot(0.5, at=100))
    for step in range(steps):
        step_with(model, optimizer, step)
    return pruner.state_dict()["movement"]


def plainly(model, optimizer, step):
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def with_a_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        backward(model, step)
        return torch.zeros(())

    optimizer.step(closure)


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_movement_is_the_same_where_a_closure_computes_the_gradient(make):
    assert_close(movement_after(make, with_a_closure), movement_after(make, plainly))


def test_movement_sees_the_gradient_that_is_clipped_inside_the_step():
    def clipping(model, optimizer, step):
        optimizer.zero_grad()
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    inside = movement_after(lambda m: adamw_prune(m, max_norm=0.01), plainly)
    assert_close(inside, movement_after(adamw_prune, clipping))


def adamw_prune_of_a_gpu(model):
    """What a GradScaler finds there; weights that are watched are updated as here."""
    optimizer = adamw_prune(model)
    optimizer._on_gpu = True
    return optimizer


@pytest.mark.parametrize("make", [adamw, partial(adamw, fused=True), adamw_prune, adamw_prune_of_a_gpu])
def test_movement_is_free_of_a_scalers_factor_and_of_skipped_steps(make):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def scaled(model, optimizer, step):
        for broken in (True, False):
            optimizer.zero_grad()
            backward(model, step, scaler)
            if broken and step == 2:
                model.hidden.weight.grad[0, 0] = float("inf")
            if not broken or step == 2:
                scaler.step(optimizer)
                scaler.update()

    assert_close(movement_after(make, scaled), movement_after(make, plainly))


def num_hooks(model):
    """Hooks that see the inputs of modules, on the model or on all modules at once."""
    return sum(len(module._forward_hooks) for module in model.modules()) + len(_global_forward_hooks)


@pytest.fixture(autouse=True)
def _no_hook_of_another_test():
    _global_forward_hooks.clear()


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_wanda_reads_the_inputs_of_the_steps_own_forward_passes(make):
    model, seen = net(), {}
    optimizer = make(model)
    optimizer.register_step_post_hook(
        lambda *_: seen.update({n: p.detach().abs() for n, p in weights_of(model).items()})
    )
    pruner = Pruner(model, optimizer, score="wanda", schedule=OneShot(0.6, at=3))
    train(model, optimizer, range(2))
    squares = torch.zeros(75)

    def look(_, x):
        squares.add_(x[0].detach().square().sum(0))

    model.hidden.register_forward_pre_hook(look)
    optimizer.zero_grad()
    backward(model, 2)
    backward(model, 3)  # two forward passes add up
    collected = pruner._inputs.norms()
    optimizer.step()
    assert torch.allclose(collected["hidden.weight"], squares.sqrt(), rtol=1e-5)
    scores = {name: weight * collected[name] for name, weight in seen.items()}
    assert same(dict(pruner.masks), keep_largest(scores, round(0.6 * NUM_WEIGHTS)))
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_layers_that_checkpointing_runs_again_are_counted_once(reentrant):
    model = net()
    pruner = Pruner(model, adamw(model), score="wanda", schedule=OneShot(0.6, at=1))

    def inner(x):
        return model.hidden(model.norm(x)).tanh()

    for step in range(2):
        x = model.conv(batch(step)).flatten(1)
        model.out(inner(x) if reentrant is None else checkpoint(inner, x, use_reentrant=reentrant)).sum().backward()
    seen = torch.cat([model.norm(model.conv(batch(step)).flatten(1)).detach() for step in range(2)])
    assert torch.allclose(pruner._inputs.norms()["hidden.weight"], seen.square().sum(0).sqrt(), rtol=1e-5)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def in_part(model, backend):
    model.hidden = torch.compile(model.hidden, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("compiled", [torch.compile, in_place, in_part])
def test_inputs_of_a_compiled_model_are_collected_and_it_runs_compiled_between_events(compiled):
    gc.collect()  # a pruner of another test that waits for its event would keep everything eager
    torch._dynamo.reset()
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append(pruner.step + 1) or graph(*args)

    expected, model = net(), net()
    other = Pruner(expected, adamw(expected), score="wanda", schedule=Ramp(0.6, 1, 5), every=2)
    train(expected, other.optimizer, range(6))
    model = compiled(model, backend=backend)
    pruner = Pruner(model, adamw(model), score="wanda", schedule=Ramp(0.6, 1, 5), every=2)
    train(model, pruner.optimizer, range(6))
    assert same(dict(pruner.masks), dict(other.masks)) and num_pruned(pruner) == round(0.6 * NUM_WEIGHTS)
    assert sorted({*runs}) == [2, 4, 6]


@pytest.mark.slow
def test_inputs_are_collected_where_the_whole_step_is_compiled():
    def masks(wrap):
        torch._dynamo.reset()
        model = net()
        pruner = Pruner(model, adamw(model), score="wanda", schedule=Ramp(0.6, 2, 6), every=2)
        step = wrap(lambda step: train(model, pruner.optimizer, [step]))
        for number in range(8):
            step(number)
        pruner.remove()
        return dict(pruner.masks)

    assert same(masks(partial(torch.compile, backend="eager")), masks(lambda step: step))


def test_two_that_listen_at_once_leave_torch_compile_as_it_was():
    first, second, runs = net(), net(seed=3), []
    for model in (first, second):
        model.compile(backend=lambda graph, _: lambda *args: runs.append(1) or graph(*args))
    one, two = (Pruner(m, adamw(m), score="wanda", schedule=OneShot(0.5, at=1)) for m in (first, second))
    for pruner in (one, two):
        train(pruner.model, pruner.optimizer, [0])
    assert not runs and num_pruned(two) == round(0.5 * NUM_WEIGHTS)
    train(first, one.optimizer, [1])
    assert runs


def test_inputs_are_collected_in_the_steps_before_events_alone_and_no_hook_is_left():
    model = net()
    pruner = Pruner(model, adamw(model), score="wanda", schedule=Ramp(0.6, 2, 8), every=3)
    listening = []
    for step in range(12):
        listening.append(num_hooks(model))
        train(model, pruner.optimizer, [step])
    listened = {step for step, hooks in enumerate(listening, start=1) if hooks}
    assert {5, 8} <= listened <= {2, 5, 8}  # at step 2 the sparsity is still zero
    assert max(listening) <= len(NAMES) and num_hooks(model) == 0
    assert num_pruned(pruner) == round(0.6 * NUM_WEIGHTS)
    late = Pruner(other := net(), adamw(other), score="wanda", schedule=OneShot(0.5, at=1))
    late.load_state_dict(late.state_dict())
    assert 0 < num_hooks(other) <= len(NAMES)
    late.load_state_dict(pruner.state_dict())
    assert num_hooks(other) == 0  # its only event has been


def test_an_event_that_waits_for_moments_does_not_listen_twice():
    model = net()

    def mine(weight, exp_avg_sq, input_norm):
        return weight.abs() * exp_avg_sq.sqrt() * input_norm

    optimizer = adamw_prune(model, spam=Spam(every=5, warmup=2, hold=3))
    pruner = Pruner(model, optimizer, score=mine, schedule=OneShot(0.5, at=5))
    for step in range(9):
        assert num_hooks(model) <= len(NAMES)
        train(model, optimizer, [step])
    assert num_pruned(pruner) == round(0.5 * NUM_WEIGHTS) and num_hooks(model) == 0


def test_copies_and_other_models_add_nothing_to_the_norms_and_the_model_can_be_saved_whole():
    model = net()
    pruner = Pruner(model, adamw(model), score="wanda", schedule=OneShot(0.5, at=1))
    backward(model, 0)
    before = pruner._inputs.norms()
    for other in (copy.deepcopy(model), net(seed=3)):
        backward(other, 1)
    assert all(torch.equal(norm, before[name]) for name, norm in pruner._inputs.norms().items())
    torch.save(model, io.BytesIO())


def test_a_module_that_was_not_called_is_named():
    model = net()
    optimizer = adamw(model)
    Pruner(model, optimizer, score="wanda", schedule=OneShot(0.5, at=1))
    model.out(torch.randn(2, 13)).sum().backward()
    with pytest.raises(ValueError, match=r"conv\.weight") as error:
        optimizer.step()
    assert "\n" not in str(error.value)
