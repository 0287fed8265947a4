"""A solved layer has its exact count of zeros, never a larger error than the mask alone, and least-squares weights."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from covering import each_once
from reference import DRAWS, draw, keep_largest, same, some_dead

from prunus import Global, NofM, PerLayer, PerRow
from prunus.oneshot import gram as gram_module
from prunus.oneshot import solver
from prunus.oneshot.gram import Gram, Moments
from prunus.oneshot.options import Repair
from prunus.oneshot.problem import Problem
from prunus.oneshot.resources import Clock
from prunus.oneshot.solver import refine, solve
from prunus.oneshot.step import keep_all_but
from prunus.ranks import Ranks
from prunus.score import wanda

IN, TOKENS = 24, 200
SELECTORS = {"layer": PerLayer(), "row": PerRow(), "2:4": NofM(2, 4), "group": Global(), "erk": PerLayer("erk")}


def keep(select, sparsity):
    return lambda scores, live: select(scores, sparsity, live)


def correlated(tokens=TOKENS, inputs=IN):
    return torch.randn(tokens, inputs) @ torch.randn(inputs, inputs) / inputs**0.5


def dead_inputs():
    x = correlated()
    x[:, [0, 5, 6, 7, 8]] = 0
    return x


def normal(rows, inputs=IN):
    return torch.randn(rows, inputs)


# inputs (tokens, in) and weights (out, in) that are hard on a solver
CASES = {
    "plain": lambda: (correlated(), normal(16)),
    "one row": lambda: (correlated(), normal(1)),
    "one input": lambda: (correlated(inputs=1), normal(8, 1)),
    "one token": lambda: (correlated(tokens=1), normal(16)),
    "fewer tokens than inputs": lambda: (correlated(tokens=9), normal(16)),
    "equal inputs": lambda: (correlated()[:, :1].repeat(1, IN), normal(16)),
    "inputs never seen": lambda: (dead_inputs(), normal(16)),
    "no input seen": lambda: (torch.zeros(TOKENS, IN), normal(16)),
    "ties": lambda: (torch.randint(-1, 2, (TOKENS, IN)).float(), torch.randint(1, 3, (16, IN)).float()),
    "all equal": lambda: (torch.ones(TOKENS, IN), torch.ones(16, IN)),
    "zeros": lambda: (correlated(), normal(16) * (torch.rand(16, IN) < 0.6)),
    "no weights": lambda: (correlated(), torch.zeros(16, IN)),
    "bfloat16": lambda: (correlated().bfloat16(), normal(16).bfloat16()),
    "float16": lambda: (correlated().half(), normal(16).half()),
    "float64": lambda: (correlated().double(), normal(16).double()),
    "wide range": lambda: (correlated() * 10.0 ** torch.randint(-8, 9, (IN,)), normal(16)),
    "tiny": lambda: (correlated() * 1e-15, normal(16) * 1e-6),
    "offset": lambda: (correlated() + 100, normal(16)),
}


def moments_of(x, x_dense=None):
    gram = Gram()
    gram.add(x, x_dense)
    return gram.moments()


def noisy(x):
    return (x.float() + 0.1 * x.float().std(unbiased=False) * torch.randn(x.shape)).to(x.dtype)


def error_of(weight, dense, x, x_dense):
    """``|W' X - W X_d|^2 / |W X_d|^2`` by definition, in float64."""
    weight, dense, x, x_dense = (tensor.double() for tensor in (weight, dense, x, x_dense))
    target = dense @ x_dense.T
    return ((weight @ x.T - target).square().sum() / target.square().sum()).item()


def damped_error(weight, dense, x, x_dense, damping):
    weight, dense, x, x_dense = (tensor.double() for tensor in (weight, dense, x, x_dense))
    lam = damping * x.square().sum(0).mean()
    return (weight @ x.T - dense @ x_dense.T).square().sum(1) + lam * (weight - dense).square().sum(1)


def least_squares(dense, mask, x, x_dense, damping):
    """The best weights on a mask, row by row, by a float64 solver."""
    lam = damping * x.square().sum(0).mean()
    best = torch.zeros_like(dense)
    for row, keep_row in enumerate(mask):
        inputs = torch.cat([x[:, keep_row], lam.sqrt() * torch.eye(int(keep_row.sum()), dtype=x.dtype)])
        target = torch.cat([x_dense @ dense[row], lam.sqrt() * dense[row, keep_row]])
        best[row, keep_row] = torch.linalg.lstsq(inputs, target, driver="gelsd").solution
    return best


# Gram matrices


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [1, 7, 24])
def test_moments_are_those_of_a_plain_loop_in_float64(monkeypatch, dtype, inputs):
    monkeypatch.setitem(gram_module.PANEL, "cpu", 5)
    monkeypatch.setattr(gram_module, "BLOCK", 16)
    x, x_dense = torch.randn(2, 3, 11, inputs).to(dtype)
    gram = Gram()
    gram.add(x, x_dense)
    found = gram.moments()

    expected = torch.zeros(3, inputs, inputs, dtype=torch.float64)
    for token, token_dense in zip(x.double().flatten(0, 1), x_dense.double().flatten(0, 1), strict=True):
        expected[0] += torch.outer(token, token)
        expected[1] += torch.outer(token_dense, token)
        expected[2] += torch.outer(token_dense, token_dense)
    exactness = 1e-13 if dtype == torch.float64 else 1e-5
    for matrix, wanted in zip((found.gram, found.cross, found.dense), expected, strict=True):
        assert matrix.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(matrix.double(), wanted, rtol=exactness, atol=exactness * 33)
    assert found.num_tokens == 33


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 5], [5, 2, 1]])
def test_batch_sizes_do_not_show_in_the_bits(monkeypatch, sizes):
    monkeypatch.setattr(gram_module, "BLOCK", 32)
    x, x_dense = torch.randn(2, 8, 13, IN)
    whole = moments_of(x, x_dense)
    gram = Gram()
    for parts in zip(x.split(sizes), x_dense.split(sizes), strict=True):
        gram.add(*parts)
    found = gram.moments()
    assert all(torch.equal(getattr(found, name), getattr(whole, name)) for name in ("gram", "cross", "dense"))


def test_tokens_that_are_not_valid_and_later_changes_of_the_inputs_change_nothing():
    x, x_dense = torch.randn(2, 4, 9, IN)
    valid = torch.rand(4, 9) < 0.6
    plain, gram = moments_of(x[valid], x_dense[valid]), Gram()
    x[~valid], x_dense[~valid] = math.nan, math.inf
    gram.add(x, x_dense, valid)
    x.zero_()
    found = gram.moments()
    assert found.num_tokens == int(valid.sum())
    assert all(torch.equal(getattr(found, name), getattr(plain, name)) for name in ("gram", "cross", "dense"))


# the solver


@pytest.mark.parametrize(("name", "scope", "targets"), each_once(CASES, SELECTORS, ["dense", "own"], one_of=3))
def test_counts_are_exact_and_no_error_is_above_that_of_the_mask_alone(name, scope, targets):
    x, weight = CASES[name]()
    if scope == "2:4" and weight.shape[1] % 4:
        pytest.skip("2:4 needs rows of fours")
    x_dense = noisy(x)
    weights = {"q": weight, "k": weight.flip(0)[: len(weight) // 2 + 1]}
    choose = keep(SELECTORS[scope], 0.5)
    found = solve(weights, moments_of(x, x_dense), choose, Repair(targets, iterations=12))

    live = {name: weight != 0 for name, weight in weights.items()}
    counts = choose({name: weight.abs().float() for name, weight in weights.items()}, live)
    if scope == "group":
        assert sum(int(s.mask.sum()) for s in found.values()) == sum(int(mask.sum()) for mask in counts.values())
    for name, dense in weights.items():
        solution = found[name]
        if scope != "group":
            by_row = scope in ("row", "2:4")
            assert torch.equal(*(m.sum(1) if by_row else m.sum() for m in (solution.mask, counts[name])))
        if scope == "2:4":
            assert (solution.mask.unflatten(1, (-1, 4)).sum(2) <= 2).all()
        assert solution.weight.dtype == dense.dtype
        assert solution.weight.isfinite().all()
        assert torch.equal(solution.weight != 0, solution.mask)
        assert not (solution.mask & ~live[name]).any()
        assert 0 <= solution.repair.error <= solution.repair.mask_error or scope == "group"


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("name", "targets"),
    each_once(["plain", "bfloat16", "wide range", "inputs never seen", "zeros", "one token"], ["dense", "own"]),
)
def test_errors_are_those_by_definition(name, targets):
    x, weight = CASES[name]()
    x_dense = noisy(x) if targets == "dense" else x
    found = solve({"q": weight}, moments_of(x, x_dense), keep(PerLayer(), 0.5), Repair(targets))["q"]
    assert found.repair.error == pytest.approx(error_of(found.weight, weight, x, x_dense), rel=1e-3, abs=1e-5)
    refined = refine({"q": weight}, {"q": found.mask}, moments_of(x, x_dense), Repair(targets))["q"]
    assert refined.repair.mask_error == pytest.approx(
        error_of(weight * found.mask, weight, x, x_dense), rel=1e-3, abs=1e-5
    )


@pytest.mark.rounding
@pytest.mark.parametrize(("name", "damping"), each_once(CASES, [1e-3, 0.01, 1.0], one_of=3))
def test_refinement_reaches_the_least_squares_solution(name, damping):
    x, weight = (tensor.double() for tensor in CASES[name]())
    x_dense, mask = noisy(x), torch.rand(weight.shape) < 0.5
    found = refine({"q": weight}, {"q": mask}, moments_of(x, x_dense), Repair(damping=damping, refine=500))["q"]

    assert torch.equal(found.mask, mask & (weight != 0))
    best = least_squares(weight, found.mask, x, x_dense, damping)
    least = damped_error(best, weight, x, x_dense, damping)
    scale = damped_error(torch.zeros_like(weight), weight, x, x_dense, damping)
    assert (damped_error(found.weight, weight, x, x_dense, damping) <= least + 1e-9 * scale).all()


@pytest.mark.parametrize("name", CASES)
def test_refinement_never_raises_the_damped_error(name):
    x, weight = CASES[name]()
    x_dense, mask = noisy(x), torch.rand(weight.shape) < 0.5
    moments, errors = moments_of(x, x_dense), []
    for steps in (0, 1, 2, 5, 20, 100):
        found = refine({"q": weight}, {"q": mask}, moments, Repair(damping=0.01, refine=steps))["q"]
        errors.append(damped_error(found.weight, weight, x, x_dense, 0.01).sum())
        if steps == 0:
            assert torch.equal(found.weight, weight * mask)
    slack = 1e-5 * damped_error(weight * 0, weight, x, x_dense, 0.01).sum()
    if weight.dtype in (torch.bfloat16, torch.float16):
        slack *= 100  # further steps are worth less than a rounding
    assert all(later <= earlier + slack for earlier, later in pairwise(errors))
    assert errors[-1] <= errors[0] + 1e-6 * slack


@pytest.mark.rounding
@pytest.mark.parametrize("scope", ["row", "layer", "2:4"])
def test_iteration_0_is_wanda(scope):
    x, weight = correlated(), normal(16)
    found = solve({"q": weight}, moments_of(x), keep(SELECTORS[scope], 0.5), Repair(damping=0, iterations=0, refine=0))
    mask = SELECTORS[scope]({"q": wanda(weight, x.square().sum(0).sqrt())}, 0.5)["q"]
    assert torch.equal(found["q"].mask, mask)
    assert torch.equal(found["q"].weight, weight * mask)


@pytest.mark.slow
def test_the_support_is_near_the_best_there_is():
    """One row of 8 inputs, 4 of them kept: all 70 supports are tried."""
    excess = []
    for _ in range(20):
        x, weight = correlated(inputs=8).double(), normal(1, 8).double()
        found = solve({"q": weight}, moments_of(x), keep(PerLayer(), 0.5), Repair(damping=1e-6, refine=100))["q"]
        masks = [torch.zeros(1, 8).index_fill(1, torch.tensor(kept), 1).bool() for kept in combinations(range(8), 4)]
        least = min(error_of(least_squares(weight, mask, x, x, 1e-6), weight, x, x) for mask in masks)
        assert found.repair.error >= least - 1e-6
        excess.append(found.repair.error / least)
    assert sorted(excess)[10] < 1.05


def test_admm_finds_better_supports_than_wanda():
    x, weight = correlated(), normal(64)
    moments = moments_of(x)
    mask_only = solve({"q": weight}, moments, keep(PerLayer(), 0.6), Repair(iterations=0, refine=100))["q"]
    found = solve({"q": weight}, moments, keep(PerLayer(), 0.6), Repair(refine=100))["q"]
    assert found.repair.iterations % 3 == 0
    assert found.repair.error < 0.9 * mask_only.repair.error < 0.9 * mask_only.repair.mask_error


@pytest.mark.rounding
@pytest.mark.parametrize("ranks", [None, Ranks()], ids=["by the inverse", "by the factor"])
def test_admm_follows_the_formulas(ranks, monkeypatch):
    """The same supports and values as the iteration written down with B, D and V, in float64."""
    monkeypatch.setattr(solver, "FACTORED", 0)
    x, weight = correlated().double(), normal(16).double()
    x_dense = noisy(x)
    repair, choose = Repair(damping=0.01, iterations=21, refine=0), keep(PerLayer(), 0.5)
    problem = Problem.of({"q": weight}, moments_of(x, x_dense), True, 0.01, ranks=ranks)
    first = choose({"q": problem.scaled().abs()}, {})["q"]
    support, values, iterations = solver._admm(problem, first, choose, repair, Clock())

    lam = 0.01 * x.square().sum(0).mean()
    gram = x.T @ x + lam * torch.eye(IN)
    e = gram.diagonal().sqrt()
    y = (weight @ (x_dense.T @ x) + lam * weight) / e
    gram = gram / e / e.unsqueeze(1)
    v, rho, seen = torch.zeros_like(weight), 0.1, first
    d = weight * e * first
    for iteration in range(1, 22):
        b = (y - v + rho * d) @ torch.linalg.inv(gram + rho * torch.eye(IN))
        mask = choose({"q": (b + v / rho).abs()}, {})["q"]
        d = (b + v / rho) * mask
        v = v + rho * (b - d)
        if iteration % 3 == 0:
            changed, kept = int((mask ^ seen).sum()), int(mask.sum())
            if changed == 0:
                break
            rho *= 1.3 if changed >= 0.1 * kept else 1.2 if changed >= 0.005 * kept else 1.1
            seen = mask
    assert iterations == iteration
    assert torch.equal(support, mask)
    unit = x.square().sum(0).mean().sqrt()  # energies of a problem are relative to the mean diagonal
    torch.testing.assert_close(values * unit, d)


@pytest.mark.parametrize("num", [1, 5, 12, 13])
def test_an_inverse_is_made_by_panels_of_any_number_and_width(num, monkeypatch):
    monkeypatch.setattr(solver, "PANEL", 4)
    root = torch.randn(num, num, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
    matrix = root @ root.T + torch.eye(num)
    found = solver.inverse_by_panels(torch.linalg.cholesky(matrix))
    torch.testing.assert_close(found, matrix.inverse(), rtol=1e-9, atol=1e-9)


def test_targets_of_the_dense_model_lower_the_error_to_it_and_are_the_layers_own_without_a_dense_stream():
    x_dense, weight = correlated(), normal(32)
    x = noisy(x_dense)

    def solved(targets, moments):
        return solve({"q": weight}, moments, keep(PerLayer(), 0.5), Repair(targets))["q"].weight

    dense, own = (error_of(solved(t, moments_of(x, x_dense)), weight, x, x_dense) for t in ("dense", "own"))
    assert dense < own
    assert torch.equal(*(solved(targets, moments_of(x)) for targets in ("dense", "own")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_layer_with_nothing_to_prune_is_returned_bit_for_bit(dtype):
    x = correlated()
    dense = normal(16).to(dtype)
    dense[0, :3] = 0
    pruned = dense * (torch.rand(dense.shape) < 0.4)
    weights, moments = {"q": dense, "k": normal(8).to(dtype), "v": pruned}, moments_of(x, noisy(x))
    found = solve(weights, moments, keep_all_but({"q": 0, "k": 50, "v": 100}))
    for name in ("q", "v"):
        assert torch.equal(found[name].weight, weights[name])
        assert found[name].repair.error == found[name].repair.mask_error
    assert int((found["k"].weight == 0).sum()) == 50
    untouched = solve(weights, moments, keep(PerLayer(), 0.0))
    assert all(torch.equal(untouched[name].weight, weights[name]) for name in weights)
    given = refine(weights, {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}, moments)
    assert all(torch.equal(given[name].weight, weights[name]) for name in weights)


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.97, 1.0])
def test_the_largest_of_each_layer_stay_with_ties_and_dead_weights(kind, share):
    scores = draw(kind, (1, 1), (13, 24), (5, 7))
    for live in ({}, some_dead(scores), {name: torch.zeros_like(s, dtype=torch.bool) for name, s in scores.items()}):
        num_drop = {name: round(share * score.numel()) for name, score in scores.items()}
        found = keep_all_but(num_drop)(scores, live)
        for name, score in scores.items():
            expected = keep_largest({name: score}, num_drop[name], live)
            assert same({name: found[name]}, expected)


@pytest.mark.parametrize("num_drop", [(0, 0), (0, 1), (1, 383), (100, 0), (383, 200), (17, 191), (384, 384)])
def test_counts_by_name_are_exact(num_drop):
    weights = {"q": normal(16), "k": normal(16)}
    choose = keep_all_but(dict(zip(weights, num_drop, strict=True)))
    found = solve(weights, moments_of(correlated()), choose, Repair(iterations=9))
    assert tuple(int((found[name].weight == 0).sum()) for name in weights) == num_drop


def test_weights_of_inputs_never_seen_go_first_and_stay_as_they_are():
    x, weight = dead_inputs(), normal(16)
    dead = (x == 0).all(0)
    half = solve({"q": weight}, moments_of(x), keep(PerLayer(), 0.5))["q"]
    assert (half.weight[:, dead] == 0).all()
    few = solve({"q": weight}, moments_of(x), keep(PerLayer(), 0.1))["q"]
    assert int((~few.mask).sum()) == round(0.1 * weight.numel())
    assert few.mask[:, ~dead].all()
    torch.testing.assert_close(few.weight[:, dead], (weight * few.mask)[:, dead])


def test_layers_that_share_their_input_are_refined_as_they_would_be_alone():
    x, weights = correlated(), {"q": normal(16), "k": normal(16)}
    together = refine(weights, masks := {n: torch.rand(16, IN) < 0.5 for n in weights}, moments_of(x))
    for name, weight in weights.items():
        alone = refine({name: weight}, masks, moments_of(x))[name]
        torch.testing.assert_close(together[name].weight, alone.weight, rtol=1e-4, atol=1e-5)


def test_inputs_that_do_not_fit_are_refused_by_the_name_of_the_layer():
    x, weights = correlated(), {"block.q": normal(16)}
    x[3, 4] = math.nan
    for message, call in {
        r"block\.q have a Gram matrix that is not finite": lambda: solve(weights, moments_of(x), keep(PerLayer(), 0.5)),
        r"\.q have .* not finite": lambda: refine(weights, {"block.q": torch.ones(16, IN) > 0}, moments_of(x)),
        r"q has shape \(16, 8\)": lambda: solve({"q": normal(16, 8)}, moments_of(correlated()), keep(PerLayer(), 0.5)),
        "no tokens": lambda: Gram().moments(),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_failed_factorisation_is_damped_more_and_the_solution_says_so():
    gram = moments_of(correlated()).gram
    values, vectors = torch.linalg.eigh(gram)
    values[-1] *= -0.02  # no Gram matrix: one direction is negative
    broken = Moments(vectors @ torch.diag(values) @ vectors.T, None, None, TOKENS)
    found = solve({"q": normal(16)}, broken, keep(PerLayer(), 0.5), Repair(damping=0.001))["q"]
    assert found.repair.damping > 0.001
    assert int(found.mask.sum()) == 16 * IN // 2
    hopeless = replace(broken, gram=-torch.ones(IN, IN) * 1e9 + torch.eye(IN) * 1.1e9)
    with pytest.raises(ValueError, match="q has no Cholesky factor"):
        solve({"q": normal(16)}, hopeless, keep(PerLayer(), 0.5), Repair(damping=0.01))


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("scope", ["layer", "row", "2:4"])
def test_errors_on_cuda_are_those_on_the_cpu_within_a_percent(scope, tf32):
    x, weight = correlated(4096, 256), normal(512, 256)
    x_dense = noisy(x)
    errors = []
    for device in ("cpu", "cuda"):
        moments = moments_of(x.to(device), x_dense.to(device))
        choose = keep(SELECTORS[scope], 0.5)
        errors.append(solve({"q": weight.to(device)}, moments, choose, Repair(tf32=tf32))["q"].repair.error)
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
