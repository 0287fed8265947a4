"""Schedules take the values of their formula, never fall, and act at the steps they promise."""

import numpy as np
import pytest

from prunus.schedule import SHAPES, Constant, OneShot, Ramp, progress_text

RAMP = {shape: Ramp(0.5, 100, 3000, shape) for shape in SHAPES}
ALL = [*RAMP.values(), Ramp(0.9, 0, 1), Ramp(0.0, 5, 10), OneShot(0.7, at=40), OneShot(0.7, at=0), Constant(0.3)]


def events(schedule, every, last):
    return [step for step in range(1, last + 1) if schedule.is_event(step, every)]


@pytest.mark.parametrize(
    ("shape", "percent"),
    [("cubic", [1.5, 14.1, 28.3]), ("zhu_gupta", [33.6, 48.0, 49.7]), ("linear", [15.5, 32.8, 41.4])],
)
def test_a_ramp_has_the_published_values_zero_up_to_its_begin_and_final_from_its_end_on(shape, percent):
    ramp = RAMP[shape]
    assert [100 * ramp(step) for step in (1000, 2000, 2500)] == pytest.approx(percent, abs=0.06)
    assert [ramp(step) for step in (0, 1, 99, 100)] == [0.0] * 4
    assert [ramp(step) for step in (3000, 3001, 10**9)] == [0.5] * 3
    assert ramp(101) > 0 and ramp(2999) < 0.5


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_sparsity_never_falls_and_stays_in_its_bounds(schedule):
    values = [schedule(step) for step in range(3200)]
    assert values == sorted(values)
    assert values[0] >= 0 and values[-1] == schedule.final


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("every", [1, 7, 50, 10**6])
def test_the_last_event_is_at_the_end_and_reaches_the_final_sparsity(schedule, every):
    last = events(schedule, every, 3500)[-1]
    assert last == schedule.end and schedule(last) == schedule.final


def test_a_ramp_acts_at_begin_then_every_so_often_and_at_end():
    assert events(Ramp(0.5, 10, 40), 10, 100) == [10, 20, 30, 40]
    assert events(Ramp(0.5, 10, 45), 10, 100) == [10, 20, 30, 40, 45]
    assert events(Ramp(0.5, 10, 12), 50, 100) == [10, 12]
    assert events(Ramp(0.5, 0, 20), 8, 100) == [8, 16, 20]
    assert events(Ramp(0.5, 3, 6), 1, 100) == [3, 4, 5, 6]


@pytest.mark.parametrize("length", [1, 2, 15, 20, 29, 40, 400, 2900, 40_000])
@pytest.mark.parametrize("begin", [0, 7])
def test_by_default_a_ramp_has_about_20_events_however_long_it_is(length, begin):
    ramp = Ramp(0.5, begin, begin + length)
    steps = [step for step in events(ramp, None, begin + length + 9) if ramp(step)]
    assert min(length, 14) <= len(steps) <= min(length, 30)
    assert steps[-1] == ramp.end and steps == [s for s in events(ramp, ramp.period, begin + length) if ramp(s)]
    assert length != 40_000 or len(steps) == 20


@pytest.mark.parametrize(
    ("schedule", "step", "text"),
    [
        (Ramp(0.5, 400, 800), 20, "step 20 of a ramp from 400 to 800: not begun"),
        (Ramp(0.5, 400, 800), 600, "step 600 of a ramp from 400 to 800: 25.00% of 50.00%"),
        (Ramp(0.5, 400, 800), 801, "step 801 of a ramp from 400 to 800: ended, at 50.00%"),
        (OneShot(0.5, at=9), 8, "step 8 of a run that is pruned at step 9: not begun"),
        (Constant(0.5), 0, "step 0 of a run that is pruned at step 1: not begun"),
        (Constant(0.5), 1, "step 1 of a run that is pruned at step 1: ended, at 50.00%"),
    ],
)
def test_progress_is_said_in_words(schedule, step, text):
    assert progress_text(schedule, step) == text


@pytest.mark.parametrize("every", [1, 50])
def test_constant_acts_at_the_first_step_and_one_shot_once(every):
    assert events(Constant(0.5), every, 200) == [1]
    assert events(OneShot(0.5, at=120), every, 200) == [120]
    assert events(OneShot(0.5, at=0), every, 200) == [1]
    assert [OneShot(0.5, at=7)(step) for step in (0, 6, 7, 8)] == [0.0, 0.0, 0.5, 0.5]
    assert [Constant(0.5)(step) for step in (0, 1, 99)] == [0.5] * 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Ramp(1.0, 0, 10), "1.0"),
        (lambda: Ramp(-0.1, 0, 10), "-0.1"),
        (lambda: Ramp(float("nan"), 0, 10), "nan"),
        (lambda: OneShot(1.5, at=3), "1.5"),
        (lambda: Constant(50), "50"),
        (lambda: Ramp(0.5, 10, 10), "begin"),
        (lambda: Ramp(0.5, 11, 10), "begin"),
        (lambda: Ramp(0.5, -1, 10), "-1"),
        (lambda: OneShot(0.5, at=-2), "-2"),
        (lambda: Ramp(0.5, 0, 10, "quartic"), "quartic"),
        (lambda: Ramp(0.5, 0.9, 0.1), "begin"),
        (lambda: Ramp(0.5, 0.1, 1.5), "1.5"),
        (lambda: Ramp(0.5, 0.1, 100.0), "100.0"),
        (lambda: OneShot(0.5, at=-0.5), "-0.5"),
        (lambda: OneShot(0.5, at=float("nan")), "nan"),
        (lambda: Ramp(0.5, 0.1, 0.85)(7), "0.1"),
        (lambda: Ramp(0.5, 0.1, 0.85).is_event(7, 2), "0.85"),
        (lambda: Ramp(0.5, 10, 0.85)(7), "0.85"),
        (lambda: OneShot(0.5, at=0.5)(7), "0.5"),
        (lambda: OneShot(0.5, at=0.5).is_event(7, 2), "0.5"),
        (lambda: Ramp(0.5, 0.1, 0.85).over(None), r"0.1.*schedule.over\(num_steps\)"),
        (lambda: OneShot(0.5, at=0.5).over(None), "0.5"),
        (lambda: Ramp(0.5, 10, 101).over(100), "101.*100"),
        (lambda: Ramp(0.5, 90, 0.5).over(100), "begin"),
        (lambda: Ramp(0.5, 0.1, 0.2).over(2), "begin"),
        (lambda: OneShot(0.5, at=11).over(10), "11"),
    ],
)
def test_what_is_no_schedule_is_one_line_that_says_what_came(make, text):
    """A fraction of a run is no step: taken for one, it would leave the model dense in silence."""
    with pytest.raises(ValueError, match=text) as error:
        make()
    assert "\n" not in str(error.value)


def test_steps_may_be_whole_numbers_of_numpy():
    begin, end = np.array([2, 6])
    assert [Ramp(0.5, begin, end)(step) for step in range(9)] == [Ramp(0.5, 2, 6)(step) for step in range(9)]
    assert OneShot(0.5, at=end).is_event(6, 1) and Ramp(0.5, begin, end).over(None) == Ramp(0.5, 2, 6)
    with pytest.raises(ValueError, match="before it ends"):
        Ramp(0.5, 6, end)


def test_fractions_become_steps_where_the_length_of_the_run_is_known():
    assert Ramp(0.5, 0.1, 0.85, "cubic").over(1000) == Ramp(0.5, 100, 850, "cubic")
    assert Ramp(0.5, 7, 1.0).over(40) == Ramp(0.5, 7, 40)
    assert OneShot(0.5, at=0.25).over(40) == OneShot(0.5, at=10)
    for schedule in (Ramp(0.5, 3, 40), OneShot(0.5, at=40), Constant(0.5)):
        assert schedule.over(40) == schedule == schedule.over(None)
