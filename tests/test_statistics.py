"""What scores read is the real thing: moments made comparable, and errors that help."""

from functools import partial

import pytest
import torch
from toys import adamw, backward, net

from prunus.eligible import eligible
from prunus.score import SCORES, Score
from prunus.statistics import score_of, sources


def events_of(score, optimizer, model, options=None, more=None):
    found = sources(eligible(model).weights, optimizer, score, options or {}, more=more or {})
    return {source.name: next(source.chunks())[1].view(source.shape) for source in found}


@pytest.fixture
def uneven():
    """A model whose convolution took fewer Adam steps than the rest."""
    model = net()
    optimizer = adamw(model, betas=(0.8, 0.99))
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        if step < 3:
            model.conv.weight.grad = None
        optimizer.step()
    return model, optimizer


def test_moments_are_corrected_where_step_counts_differ_and_not_elsewhere(uneven):
    model, optimizer = uneven
    found = events_of(SCORES["bitter7"], optimizer, model)
    for name, step in (("conv", 2), ("hidden", 5)):
        weight = getattr(model, name).weight
        v_hat = optimizer.state[weight]["exp_avg_sq"] / (1 - 0.99**step)
        assert torch.allclose(found[f"{name}.weight"], weight.abs() * v_hat.sqrt().sqrt(), rtol=1e-5)

    even = net()
    optimizer = adamw(even)
    backward(even, 0)
    optimizer.step()
    plain = even.hidden.weight.abs() * optimizer.state[even.hidden.weight]["exp_avg_sq"].sqrt().sqrt()
    assert torch.equal(events_of(SCORES["bitter7"], optimizer, even)["hidden.weight"], plain)


@pytest.mark.parametrize("name", ["bitter0", "bitter8", "fisher"])
def test_moments_are_corrected_once_each_by_its_own_beta(uneven, name):
    model, optimizer = uneven
    state, weight = optimizer.state[model.conv.weight], model.conv.weight
    m, v = state["exp_avg"] / (1 - 0.8**2), state["exp_avg_sq"] / (1 - 0.99**2)
    expected = {
        "bitter0": weight.square() * m.abs() / (v.sqrt() + 1e-8),
        "bitter8": weight.abs() * m.abs().sqrt(),
        "fisher": weight.square() * v,
    }[name]
    assert torch.allclose(events_of(SCORES[name], optimizer, model)["conv.weight"], expected, rtol=1e-5)


def stepped(steps=1, **group):
    """A model after some steps of AdamW, in which the convolution has settings of its own."""
    model = net()
    rest = [p for p in model.parameters() if p is not model.conv.weight]
    optimizer = torch.optim.AdamW([{"params": [model.conv.weight], **group}, {"params": rest}], betas=(0.8, 0.99))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return model, optimizer


TWINS = [("bitter8", {}, "bitter3"), ("fisher", {"q": 0.25}, "bitter7"), ("fisher", {"q": 0.0}, "magnitude")]


@pytest.mark.parametrize(("name", "options", "twin"), TWINS, ids=[f"{name}-{twin}" for name, _, twin in TWINS])
def test_a_correction_that_all_weights_share_is_left_out_and_of_different_betas_made_comparable(name, options, twin):
    """Shared, scores are equal to the bit: so are the masks at every tie of rounding. Else m_hat is the gradient."""
    for groups, same in (({}, torch.equal), ({"betas": (0.5, 0.9)}, partial(torch.allclose, rtol=1e-5))):
        model, optimizer = stepped(steps=1 if groups else 3, **groups)
        corrected, plain = events_of(SCORES[name], optimizer, model, options), events_of(SCORES[twin], optimizer, model)
        assert all(same(corrected[weight], plain[weight]) for weight in plain)


@pytest.mark.parametrize(("betas", "eps"), [((0.5, 0.99), None), ((0.8, 0.5), None), ((0.8, 0.99), 1e-3)], ids=str)
def test_a_correction_is_kept_where_betas_differ_or_eps_is_added(betas, eps):
    model, optimizer = stepped(betas=betas)
    weight, first = model.conv.weight, optimizer.state[model.conv.weight]["exp_avg"]
    expected = weight.abs() * (first.abs() / (1 - betas[0]) + (eps or 0)).sqrt()
    found = events_of(SCORES["bitter8"], optimizer, model, {"eps": eps})["conv.weight"]
    assert torch.allclose(found, expected, rtol=1e-5)


def test_a_groups_own_eps_and_betas_are_used():
    model = net()
    groups = [{"params": [model.conv.weight], "eps": 0.1, "betas": (0.5, 0.6)}, {"params": [model.hidden.weight]}]
    optimizer = torch.optim.AdamW(groups)
    backward(model, 0)
    optimizer.step()

    def constants(weight, *, adam_eps, beta1, beta2):
        return weight * 0 + adam_eps + 10 * beta1 + 100 * beta2

    row = score_of(constants, {})
    found = {
        weight.name: sources([weight], optimizer, row, {}, more={})[0].at(torch.zeros(1).long())
        for weight in eligible(model, exclude="out").weights
    }
    assert found["conv.weight"].item() == pytest.approx(0.1 + 5 + 60)
    assert found["hidden.weight"].item() == pytest.approx(1e-8 + 9 + 99.9)


def test_scores_are_computed_in_float32_from_half_precision_weights():
    model = net(dtype=torch.bfloat16)
    optimizer = adamw(model)
    backward(model, 0)
    optimizer.step()
    v = optimizer.state[model.hidden.weight]["exp_avg_sq"].float()
    expected = model.hidden.weight.float().abs() * v.sqrt().sqrt()
    assert torch.equal(events_of(SCORES["bitter7"], optimizer, model)["hidden.weight"], expected)


def test_a_weight_without_adam_state_is_named():
    model = net()
    optimizer = adamw(model)
    backward(model, 0)
    model.hidden.weight.grad = None
    optimizer.step()
    with pytest.raises(ValueError, match=r"hidden\.weight") as error:
        events_of(SCORES["bitter7"], optimizer, model)
    assert "\n" not in str(error.value) and "gradient" in str(error.value)


@pytest.mark.parametrize("score", ["bitter3", "bitter7"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adafactor", {}), ("RMSprop", {}), ("Adagrad", {})],
    ids=str,
)
def test_an_optimizer_without_moments_is_named_with_what_is_missing_and_what_would_work(optimizer, options, score):
    model = net()
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    backward(model, 0)
    optimizer.step()
    missing = {"bitter3": "exp_avg", "bitter7": "exp_avg_sq"}[score]
    with pytest.raises(ValueError, match=rf"\b{missing}\b") as error:
        events_of(SCORES[score], optimizer, model)
    assert type(optimizer).__name__ in str(error.value)
    assert "AdamW" in str(error.value) and "magnitude" in str(error.value) and "\n" not in str(error.value)


def test_a_gradient_or_a_norm_that_is_missing_is_named():
    model = net()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"gradient.*conv\.weight"):
        events_of(score_of(lambda weight, grad: weight * grad, {}), optimizer, model)
    with pytest.raises(ValueError, match=r"input_norm.*conv\.weight"):
        events_of(SCORES["wanda"], optimizer, model, more={"input_norm": {}})


def test_a_function_is_a_score_of_what_its_arguments_name():
    def mine(weight, exp_avg, step, *, beta1, power=2.0):
        return weight.abs() ** power

    row = score_of(mine, {"power": 3.0})
    assert row == Score(mine, ("weight", "exp_avg", "step"), ("beta1",))


@pytest.mark.parametrize(
    ("score", "options", "text"),
    [
        ("bitter77", {}, "bitter77"),
        ("magnitude", {"eps": 1e-8}, "eps"),
        ("bitter7", {"epsilon": 1e-8}, "epsilon"),
        ("bitter7", {"weight": 1.0}, "weight"),
        ("bitter7", {"exp_avg_sq": 1.0}, "exp_avg_sq"),
        (lambda weight, hessian: weight, {}, "hessian"),
        (lambda *, power=2: power, {}, "read"),
        (lambda weight: weight, {"power": 2}, "power"),
    ],
)
def test_unknown_scores_options_and_arguments_are_named(score, options, text):
    with pytest.raises(ValueError, match=text) as error:
        score_of(score, options)
    assert "\n" not in str(error.value)
