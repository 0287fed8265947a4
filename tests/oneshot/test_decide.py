"""Decisions from two records are those of the definition, whatever the gradients are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe_models import mlp
from probe_reference import split

from prunus.oneshot import Limit
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.method import Method
from prunus.oneshot.probe.decide import is_allowed, ratios, smallest_ratios, taus
from prunus.oneshot.scoring import Scores

NASTY = [0.0, 1e-45, 1e-30, 0.5, 1.0, 1.5, 2.0, 2.0000002, 3.0, 1e30, 3e38, math.inf, math.nan]


def decided(before, after, tau, zero):
    """Where the definition prunes, in float64 so that the product is exact enough to be one."""
    g0, g1 = before.double(), after.double()
    finite = g0.isfinite() & g1.isfinite()
    none = (g0 == 0) & (g1 == 0)
    return finite & (g1 <= (1 + tau) * g0) & (~none if zero == "keep" else True)


@pytest.mark.parametrize("zero", ["prune", "keep"])
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 15.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decisions_are_those_of_the_definition(tau, zero, dtype):
    before, after = torch.tensor(NASTY, dtype=dtype).repeat_interleave(len(NASTY)), torch.tensor(NASTY * len(NASTY))
    found = ratios(before, after.to(dtype), zero)
    assert torch.equal(is_allowed(found.q, tau), decided(before, after.to(dtype), tau, zero))
    assert found.num_zero == 1 and found.num_not_finite == len(NASTY) ** 2 - (len(NASTY) - 2) ** 2


def test_what_grows_to_the_edge_is_pruned():
    q = ratios(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 1.9999999, 2.0000002]), "prune").q
    assert is_allowed(q, 1.0).tolist() == [True, True, False]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, math.nan]), max_size=12), st.integers(0, 14))
def test_the_smallest_ratios_are_taken_the_first_of_equal_ones_first(values, num):
    q = torch.tensor(values)
    (chosen,) = smallest_ratios([q], num)
    numbers = [i for i, value in enumerate(values) if not math.isnan(value)]
    expected = sorted(sorted(numbers, key=lambda i: (values[i], i))[:num])
    assert chosen.nonzero().squeeze(1).tolist() == expected


def test_tau_adapts_by_the_root_of_the_size():
    assert taus("adaptive", {"a": 1, "b": 4, "c": 4}, 0.5) == pytest.approx(
        {"a": 0.5 * 3**-0.5, "b": 0.5 * (4 / 3) ** 0.5, "c": 0.5 * (4 / 3) ** 0.5}
    )


@pytest.mark.parametrize(
    "limit",
    [Limit(relative=0.1, better="lower"), Limit(absolute=0.1, better="lower"), Limit(absolute=1e9, better="higher")],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_beyond_every_limit(limit, value):
    assert not limit.allows(1.0, value)


def test_a_limit_is_kept_to_the_edge_on_the_side_that_is_worse():
    assert Limit(absolute=0.5, better="lower").allows(1.0, 1.5) and not Limit(absolute=0.5, better="lower").allows(
        1.0, 1.5000001
    )
    assert Limit(relative=0.5, better="lower").allows(-1.0, -0.5) and not Limit(relative=0.5, better="lower").allows(
        -1.0, -0.4
    )
    assert Limit(absolute=0.25, better="higher").allows(0.75, 0.5)
    assert not Limit(absolute=0.25, better="higher").allows(0.75, 0.49)
    assert Limit(absolute=0.0, better="lower").allows(1.0, -5.0)


@pytest.mark.parametrize("statistic", ["largest", "mean square"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float16, 0.1)], ids=str)
def test_records_are_the_statistics_of_sample_gradients_themselves(statistic, dtype, rtol):
    case, exact = mlp(dtype), mlp()
    batches = [(x.to(dtype), target) for x, target in exact.batches]
    calibration, method = Calibration(case.model, batches), Method(loss=lambda y, t: exact.loss(y.double(), t))
    with calibration.open():
        (found,) = Scores(calibration, method).engine().records(list(calibration.weights), [{}], statistic)
    for name, record in found.items():
        each = [
            torch.autograd.grad(exact.loss_of(exact.model, sample), exact.model.get_parameter(name))[0]
            for sample in split(exact.batches)
        ]
        stacked = torch.stack(each)
        expected = stacked.abs().amax(0) if statistic == "largest" else stacked.square().mean(0)
        assert (record.double() - expected).abs().max() <= rtol * expected.max(), name
