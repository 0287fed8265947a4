"""The learning rate over a run."""

import pytest

from prunus.lab.recipe import learning_rate
from prunus.lab.run import Run


def rates(**options) -> list[float]:
    run = Run(**options)
    return [learning_rate(run, step) for step in range(run.total_steps)]


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 0.0, 0.17, 0.5, 1.0])
@pytest.mark.parametrize("min_lr", [0.0, 0.1, 1.0])
def test_rates_rise_to_the_highest_and_fall_to_the_lowest(steps, warmup, min_lr):
    found = rates(steps=steps, warmup=warmup, min_lr=min_lr, lr=3e-3, score="none")
    peak = found.index(max(found))
    assert found == sorted(found[: peak + 1]) + sorted(found[peak + 1 :], reverse=True)
    assert max(found) == 3e-3 and min(found) > 0


def test_a_fraction_is_that_many_steps_of_the_whole_budget():
    assert rates(steps=200, warmup=0.25) == rates(steps=200, warmup=50)
    assert rates(steps=200, warmup=0.25, budget_scale=2.0) == rates(steps=400, warmup=100)
