"""The learning rate over a run, its fields, and the weights that it prunes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from prunus.lab.recipe import lr_at
from prunus.lab.run import Run
from prunus.lab.trainer import Training


def lrs(**options) -> list[float]:
    run = Run(**options)
    return [lr_at(run, step) for step in range(run.total_steps)]


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 0.0, 0.17, 0.5, 1.0])
@pytest.mark.parametrize("min_lr", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("how", [{}, {"lr_schedule": "cosine"}, {"lr_schedule": "linear"}, {"decay": 0.3}], ids=str)
def test_the_learning_rate_rises_to_the_highest_and_falls_to_the_lowest(steps, warmup, min_lr, how):
    if how.get("decay") and warmup > 0.7:
        warmup = 0
    found = lrs(steps=steps, warmup=warmup, min_lr=min_lr, lr=3e-3, score="none", **how)
    peak = found.index(max(found))
    assert found == sorted(found[: peak + 1]) + sorted(found[peak + 1 :], reverse=True)
    assert max(found) == 3e-3 and min(found) > 0


def test_a_fraction_is_that_many_steps_of_the_whole_budget():
    assert lrs(steps=200, warmup=0.25) == lrs(steps=200, warmup=50)
    assert lrs(steps=200, warmup=0.25, budget_scale=2.0) == lrs(steps=400, warmup=100)


@pytest.mark.parametrize("decay", [None, 0.4, 40])
def test_the_learning_rate_is_constant_until_the_last_40_percent_and_then_falls_in_a_line(decay):
    found = lrs(steps=100, warmup=10, lr=1.0, decay=decay)
    assert found[10:61] == [1.0] * 51
    assert found[61:] == pytest.approx([1 - i / 40 for i in range(1, 40)])


def test_a_longer_warm_up_leaves_the_decay_what_is_left():
    assert lrs(steps=10, warmup=8, lr=1.0) == pytest.approx([*(i / 8 for i in range(1, 9)), 1, 0.5])


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 30])
def test_the_defaults_suit_short_runs(steps):
    assert len(lrs(steps=steps)) == steps and Run(steps=steps).sparsity_schedule().final == 0.5


@pytest.mark.parametrize(
    ("how", "left"), [("linear", lambda done: 1 - done), ("cosine", lambda done: 0.5 * (1 + math.cos(math.pi * done)))]
)
def test_a_line_or_a_cosine_falls_from_the_warm_up_on(how, left):
    expected = [left(i / 10) for i in range(10)]
    assert lrs(steps=12, warmup=2, lr=1.0, lr_schedule=how)[2:] == pytest.approx(expected)


@pytest.mark.parametrize(
    "change", [{}, {"lr_schedule": "cosine", "include": ("a",), "only": ("b",)}, {"validation": Path("x")}]
)
def test_a_run_of_json_has_every_field_and_no_other(change):
    values = Run(**change).to_json()
    assert Run.from_json(values) == Run(**change)
    with pytest.raises(ValueError, match=r"^the run has an unknown field 'speed'$"):
        Run.from_json(values | {"speed": 1})
    for name in values:
        with pytest.raises(ValueError, match=f"^the run lacks the field '{name}'$"):
            Run.from_json({field: value for field, value in values.items() if field != name})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decay": 0}, "wsd needs a decay above 0; pass --decay 0.4"),
        ({"lr_schedule": "wsd", "decay": 0.0}, "wsd needs a decay above 0; pass --decay 0.4"),
        ({"lr_schedule": "cosine", "decay": 0.4}, "pass --lr-schedule wsd"),
        ({"lr_schedule": "wsd", "decay": 1.5}, "decay"),
        ({"lr_schedule": "wsd", "decay": -1}, "decay"),
        ({"lr_schedule": "wsd", "decay": 0.9, "warmup": 0.2}, "must fit into the run's 1000 steps"),
    ],
    ids=str,
)
def test_a_decay_that_cannot_be_meant_is_one_line(options, said):
    with pytest.raises(ValueError, match=said) as error:
        Run(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("optimizer", ["adamw", "adamwprune"])
def test_only_restricts_what_a_run_prunes_and_exclude_wins(optimizer, text):
    choice = {"only": ("*.mlp.*",), "exclude": ("*.0.*",)}
    run = Run(model="gpt2-tiny", context=16, batch=2, data=text, device="cpu", optimizer=optimizer, schedule="constant")
    whole, part = (set(Training(replace(run, **options)).layers()) for options in ({}, choice))
    assert part == {name for name in whole if ".mlp." in name and ".0." not in name} and part < whole
