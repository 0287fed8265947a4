"""Steps are measured without events, and events are measured that have something to do."""

import time
from functools import partial

import pytest
from covering import quickly
from profile_runs import small

from prunus import Pruner
from prunus.lab.profile.measure import Window, _to_the_middle, measure
from prunus.lab.profile.memory_use import measured_memory
from prunus.lab.profile.step_parts import NUM_EVENTS, due_events, events_twice, instrument, plain_step
from prunus.lab.trainer import Training

every_step = partial(small, every=1)

pytestmark = pytest.mark.usefixtures("few_weights")
RUNS = {
    "hooks": {},
    "adamwprune": {"optimizer": "adamwprune", "score": "movement"},
    "regrow": {"regrow": 0.2},
    "wanda": {"score": "wanda"},
    "constant": {"schedule": "constant"},
    "one shot": {"schedule": "one_shot"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("every", [1, 74])
def test_a_plain_step_has_no_event_and_keeps_the_masks(name, every, text):
    """Of a ramp from 10 to 85, 74 steps apart, two events follow one another."""
    training = Training(every_step(text, **RUNS[name], every=every))
    training.train_step()
    pruner = training.pruner
    _to_the_middle(training, 0)
    before, num_events = pruner.digest(), len(training.events)
    for _ in range(3):
        plain_step(training)
    assert pruner.digest() == before and len(training.events) == num_events


@pytest.mark.parametrize("options", [{}, {"regrow": 0.2}, {"schedule": "constant"}], ids=str)
def test_every_event_that_is_measured_has_weights_to_prune(options, text):
    training = Training(every_step(text, begin=1, end=100, **options))
    instrument(training)
    training.train_step()
    due = _to_the_middle(training, 0)
    training.events.clear()
    seconds, split = events_twice(training, due)
    assert seconds > 0 and split.seconds > 0
    assert len(training.events) == 2 * (NUM_EVENTS if len(due) > 1 else 1)
    assert all(event.newly_pruned > 0 for event in training.events)
    first, again = training.events[0::2], training.events[1::2]
    assert [event.newly_pruned for event in first] == [event.newly_pruned for event in again]


def test_steps_before_the_measurement_do_not_pass_the_events_that_are_measured(text):
    training = Training(every_step(text, begin=1, end=20))
    training.train_step()
    due = _to_the_middle(training, 30)
    assert training.events[-1].step == due[0] and training.events[-1].newly_pruned > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(RUNS, "adamwprune"))
def test_with_an_event_at_every_step_its_time_is_not_in_the_step(name, text, monkeypatch):
    pause, update = 0.1, Pruner.update

    def slow(pruner):
        time.sleep(pause)
        update(pruner)

    monkeypatch.setattr(Pruner, "update", slow)
    profile = measure(every_step(text, **RUNS[name]), Window(1, 3))
    assert profile.seconds < pause < profile.event_seconds
    assert "event" not in profile.step.host and set(profile.event.host) == {"event"}
    if not profile.has_one_event:
        assert profile.event_share == profile.event_seconds / (profile.seconds + profile.event_seconds) > 0.5


def test_events_that_wait_for_moments_are_left_out(text):
    training = Training(every_step(text, optimizer="adamwprune", spam=True))
    training.train_step()
    for group in training.optimizer.param_groups:
        group["num_steps"] = 505
    instrument(training)
    assert events_twice(training, due_events(training)) == (None, None)
    assert measured_memory(training, lambda: None).event is None
