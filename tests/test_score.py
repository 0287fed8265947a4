"""Every score is its formula, in float32, finite on zeros, and changes nothing that it reads."""

import inspect
import math

import numpy as np
import pytest
import torch

from prunus.score import REGROWTH, SCORES, random
from prunus.statistics import score_of

STEP = 7.0
EIGHTHS = [number / 8 for number in range(8)]
ADAM = {"beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8}


def direction(m, v, eps):
    return m / (np.sqrt(v) + (1e-8 if eps is None else eps))


def bitter3(w, m, eps):
    return abs(w) * np.sqrt(abs(m) + (eps or 0))


def bitter6(w, m, v, eps):
    """Without ``eps`` the denominator is Adam's own, sqrt(v) + 1e-8; with it the published sqrt(v + eps)."""
    coherence = abs(direction(m, v, None)) if eps is None else np.sqrt(m**2 / (v + eps))
    return bitter3(w, m, eps) * coherence


FORMULAS = {
    "magnitude": lambda w, m, v, eps: abs(w),
    "bitter0": lambda w, m, v, eps: w**2 * abs(direction(m, v, eps)),
    "bitter1": lambda w, m, v, eps: abs(w),
    "bitter2": lambda w, m, v, eps: abs(w),
    "bitter3": lambda w, m, v, eps: bitter3(w, m, eps),
    "bitter4": lambda w, m, v, eps: bitter3(w, m, eps),
    "bitter5": lambda w, m, v, eps: np.sign(w) * direction(m, v, eps) + 0.1 * abs(w),
    "bitter6": lambda w, m, v, eps: bitter6(w, m, v, eps),
    "bitter7": lambda w, m, v, eps: abs(w) * (v + (eps or 0)) ** 0.25,
    "bitter8": lambda w, m, v, eps: bitter3(w, m / (1 - 0.9**STEP), eps),
    "bitter9": lambda w, m, v, eps: bitter3(w, m, eps) - 0.1 * (-np.sign(w) * direction(m, v, eps)),
    "fisher": lambda w, m, v, eps: w**2 * v / (1 - 0.999**STEP),
    "wanda": lambda w, m, v, eps: abs(w) * np.arange(1, w.shape[-1] + 1),
    "movement": lambda w, m, v, eps: -3 * w,
}
SIGNED = {"bitter5", "bitter9", "movement"}
TAKES_EPS = [name for name, score in SCORES.items() if "eps" in inspect.signature(score.of).parameters]


def inputs(name, w, m, v):
    values = {
        "weight": w,
        "exp_avg": m,
        "exp_avg_sq": v,
        "step": STEP,
        "movement": -3 * w,
        "grad": m,
        "input_norm": torch.arange(1, w.shape[-1] + 1).float(),
        "position": torch.arange(w.numel()).view(w.shape),
    }
    score = (SCORES | REGROWTH)[name]
    return {n: values[n] for n in score.reads} | {n: {"name": "layer", **ADAM}[n] for n in score.settings}


def drawn(shape=(40, 30), scale=1e-4):
    """Weights and the moments of gradients of about ``scale``, with zeros among them."""
    w, m, v = torch.randn(shape), torch.randn(shape) * scale, (torch.randn(shape) * scale).square()
    w.view(-1)[:5], m.view(-1)[3:9], v.view(-1)[3:7] = 0, 0, 0
    return w, m, v


def test_every_row_has_a_formula_here():
    assert set(FORMULAS) | {"random"} == set(SCORES)


@pytest.mark.rounding
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("eps", [None, 1e-8])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_score_is_its_formula_to_the_rounding_of_float32(name, eps, scale):
    if eps is not None and name not in TAKES_EPS:
        pytest.skip("takes no eps")
    w, m, v = drawn(scale=scale)
    found = SCORES[name].of(**inputs(name, w, m, v), **({"eps": eps} if eps else {}))
    expected = FORMULAS[name](*(x.double().numpy() for x in (w, m, v)), eps)
    terms = np.abs(expected) + (abs(w.double().numpy()) if name in SIGNED else 0)  # signed terms may cancel
    assert found.dtype == torch.float32
    assert (np.abs(found.double().numpy() - expected) <= 2e-6 * terms + 1e-37).all()


@pytest.mark.parametrize("eps", [None, 1e-8])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (2, 3, 4), (4, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_finite_on_zeros_keep_the_shape_and_the_sign_they_promise(name, shape, eps):
    option = {"eps": eps} if eps and name in TAKES_EPS else {}
    zeros = torch.zeros(shape)
    for w, m, v in (drawn(shape), (zeros, zeros, zeros), (torch.randn(shape), zeros, zeros)):
        found = SCORES[name].of(**inputs(name, w, m, v), **option)
        assert found.shape == shape and torch.isfinite(found).all()
        assert name in SIGNED or (found >= 0).all()


@pytest.mark.parametrize("name", SCORES)
def test_scores_change_nothing_and_return_a_new_tensor(name):
    given = inputs(name, *drawn())
    before = {n: value.clone() for n, value in given.items() if isinstance(value, torch.Tensor)}
    found = SCORES[name].of(**given)
    found.fill_(7.0)
    assert all(torch.equal(given[n], value) for n, value in before.items())


@pytest.mark.parametrize("name", SCORES)
def test_a_row_reads_and_takes_just_what_its_function_names(name):
    score, arguments = SCORES[name], inspect.signature(SCORES[name].of).parameters
    needed = {n for n, argument in arguments.items() if argument.default is argument.empty}
    assert needed == set(score.reads)
    assert set(score.settings) <= set(arguments) - needed


@pytest.mark.rounding
@pytest.mark.parametrize("q", EIGHTHS)
def test_fisher_with_q_is_one_family(q):
    w, _, v = drawn(scale=1.0)
    v_hat = v.double() / (1 - 0.999**STEP)
    found = SCORES["fisher"].of(w, v, STEP, q=q)
    assert torch.allclose(found.double(), w.double().abs() * v_hat**q, rtol=2e-6, atol=0)


@pytest.mark.parametrize("q", [0.1, 0.3, 1 / 16, 1.0, -0.5, math.nan, "half"])
def test_fisher_with_another_power_is_refused_in_one_line_that_names_those_there_are(q):
    w, _, v = drawn()
    for refused in (lambda: SCORES["fisher"].of(w, v, STEP, q=q), lambda: score_of("fisher", {"q": q})):
        with pytest.raises(ValueError, match=r"^fisher takes a multiple of 1/8 below 1 for q[^\n]*got [^\n]*$"):
            refused()


ALIKE = [(name, {}) for name in SCORES] + [(name, {"eps": 1e-8}) for name in TAKES_EPS]
ALIKE += [("fisher", {"q": q}) for q in EIGHTHS] + [(name, {}) for name in REGROWTH]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), ALIKE, ids=str)
def test_a_score_of_an_element_is_the_same_bits_wherever_it_stands(name, options, dtype):
    """In slices at every alignment and of every tail, contiguous or not: so a shard is ranked as the whole is."""
    w, m, v = (x.to(dtype) for x in drawn((1, 600), scale=1e-2))
    given = {n: x.expand(w.shape) if isinstance(x, torch.Tensor) else x for n, x in inputs(name, w, m, v).items()}
    of = (SCORES | REGROWTH)[name].of
    whole = of(**given, **options).nan_to_num(7.0)  # eps is 0 in float16, and 0 / 0 is not equal to itself

    def same(place):
        part = {n: x[place] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        copied = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in part.items()}
        return all(torch.equal(of(**each, **options).nan_to_num(7.0), whole[place]) for each in (part, copied))

    odd = [
        (start, length)
        for start in range(18)
        for length in (1, 2, 3, 5, 7, 9, 13, 17, 31, 33, 67, 257, 511)
        if not same((slice(None), slice(start, start + length)))
    ]
    assert not odd and same((slice(None), slice(3, None, 7)))


def test_random_is_a_fixed_hash_of_seed_name_and_position():
    where = torch.arange(1000)
    noise = random(where, name="a", seed=1)
    assert torch.equal(noise, random(where, name="a", seed=1))
    assert torch.equal(noise[300:400], random(where[300:400], name="a", seed=1))
    assert torch.equal(noise.view(10, 100).T, random(where.view(10, 100).T, name="a", seed=1))
    for other in ({"name": "a", "seed": 2}, {"name": "b", "seed": 1}, {"name": "a", "seed": -1}, {"name": ""}):
        assert float(torch.corrcoef(torch.stack([noise, random(where, **other)]))[0, 1]) == pytest.approx(0, abs=0.12)
    assert noise[:3].tolist() == random(torch.arange(3), name="a", seed=1).tolist()
    assert random(torch.tensor([1869154])).item() < 1  # where its hash is nearly one


@pytest.mark.parametrize(("name", "seed"), [("", 0), ("h.0.mlp.c_fc.weight", 0), ("h.1.mlp.c_fc.weight", 123456789)])
def test_random_is_uniform(name, seed):
    noise = random(torch.arange(1 << 18), name=name, seed=seed)
    counts = torch.histc(noise, bins=64, min=0, max=1)
    expected = len(noise) / 64
    chi_square = float(((counts - expected).square() / expected).sum())
    assert abs(chi_square - 63) < 6 * math.sqrt(2 * 63)
    assert float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]) == pytest.approx(0, abs=0.01)
