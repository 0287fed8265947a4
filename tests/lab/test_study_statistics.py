"""Means, intervals and verdicts are those of a textbook."""

import math
from dataclasses import replace

import pytest

from prunus.lab.study.intervals import ACCURACY, PERPLEXITY, deviation, paired, t_quantile, verdict

# two-sided 95 % points of Student's t, from printed tables
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423, 120: 1.9799}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_the_printed_ones(freedom):
    assert t_quantile(freedom) == pytest.approx(TABLE[freedom], abs=5e-5)


def test_the_deviation_by_hand():
    assert deviation([2.0, 4.0, 9.0]) == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert deviation([3.0]) is None


def test_the_paired_difference_by_hand():
    ours, theirs = {0: 70.0, 1: 72.5, 2: 71.0, 7: 0.0}, {0: 72.0, 1: 74.0, 2: 73.6, 5: 9.0}
    found = paired(ours, theirs)  # -2.0, -1.5, -2.6: mean -2.0333, sd 0.55076, half-width 4.3027 * 0.55076 / sqrt(3)
    assert found.num_seeds == 3
    assert found.mean == pytest.approx(-6.1 / 3)
    assert found.half_width == pytest.approx(4.30265 * 0.550757 / math.sqrt(3), rel=1e-5)


def test_pairing_takes_out_what_the_seeds_share():
    ours, theirs = {0: 101.0, 1: 51.0, 2: 11.0}, {0: 100.0, 1: 50.0, 2: 10.0}
    assert (paired(ours, theirs).mean, paired(ours, theirs).half_width) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("ours", "metric", "said"),
    [
        ({0: 70.2, 1: 71.0, 2: 69.7}, PERPLEXITY, "no difference seen with 3 seeds: +0.30 ± 1.63"),
        ({0: 65.0, 1: 65.1, 2: 64.9}, PERPLEXITY, "better by 5.00 ± 0.25 (3 seeds)"),
        ({0: 75.0, 1: 75.1, 2: 74.9}, PERPLEXITY, "worse by 5.00 ± 0.25 (3 seeds)"),
        ({0: 75.0, 1: 75.1, 2: 74.9}, ACCURACY, "better by 5.00 ± 0.25 points (3 seeds)"),
        ({1: 70.5}, PERPLEXITY, "one seed: no interval (+0.50)"),
        ({0: 70.0, 1: 70.0}, PERPLEXITY, "no difference seen with 2 seeds: +0.00 ± 0.00"),
        (
            {0: 70.1 + 0.2, 1: 70.3},
            ACCURACY,
            "the same difference with all 2 seeds (+0.30 points): no spread to judge by",
        ),
        ({9: 1.0}, PERPLEXITY, "no seed in common yet"),
        ({0: 70.004, 1: 70.0042}, replace(PERPLEXITY, decimals=3), "worse by 0.004 ± 0.001 (2 seeds)"),
        ({0: 1e142, 1: 1e182}, PERPLEXITY, "no difference seen with 2 seeds: +5e+181 ± 6.35e+182"),
    ],
    ids=["none", "better", "worse", "accuracy", "one", "equal", "no spread", "no pair", "small", "ruined"],
)
def test_the_verdict_says_what_the_seeds_allow(ours, metric, said):
    assert verdict(paired(ours, {0: 70.0, 1: 70.0, 2: 70.0}), metric) == said


def test_accuracy_is_shown_in_per_cent():
    assert ACCURACY.of({"accuracy": 0.985}) == pytest.approx(98.5)
