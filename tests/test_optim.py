"""AdamWPrune is AdamW to the bit where nothing is pruned, clips as PyTorch does, and saves its masks."""

import copy

import pytest
import torch
from torch import nn
from toys import adamw, adamw_prune, net, through_a_file, train

from prunus import AdamWPrune, Spam
from prunus.ops import bits

SHAPES = [(7, 5), (3,), (1, 1), (2, 3, 3, 3), (130, 17), ()]
SETTINGS = {
    "default": {},
    "decay": {"weight_decay": 0.3, "lr": 0.05},
    "no decay": {"weight_decay": 0.0},
    "betas": {"betas": (0.5, 0.7), "eps": 1e-3},
    "no momentum": {"betas": (0.0, 0.9)},
}


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def set_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        draw = torch.randn(p.shape, generator=generator) * scale
        p.grad = draw.to(p.dtype) if (i + step) % 5 else None  # now and then a parameter has no gradient


def step_both(first, second, steps, scale=1.0):
    """Steps of two optimizers over equal parameters with equal gradients."""
    for step in steps:
        for optimizer in (first, second):
            set_gradients([p for group in optimizer.param_groups for p in group["params"]], step, scale)
            optimizer.step()


def equal_states(first, second, keys=("step", "exp_avg", "exp_avg_sq")):
    pairs = zip(first.param_groups, second.param_groups, strict=True)
    for p, q in ((p, q) for a, b in pairs for p, q in zip(a["params"], b["params"], strict=True)):
        assert torch.equal(p, q)
        assert all(torch.equal(first.state[p][key], second.state[q][key]) for key in keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("pieces", ["one piece", "many pieces"])
def test_fifty_steps_equal_adamw_to_the_bit(settings, dtype, pieces, request):
    if pieces == "many pieces":
        request.getfixturevalue("small_chunks")
    first = AdamWPrune(parameters(dtype), **SETTINGS[settings])
    second = torch.optim.AdamW(parameters(dtype), foreach=False, **SETTINGS[settings])
    step_both(first, second, range(50))
    equal_states(first, second)


def test_groups_and_learning_rates_that_change_equal_adamw_to_the_bit():
    ours, theirs = parameters(), parameters()
    optimizers = []
    for params, kind in ((ours, AdamWPrune), (theirs, lambda groups: torch.optim.AdamW(groups, foreach=False))):
        groups = [
            {"params": params[:2], "weight_decay": 0.0, "lr": 0.1},
            {"params": params[2:4], "betas": (0.8, 0.9), "eps": 1e-6},
            {"params": params[4:]},
        ]
        optimizers.append(kind(groups))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5) for optimizer in optimizers]
    for step in range(50):
        for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
    equal_states(*optimizers)


def test_a_learning_rate_may_be_a_tensor():
    first, second = (AdamWPrune(parameters(), lr=lr) for lr in (torch.tensor(0.02), torch.tensor(0.02).item()))
    step_both(first, second, range(5))
    equal_states(first, second)


@pytest.mark.slow
def test_a_compiled_step_is_the_step():
    ends = []
    for compiled in (False, True):
        params = parameters()
        optimizer = AdamWPrune(params, max_norm=0.1, spam=Spam(every=5, warmup=2, hold=1))
        step = torch.compile(lambda step=optimizer.step: step(), backend="eager") if compiled else optimizer.step
        for number in range(12):
            set_gradients(params, number)
            step()
        ends.append(optimizer)
    equal_states(*ends)


@pytest.mark.rounding
def test_one_step_is_within_one_unit_of_adamw_as_it_comes():
    ours, theirs = parameters(), parameters()
    step_both(AdamWPrune(ours), torch.optim.AdamW(theirs), [1])
    for p, q in zip(ours, theirs, strict=True):
        assert (p.detach().view(torch.int32) - q.detach().view(torch.int32)).abs().max() <= 1


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    weight = nn.Parameter(torch.ones(3))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert AdamWPrune([weight]).step(closure).item() == 3.0 and (weight < 1).all()


@pytest.mark.rounding
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_max_norm_equals_clipping_before_the_step(scale, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    first, second = AdamWPrune(ours, max_norm=1.5), torch.optim.AdamW(theirs, foreach=False)
    for step in range(20):
        set_gradients(ours, step, scale)
        set_gradients(theirs, step, scale)
        written = {p: p.grad.clone() for p in ours if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(theirs, 1.5)
        first.step()
        second.step()
        assert torch.equal(first.grad_norm, norm)
        assert all(torch.equal(p.grad, grad) for p, grad in written.items())  # nothing is written where none is pruned
    equal_states(first, second)


def masked(params, **options):
    """An optimizer with a mask for each parameter, and those masks; what they prune is zero."""
    optimizer = AdamWPrune(params, **options)
    masks = [torch.rand(p.shape) < 0.5 for p in params]
    for p, mask in zip(params, masks, strict=True):
        p.data[~mask] = 0
        optimizer.state[p]["mask"] = bits.pack(mask)
    return optimizer, masks


@pytest.mark.parametrize("spam", [None, Spam(theta=2.0, every=7, warmup=3, hold=2)], ids=["plain", "spam"])
def test_masked_weights_and_moments_stay_zero_whatever_gradient_comes(spam):
    params = parameters()
    optimizer, masks = masked(params, weight_decay=0.3, max_norm=1.0, spam=spam)
    for step in range(20):
        set_gradients(params, step)
        for p, mask in zip(params, masks, strict=True):
            if p.grad is not None:
                p.grad[~mask] = [float("nan"), float("inf"), -3.0][step % 3]
        optimizer.step()
    for p, mask in zip(params, masks, strict=True):
        state = optimizer.state[p]
        assert all(not tensor[~mask].any() for tensor in (p, state["exp_avg"], state["exp_avg_sq"]))
        assert torch.isfinite(p).all()


def test_the_norm_that_clips_is_that_of_the_kept_gradients():
    params = parameters()
    optimizer, masks = masked(params, max_norm=1.0)
    set_gradients(params, 1)
    kept = [p.grad[mask] for p, mask in zip(params, masks, strict=True) if p.grad is not None]
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(torch.cat(kept).norm().item(), rel=1e-6)


def test_kept_weights_move_as_if_the_gradient_had_been_masked_before():
    ours, theirs = parameters(), parameters()
    first, masks = masked(ours)
    second = torch.optim.AdamW(theirs, foreach=False)
    for q, mask in zip(theirs, masks, strict=True):
        q.data[~mask] = 0
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for q, mask in zip(theirs, masks, strict=True):
            if q.grad is not None:
                q.grad[~mask] = 0
        first.step()
        second.step()
    equal_states(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_comes_back_from_a_file_with_masks_as_bytes_and_continues_to_the_bit(dtype):
    ours = parameters(dtype)
    options = {"spam": Spam(theta=3.0, every=5, warmup=3, hold=1), "max_norm": 2.0, "eps": 1e-3}
    first, masks = masked(ours, **options)
    theirs = parameters(dtype)
    for step in range(8):
        set_gradients(ours, step, 1e-2)
        first.step()
    second = AdamWPrune(theirs, **options)
    second.load_state_dict(through_a_file(first.state_dict()))
    for p, q, mask in zip(ours, theirs, masks, strict=True):
        q.data.copy_(p.data)
        assert second.state[q]["mask"].dtype == torch.uint8
        assert torch.equal(bits.unpack(second.state[q]["mask"], (q.numel(),)), mask.view(-1))
    step_both(first, second, range(8, 20), 1e-2)
    equal_states(first, second, ("step", "exp_avg", "exp_avg_sq", "mask"))
    assert first.num_steps == second.num_steps == 20


def test_a_copied_optimizer_steps_as_the_original_does():
    params = parameters()
    optimizer, _ = masked(params, max_norm=0.5, spam=Spam(theta=2.0, every=3, warmup=2, hold=1))
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    twin = copy.deepcopy(optimizer)
    step_both(optimizer, twin, range(2, 6))
    equal_states(optimizer, twin)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": -1.0}, "max_norm"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_one_line_that_names_them(options, text):
    with pytest.raises(ValueError, match=text) as error:
        AdamWPrune([nn.Parameter(torch.ones(2))], **options)
    assert "\n" not in str(error.value)


def test_a_run_of_adamw_goes_on_as_if_it_had_always_been_this():
    model, twin = net(), net()
    other, optimizer = adamw(twin, foreach=False), adamw(model, foreach=False)
    train(model, optimizer, range(3))
    saved, optimizer = through_a_file(optimizer.state_dict()), adamw_prune(model)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(twin, other, range(6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
