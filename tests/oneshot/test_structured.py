"""Exactly so many units go, the cheapest ones by structured OBS, and the rest stand in as well as least squares can."""

import math
from dataclasses import replace

import pytest
import torch
from covering import each_once
from test_solver import CASES, correlated, damped_error, error_of, least_squares, moments_of, noisy, normal

from prunus.oneshot import shrink_step
from prunus.oneshot.gram import Gram
from prunus.oneshot.shrink_step import DAMPING, UNIT_SCORES, Shrink, cheapest
from prunus.oneshot.step import Layers

SCORES = {"obs": None} | UNIT_SCORES


def columns_of(num_inputs, width):
    """Units of ``width`` columns each, in a mixed order."""
    return torch.randperm(num_inputs)[: num_inputs // width * width].view(-1, width)


def shrunk(x, weight, places, num, x_dense=None, **options):
    step = Shrink({"down": places}, {"down": num}, **options)
    return step(Layers({"down": weight}, [moments_of(x, x_dense)]))["down"]


def damped_inverse(x):
    gram = x.double().T @ x.double()
    return (gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram))).inverse()


def cheapest_by_definition(weight, inverse, places, num):
    """The ``num`` units that go, in order, what each costs, and the weights at the end."""
    weight, inverse, gone, costs = weight.clone(), inverse.clone(), [], []
    for _ in range(num):
        cost_of = {}
        for unit in set(range(len(places))) - set(gone):
            columns = places[unit]
            solved = torch.linalg.solve(inverse[columns][:, columns], weight[:, columns].T)
            cost_of[unit] = (weight[:, columns] * solved.T).sum().item()
        unit = min(sorted(cost_of), key=cost_of.__getitem__)
        columns = places[unit]
        rows = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])
        weight -= weight[:, columns] @ rows
        inverse -= inverse[:, columns] @ rows
        gone.append(unit)
        costs.append(cost_of[unit])
    return gone, costs, weight


def gone(change):
    return (~change.units).nonzero().squeeze(1).tolist()


# which units go


@pytest.mark.parametrize(
    ("name", "score", "width", "share"), each_once(CASES, SCORES, [1, 2, 5], ["none", "one", "third", "all but one"])
)
def test_the_number_of_units_is_exact_and_their_columns_alone_are_zero(name, score, width, share):
    x, weight = CASES[name]()
    places = columns_of(weight.shape[1], min(width, weight.shape[1]))
    units = len(places)
    num = {"none": 0, "one": min(1, units - 1), "third": units // 3, "all but one": units - 1}[share]
    change = shrunk(x, weight, places, num, score=SCORES[score])
    assert change.units.shape == (units,) and int(change.units.sum()) == units - num
    keep = torch.ones(weight.shape[1], dtype=torch.bool).index_fill_(0, places[~change.units].flatten(), False)
    assert torch.equal(change.mask, (weight != 0) & keep)
    assert torch.equal(change.weight != 0, change.mask)
    assert change.weight.dtype == weight.dtype and change.bias.dtype in (torch.float32, torch.float64)
    assert change.weight.isfinite().all() and change.bias.isfinite().all()
    if not num:
        assert torch.equal(change.weight, weight) and change.repair.error == 0 and not change.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("inputs", "width", "outputs", "share"), [(24, 1, 16, 0.3), (50, 1, 1, 0.9), (50, 1, 37, 1.0), (60, 3, 7, 0.5),
                                              (63, 9, 40, 0.8), (128, 32, 5, 0.75), (5, 5, 3, 1.0), (1, 1, 1, 1.0)]
)  # fmt: skip
def test_the_units_that_go_are_those_of_the_definition(monkeypatch, inputs, width, outputs, share, dtype):
    monkeypatch.setattr(shrink_step, "BLOCK", 16)
    weight, inverse = normal(outputs, inputs).double(), damped_inverse(correlated(400, inputs) + 0.3)
    places = columns_of(inputs, width)
    num = round(share * len(places))
    units, costs, _ = cheapest_by_definition(weight, inverse, places, num)
    here, costs_here = cheapest(weight.to(dtype), inverse.to(dtype), places, num)
    assert len(set(here.tolist())) == num
    assert costs_here.sum().item() == pytest.approx(sum(costs), rel=1e-3 if dtype == torch.float32 else 1e-9)
    if dtype == torch.float64:
        assert here.tolist() == units


@pytest.mark.parametrize("width", [1, 4])
def test_units_of_well_separated_costs_go_in_their_order_in_float32(width):
    places = columns_of(24, width)
    x, factors = torch.randn(1000, 24), torch.empty(24)
    factors[places] = 3.0 ** torch.arange(len(places)).unsqueeze(1)
    inverse, weight = damped_inverse(x), torch.randn(16, 24).sign() * factors ** (0.5 / width)
    units, _, _ = cheapest_by_definition(weight.double(), inverse, places, len(places) - 1)
    here, _ = cheapest(weight, inverse.float(), places, len(places) - 1)
    assert here.tolist() == units == list(range(len(places) - 1))


@pytest.mark.parametrize(("name", "width"), each_once(CASES, [1, 2, 3]))
def test_removals_in_float32_cost_as_little_as_those_of_the_definition(name, width):
    x, weight = CASES[name]()
    x, weight = x.double(), weight.double()
    x /= x.square().mean().sqrt().clamp(min=1e-30)
    places = columns_of(weight.shape[1], min(width, weight.shape[1]))
    inverse = torch.linalg.inv(x.T @ x + max(DAMPING * x.square().sum(0).mean(), 1e-6) * torch.eye(x.shape[1]))
    num = len(places) // 2
    _, costs, _ = cheapest_by_definition(weight, inverse, places, num)
    if num:
        _, costs_here = cheapest(weight.float(), inverse.float(), places, num)
        total = (weight @ x.T).square().sum().item()
        assert costs_here.sum().item() == pytest.approx(sum(costs), rel=0.02, abs=1e-4 * total)


def test_obs_leaves_a_smaller_error_than_every_other_score():
    x, weight = correlated(1000, 60) + 0.2, normal(40, 60)
    for width in (1, 4):
        places = columns_of(60, width)
        errors = {
            name: shrunk(x, weight, places, 60 // width // 3, score=score).repair for name, score in SCORES.items()
        }
        assert min(errors, key=lambda name: errors[name].error) == "obs"
        assert all(repair.error <= repair.mask_error for repair in errors.values())


@pytest.mark.parametrize("score", ["obs", "wanda", "flap"])
@pytest.mark.parametrize("width", [1, 3])
def test_units_whose_inputs_are_always_zero_go_first_and_cost_nothing(score, width):
    x, weight, places = correlated(), 1000 * normal(16), torch.arange(24).view(-1, width)
    dead = [1, 4, 6]
    x[:, places[dead].flatten()] = 0
    change = shrunk(x, weight, places, 3, score=SCORES[score])
    assert gone(change) == dead and change.repair.mask_error == change.repair.error == 0
    assert gone(shrunk(x, weight, places, 2, score=SCORES[score])) == dead[:2]
    assert set(gone(shrunk(x, weight, places, 5, score=SCORES[score]))) > set(dead)


@pytest.mark.parametrize("score", ["obs", "norm", "wanda", "flap"])
def test_of_equal_units_the_first_go(score):
    x, weight = torch.eye(24).repeat(8, 1), torch.ones(16, 24)
    for width in (1, 4):
        places = torch.arange(24).view(-1, width)
        assert gone(shrunk(x, weight, places, 3, score=SCORES[score])) == [0, 1, 2]


@pytest.mark.parametrize("width", [1, 4])
def test_of_two_equal_neurons_one_goes_and_the_other_takes_its_part(width):
    x = torch.randn(1000, 24)
    places = torch.arange(24).view(-1, width)
    x[:, places[3]] = x[:, places[1]]
    weight = normal(16)
    change = shrunk(x, weight, places, 1)
    (removed,), (other,) = gone(change), {1, 3} - set(gone(change))
    assert {removed, other} == {1, 3}
    taken = weight[:, places[1]] + weight[:, places[3]]
    assert change.repair.error < 1e-3 < change.repair.mask_error
    torch.testing.assert_close(change.weight[:, places[other]], taken, rtol=0.05, atol=0.05)


def test_random_units_depend_on_the_seed_alone():
    x, weight, places = correlated(), normal(16), torch.arange(24).view(-1, 1)

    def by_seed(seed):
        return gone(shrunk(x, weight, places, 8, score=shrink_step.RandomScore(seed)))

    assert by_seed(0) == by_seed(0) != by_seed(1)
    assert gone(shrunk(x.flip(0), -weight, places, 8, score=UNIT_SCORES["random"])) == by_seed(0)


def test_scores_of_other_methods_are_their_formulas():
    x, weight = correlated() + 0.5, normal(16)
    moments = moments_of(x)
    expected = {
        "norm": weight.norm(dim=0) ** 2,
        "wanda": (weight.abs() * x.norm(dim=0)).sum(0),
        "flap": weight.norm(dim=0) ** 2 * x.var(0, unbiased=False),
    }
    for name, scores in expected.items():
        torch.testing.assert_close(UNIT_SCORES[name](weight, moments), scores, rtol=1e-4, atol=1e-4)


# what the others become


@pytest.mark.parametrize(("inputs", "width", "outputs"), [(24, 1, 16), (24, 3, 5), (40, 8, 1)])
def test_the_refit_on_own_targets_ends_with_the_values_of_obs(inputs, width, outputs):
    x, weight, places = correlated(500, inputs) + 0.3, normal(outputs, inputs), columns_of(inputs, width)
    num = len(places) // 2
    units, _, values = cheapest_by_definition(weight.double(), damped_inverse(x), places, num)
    change = shrunk(x, weight, places, num)
    assert gone(change) == sorted(units)
    torch.testing.assert_close(change.weight.double(), values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("targets", ["own", "dense"])
@pytest.mark.parametrize("zeros", [0.0, 0.01, 0.5])
def test_the_refit_is_least_squares_on_what_is_not_zero(targets, zeros):
    x, weight, places = correlated(500).double(), normal(16).double(), columns_of(24, 2)
    weight *= torch.rand(16, 24) >= zeros
    x_dense = noisy(x)
    change = shrunk(x, weight, places, 4, x_dense, targets=targets)
    best = least_squares(weight, change.mask, x, x_dense if targets == "dense" else x, DAMPING)
    torch.testing.assert_close(change.weight, best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "targets", "width"), each_once(CASES, ["own", "dense"], [1, 3]))
def test_a_refit_is_never_worse_than_none(name, targets, width):
    x, weight = CASES[name]()
    x_dense, places = noisy(x), columns_of(weight.shape[1], min(width, weight.shape[1]))
    num = len(places) // 3
    score = UNIT_SCORES["wanda"]  # which chooses the same units in both
    refit, left = (
        shrunk(x, weight, places, num, x_dense, score=score, targets=targets, refit=r) for r in (True, False)
    )
    assert torch.equal(refit.mask, left.mask)
    assert torch.equal(left.weight, weight * left.mask)
    wanted = x_dense if targets == "dense" else x
    costs = [damped_error(change.weight, weight, x, wanted, DAMPING).sum().item() for change in (refit, left)]
    assert costs[0] <= costs[1] * (1 + 1e-5) + 1e-30
    assert refit.repair.mask_error == left.repair.mask_error == left.repair.error
    assert refit.repair.damping == DAMPING


@pytest.mark.parametrize("targets", ["own", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_the_definition(targets, dtype):
    x, weight, places = correlated(500) + 0.3, normal(16).to(dtype), columns_of(24, 2)
    x_dense = noisy(x)
    change = shrunk(x, weight, places, 5, x_dense, targets=targets)
    wanted = x_dense if targets == "dense" else x
    assert change.repair.error == pytest.approx(error_of(change.weight, weight, x, wanted), rel=1e-3)
    assert change.repair.mask_error == pytest.approx(error_of(weight * change.mask, weight, x, wanted), rel=1e-3)


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("targets", ["own", "dense"])
def test_with_the_shift_of_the_bias_mean_outputs_stay(targets, refit):
    x, weight, places = correlated(5000) + 2, normal(16), columns_of(24, 1)
    x_dense = noisy(x) + 0.3
    change = shrunk(x, weight, places, 8, x_dense, targets=targets, refit=refit)
    wanted = (x_dense if targets == "dense" else x) @ weight.T
    left = (x @ change.weight.T + change.bias - wanted).mean(0)
    torch.testing.assert_close(left, torch.zeros(16), rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_weights_that_stay_never_round_to_zero():
    x, weight = correlated(500), normal(16).half() * 1e-4
    x[:, 12:] = x[:, :12] * torch.linspace(-3, 3, 12)
    change = shrunk(x, weight, torch.arange(24).view(-1, 1), 12)
    assert torch.equal(change.weight != 0, change.mask)


def test_layers_that_read_the_same_units_lose_the_same_ones():
    x, weights = correlated(500), {"up": normal(16), "gate": normal(7), "other": normal(5)}
    places = columns_of(24, 2)
    step = Shrink(dict.fromkeys(("up", "gate"), places), {"up": 4, "gate": 4})
    changes = step(Layers(weights, [moments_of(x)]))
    assert set(changes) == {"up", "gate"} and torch.equal(changes["up"].units, changes["gate"].units)
    joined = shrunk(x, torch.cat([weights["up"], weights["gate"]]), places, 4)
    assert torch.equal(joined.units, changes["up"].units)
    assert step(Layers({"other": weights["other"]}, [moments_of(x)])) == {}


def test_a_layer_that_no_token_reaches_loses_its_smallest_columns_and_says_so():
    weight = normal(16)
    weight[:, [3, 8]] *= 1e-3
    for moments in ([], [None]):
        step = Shrink({"down": torch.arange(24).view(-1, 1)}, {"down": 2})
        change = step(Layers({"down": weight}, moments))["down"]
        assert gone(change) == [3, 8] and change.weight is None and change.bias is None
        assert change.repair.not_repaired == "no sample reached it"


def test_columns_of_no_unit_stay():
    x, weight = correlated(500), normal(16)
    change = shrunk(x, weight, torch.tensor([[20, 1], [3, 7], [9, 0]]), 2)
    stays = set(change.mask.all(0).nonzero().squeeze(1).tolist())
    assert len(stays) == 20 and stays >= set(range(24)) - {20, 1, 3, 7, 9, 0}


# bad input


def test_what_cannot_be_shrunk_is_refused_in_one_line():
    x, weight, places = correlated(), normal(16), columns_of(24, 2)
    moments = moments_of(x)
    wild = replace(moments, gram=moments.gram.index_fill(0, torch.tensor(3), math.nan))
    spoiled = weight.index_fill(0, torch.tensor(2), math.inf)
    hopeless = replace(moments, gram=-torch.ones(24, 24) * 1e9 + torch.eye(24) * 1.1e9)

    def step(num=4, weight=weight, moments=(moments,)):
        return lambda: Shrink({"down": places}, {"down": num})(Layers({"down": weight}, moments))

    for message, call in {
        "inputs of down have a Gram matrix that is not finite": step(moments=[wild]),
        "weights of down are NaN or inf": step(weight=spoiled),
        "cannot remove 12 of the 12 units that down reads: at least one must stay": step(12),
        "cannot remove -1 of the 12 units": step(-1),
        r"down reads 2 \(a grouped": step(moments=[moments, moments]),
        "down has no Cholesky factor": step(moments=[hopeless]),
        "a and b read the same inputs": lambda: Shrink({"a": places, "b": places}, {"a": 1, "b": 2})(
            Layers({"a": weight, "b": weight}, [moments])
        ),
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("width", [1, 3])
def test_a_matrix_that_cannot_be_factorised_is_damped_more_and_the_change_says_so(width):
    moments = moments_of(correlated())
    values, vectors = torch.linalg.eigh(moments.gram)
    values[0] = -0.02 * values.mean()  # no Gram matrix: one direction is negative
    broken = replace(moments, gram=vectors @ torch.diag(values) @ vectors.T)
    step = Shrink({"down": columns_of(24, width)}, {"down": 5})
    change = step(Layers({"down": normal(16)}, [broken]))["down"]
    assert change.repair.damping > DAMPING and int((~change.units).sum()) == 5


# means of inputs


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 50, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_are_those_of_all_tokens_wherever_batches_end(sizes, dtype):
    x, x_dense = (torch.randn(2, 60, 24) + 3).to(dtype)
    gram = Gram()
    for here, there in zip(x.split(sizes), x_dense.split(sizes), strict=True):
        gram.add(here, there)
    moments, alone = gram.moments(), moments_of(x)
    torch.testing.assert_close(moments.mean, x.to(moments.mean.dtype).mean(0))
    torch.testing.assert_close(moments.dense_mean, x_dense.to(moments.mean.dtype).mean(0))
    assert torch.equal(alone.mean, moments.mean) and alone.dense_mean is None


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "width", "outputs"), [(512, 1, 300), (270, 9, 64), (512, 128, 40)])
def test_units_on_cuda_cost_as_little_as_on_the_cpu(inputs, width, outputs):
    x, weight, places = correlated(4096, inputs) + 0.2, normal(outputs, inputs), columns_of(inputs, width)
    num = len(places) // 2
    errors = [shrunk(x.to(d), weight.to(d), places, num).repair.error for d in ("cpu", "cuda")]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
