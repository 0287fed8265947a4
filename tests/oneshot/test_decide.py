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
from prunus.oneshot.options import Method
from prunus.oneshot.probe.prober import is_allowed, ratios, smallest_ratios
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
    found = ratios(before, after.to(dtype), zero)  # 2.0 after 1.0 is on the edge of tau = 1
    assert torch.equal(is_allowed(found.q, tau), decided(before, after.to(dtype), tau, zero))
    assert found.num_zero == 1 and found.num_not_finite == len(NASTY) ** 2 - (len(NASTY) - 2) ** 2


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, math.nan]), max_size=12), st.integers(0, 14))
def test_the_smallest_ratios_are_taken_the_first_of_equal_ones_first(values, num):
    q = torch.tensor(values)
    (chosen,) = smallest_ratios([q], num)
    numbers = [i for i, value in enumerate(values) if not math.isnan(value)]
    expected = sorted(sorted(numbers, key=lambda i: (values[i], i))[:num])
    assert chosen.nonzero().squeeze(1).tolist() == expected


@pytest.mark.parametrize(
    ("limit", "dense", "allowed", "refused"),
    [
        (Limit(absolute=0.5, better="lower"), 1.0, [1.5, -5.0], [1.5000001]),
        (Limit(relative=0.5, better="lower"), -1.0, [-0.5], [-0.4]),
        (Limit(absolute=0.25, better="higher"), 0.75, [0.5, 0.95], [0.49]),
        (Limit(relative=0.1, better="higher"), 0.9, [0.8101], [0.8]),
        (Limit(relative=1e9, better="lower"), 1.0, [1.0], []),
        (Limit(absolute=1e9, better="higher"), 1.0, [1.0], []),
    ],
    ids=str,
)
def test_a_limit_is_kept_to_the_edge_on_the_side_that_is_worse(limit, dense, allowed, refused):
    assert all(limit.allows(dense, value) for value in allowed)
    assert not any(limit.allows(dense, value) for value in [*refused, math.nan, math.inf, -math.inf])


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
