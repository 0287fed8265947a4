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
@pytest.mark.parametrize("how", [{}, {"lr_schedule": "linear"}, {"lr_schedule": "wsd", "decay": 0.4}], ids=str)
def test_rates_rise_to_the_highest_and_fall_to_the_lowest(steps, warmup, min_lr, how):
    if how.get("decay") and warmup > 0.6:
        warmup = 0
    found = rates(steps=steps, warmup=warmup, min_lr=min_lr, lr=3e-3, score="none", **how)
    peak = found.index(max(found))
    assert found == sorted(found[: peak + 1]) + sorted(found[peak + 1 :], reverse=True)
    assert max(found) == 3e-3 and min(found) > 0


def test_a_fraction_is_that_many_steps_of_the_whole_budget():
    assert rates(steps=200, warmup=0.25) == rates(steps=200, warmup=50)
    assert rates(steps=200, warmup=0.25, budget_scale=2.0) == rates(steps=400, warmup=100)


def test_the_rate_of_wsd_is_constant_until_its_decay_and_then_falls_in_a_line():
    found = rates(steps=100, warmup=10, lr=1.0, lr_schedule="wsd", decay=0.4)
    assert found[10:61] == [1.0] * 51
    assert found[61:] == pytest.approx([1 - i / 40 for i in range(1, 40)])
    assert rates(steps=100, warmup=10, lr_schedule="wsd", decay=40) == rates(
        steps=100, warmup=10, lr_schedule="wsd", decay=0.4
    )


def test_a_linear_rate_falls_in_a_line_from_the_warm_up_on():
    assert rates(steps=12, warmup=2, lr=1.0, lr_schedule="linear")[2:] == pytest.approx([1 - i / 10 for i in range(10)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_schedule": "wsd"}, "pass --decay 0.4"),
        ({"decay": 0.4}, "pass --lr-schedule wsd"),
        ({"lr_schedule": "wsd", "decay": 1.5}, "decay"),
        ({"lr_schedule": "wsd", "decay": -1}, "decay"),
        ({"lr_schedule": "wsd", "decay": 0.9, "warmup": 0.2}, "must fit into the run of 1000 steps"),
    ],
    ids=str,
)
def test_a_decay_that_cannot_be_meant_is_one_line(options, said):
    with pytest.raises(ValueError, match=said) as error:
        Run(**options)
    assert "\n" not in str(error.value)
