"""What scores read is the real thing: input norms, moments made comparable, and errors that help."""

import pytest
import torch
from torch import nn
from toys import Conv1D, adamw, backward, net

from prunus.eligible import eligible
from prunus.score import SCORES, Score
from prunus.stats import InputNorms, score_of, sources


def norms_of(layer, *inputs):
    weights = eligible(nn.Sequential(layer)).weights
    with InputNorms(weights) as collected:
        for x in inputs:
            layer(x)
    return collected.norms()["0.weight"]


def unfolded_norms(conv, x):
    """L2 norm over all windows of what each element of the kernel sees, for each output channel."""
    padding = conv.padding if isinstance(conv.padding, tuple) else (0, 0)
    windows = nn.functional.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
    norms = windows.square().sum((0, 2)).sqrt().view(x.shape[1], *conv.kernel_size)
    groups = norms.view(conv.groups, -1, *conv.kernel_size)
    return groups.repeat_interleave(conv.out_channels // conv.groups, 0)


def events_of(score, optimizer, model, options=None, more=None):
    found = sources(eligible(model).weights, optimizer, score, options or {}, more=more or {})
    return {source.name: next(source.pieces())[1].view(source.shape) for source in found}


@pytest.mark.parametrize("shape", [(9, 6), (4, 5, 6), (2, 3, 4, 6), (6,), (0, 6)], ids=str)
def test_norms_of_a_linear_layer_run_over_all_but_the_last_dimension(shape):
    x = torch.randn(shape)
    assert torch.allclose(norms_of(nn.Linear(6, 3), x), x.reshape(-1, 6).norm(dim=0), atol=1e-6)


def test_norms_of_conv1d_broadcast_along_its_outputs():
    x, layer = torch.randn(4, 5, 6), Conv1D(3, 6)
    norms = norms_of(layer, x)
    assert norms.shape == (6, 1) and torch.allclose(norms[:, 0], x.reshape(-1, 6).norm(dim=0))
    assert norms.expand(layer.weight.shape).shape == (6, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"padding": 1},
        {"padding": (2, 0), "stride": (1, 3)},
        {"dilation": 2},
        {"groups": 2},
        {"groups": 4},
        {"kernel_size": (1, 4)},
        {"kernel_size": 1},
        {"stride": 3, "padding": 2, "dilation": (2, 1), "groups": 2},
    ],
    ids=str,
)
def test_norms_of_a_convolution_are_those_of_its_windows(options):
    conv, x = nn.Conv2d(4, 8, **{"kernel_size": 3} | options), torch.randn(3, 4, 11, 12)
    norms = norms_of(conv, x).expand(conv.weight.shape)
    assert torch.allclose(norms, unfolded_norms(conv, x).expand(conv.weight.shape), rtol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_norms_follow_the_padding_mode_and_padding_by_name(mode):
    conv, x = nn.Conv2d(2, 3, 3, padding="same", padding_mode=mode), torch.randn(2, 2, 6, 7)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="constant" if mode == "zeros" else mode)
    plain = nn.Conv2d(2, 3, 3)
    assert torch.allclose(norms_of(conv, x), unfolded_norms(plain, padded)[0], rtol=1e-5)


def test_norms_of_one_and_three_dimensional_convolutions():
    line, x = nn.Conv1d(2, 3, 4, stride=2, padding=1), torch.randn(5, 2, 13)
    flat = nn.Conv2d(2, 3, (1, 4), stride=(1, 2), padding=(0, 1))
    assert torch.allclose(norms_of(line, x), unfolded_norms(flat, x.unsqueeze(2))[0].squeeze(1), rtol=1e-5)
    assert torch.allclose(norms_of(line, x[0]), norms_of(line, x[:1]))

    solid, y = nn.Conv3d(2, 3, 2), torch.randn(2, 2, 3, 4, 5)
    windows = y.unfold(2, 2, 1).unfold(3, 2, 1).unfold(4, 2, 1)
    assert torch.allclose(norms_of(solid, y), windows.square().sum((0, 2, 3, 4)).sqrt(), rtol=1e-5)


def test_norms_of_a_transposed_convolution_are_those_of_its_channels():
    layer, x = nn.ConvTranspose2d(3, 5, 2), torch.randn(4, 3, 6, 6)
    norms = norms_of(layer, x).expand(layer.weight.shape)
    assert torch.allclose(norms[:, 2, 1, 0], x.transpose(0, 1).flatten(1).norm(dim=1), rtol=1e-5)


def test_several_forward_passes_add_up_and_half_precision_is_summed_in_float32():
    x = torch.randn(40, 6)
    together = norms_of(nn.Linear(6, 3), x)
    assert torch.allclose(norms_of(nn.Linear(6, 3), x[:7], x[7:]), together, rtol=1e-6)
    half = norms_of(nn.Linear(6, 3).bfloat16(), x.bfloat16())
    assert half.dtype == torch.float32 and torch.allclose(half, together, rtol=1e-2)


@pytest.mark.parametrize(("layer", "key"), [(nn.Linear(6, 3), "input"), (Conv1D(3, 6), "x")], ids=["linear", "Conv1D"])
def test_an_input_may_be_given_by_name(layer, key):
    x = torch.randn(4, 6)
    with InputNorms(eligible(nn.Sequential(layer)).weights) as collected:
        layer(**{key: x})
    assert torch.equal(collected.norms()["0.weight"], norms_of(layer, x))


def test_collecting_stops_with_the_context_and_begins_anew_with_the_next():
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    inputs = InputNorms(eligible(nn.Sequential(layer)).weights)
    for _ in range(2):
        with inputs:
            layer(x)
        layer(x * 100)
        assert torch.allclose(inputs.norms()["0.weight"], x.norm(dim=0))


def test_opening_twice_counts_once_and_closes_for_good():
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    inputs = InputNorms(eligible(nn.Sequential(layer)).weights)
    inputs.__enter__()
    inputs.__enter__()
    layer(x)
    inputs.__exit__(None, None, None)
    layer(x)
    assert torch.allclose(inputs.norms()["0.weight"], x.norm(dim=0))


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


def test_both_moments_are_corrected_each_by_its_own_beta(uneven):
    model, optimizer = uneven
    state, weight = optimizer.state[model.conv.weight], model.conv.weight
    m, v = state["exp_avg"] / (1 - 0.8**2), state["exp_avg_sq"] / (1 - 0.99**2)
    expected = weight.square() * m.abs() / (v.sqrt() + 1e-8)
    assert torch.allclose(events_of(SCORES["bitter0"], optimizer, model)["conv.weight"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["bitter8", "fisher"])
def test_a_score_that_takes_the_step_corrects_once(uneven, name):
    model, optimizer = uneven
    state, weight = optimizer.state[model.conv.weight], model.conv.weight
    expected = {
        "bitter8": weight.abs() * (state["exp_avg"] / (1 - 0.8**2)).abs().sqrt(),
        "fisher": weight.square() * state["exp_avg_sq"] / (1 - 0.99**2),
    }[name]
    assert torch.allclose(events_of(SCORES[name], optimizer, model)["conv.weight"], expected, rtol=1e-5)


TWINS = [("bitter8", {}, "bitter3"), ("fisher", {"q": 0.25}, "bitter7"), ("fisher", {"q": 0.0}, "magnitude")]


@pytest.mark.parametrize(("name", "options", "twin"), TWINS, ids=[f"{name}-{twin}" for name, _, twin in TWINS])
def test_a_correction_that_all_weights_share_is_left_out(name, options, twin):
    """Equal to the bit, so that the masks are equal at every tie of rounding too."""
    model = net()
    optimizer = adamw(model, betas=(0.8, 0.99))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    corrected, plain = events_of(SCORES[name], optimizer, model, options), events_of(SCORES[twin], optimizer, model)
    assert all(torch.equal(corrected[weight], plain[weight]) for weight in plain)


@pytest.mark.parametrize(("betas", "eps"), [((0.5, 0.99), None), ((0.8, 0.5), None), ((0.8, 0.99), 1e-3)], ids=str)
def test_a_correction_is_kept_where_betas_differ_or_eps_is_added(betas, eps):
    model = net()
    rest = [p for p in model.parameters() if p is not model.conv.weight]
    groups = [{"params": [model.conv.weight], "betas": betas}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99))
    backward(model, 0)
    optimizer.step()
    weight, first = model.conv.weight, optimizer.state[model.conv.weight]["exp_avg"]
    expected = weight.abs() * (first.abs() / (1 - betas[0]) + (eps or 0)).sqrt()
    found = events_of(SCORES["bitter8"], optimizer, model, {"eps": eps})["conv.weight"]
    assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "options", "twin"), TWINS, ids=[f"{name}-{twin}" for name, _, twin in TWINS])
def test_moments_of_groups_with_different_betas_are_made_comparable(name, options, twin):
    """After one step m_hat is the gradient and v_hat its square, whatever the betas are."""
    model = net()
    rest = [p for p in model.parameters() if p is not model.conv.weight]
    groups = [{"params": [model.conv.weight], "betas": (0.5, 0.9)}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99))
    backward(model, 0)
    optimizer.step()
    corrected, plain = events_of(SCORES[name], optimizer, model, options), events_of(SCORES[twin], optimizer, model)
    assert all(torch.allclose(corrected[weight], plain[weight], rtol=1e-5) for weight in plain)


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
