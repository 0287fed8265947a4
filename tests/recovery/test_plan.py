"""The rate climbs, falls to zero and is the best of three trials; held-out batches are never learned from."""

from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from prunus.recovery.plan import FACTORS, LR, Plan
from prunus.recovery.step_batches import Batches, Steps


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 299, 300, 1000, 5000])
@pytest.mark.parametrize("lr", [None, 0.5])
def test_every_phase_climbs_to_its_rate_and_falls_towards_zero(steps, lr):
    plan = Plan(steps, lr, results=[3.0, 1.0, 2.0])
    rates = [plan.lr_at(step) for step in range(steps)]
    starts = [0, *plan.trial_ends, steps]
    peaks = [LR * factor for factor in FACTORS] if plan.trial_steps else []
    for (first, last), peak in zip(pairwise(starts), [*peaks, plan.chosen], strict=True):
        own = rates[first:last]
        assert max(own) == pytest.approx(peak) and min(own) > 0
        top = own.index(max(own))
        assert own[: top + 1] == sorted(own[: top + 1]) and own[top:] == sorted(own[top:], reverse=True)
    assert (steps >= 300 and lr is None) == bool(plan.trial_steps)


def test_trials_are_two_percent_of_the_run_and_the_best_wins():
    assert Plan(300).trial_ends == [20, 40, 60] and Plan(5000).trial_ends == [100, 200, 300]
    assert Plan(300, results=[3.0, 2.0, 1.0]).chosen == 4 * LR
    assert Plan(300, results=[1.0, 2.0, float("nan")]).chosen == LR
    assert Plan(300, results=[float("nan"), 2.0, 3.0]).chosen == 2 * LR
    assert Plan(299).chosen == LR and Plan(299, 0.1).chosen == 0.1 and "too few" in Plan(299).reason


def test_lower_rates_follow_while_all_trials_do_harm():
    results = [6.5, 6.4, 6.7]  # from 0.3: what a model of 1.5 billion weights did
    assert Plan(640, results=results, before=3.3).num_trial_steps == 60
    assert Plan(640, results=results[:2], before=0.3).trial_ends == [20, 40, 60]
    assert Plan(640, results=results, before=0.3).rates[3:] == [LR / 8]
    plan = Plan(640, results=[*results, 0.7, 0.59], before=0.3)
    assert plan.rates == [LR / 2, LR, 2 * LR, LR / 8, LR / 32] and plan.chosen == LR / 16
    assert "5 trials" in plan.reason and "3.125e-05: 0.59" in plan.reason
    assert plan.trial_ends == [20, 40, 60, 80, 100] and plan.spread(3)[0] > 100 and plan.spread(3)[-1] == 640
    assert sum(plan.lr_at(step) > 0 for step in range(640)) == 640
    hopeless = Plan(300, results=[float("nan")] * 3 + [9.0] * 9, before=0.0)
    assert len(hopeless.rates) == 7 and hopeless.chosen == LR / 4  # the first of the equal ones that are numbers


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_are_those_of_trials_that_are_decided_on_the_way(ahead):
    """Loaders read a batch ahead, before they can know that another trial follows."""
    plan, read, steps = Plan(300, before=0.1), [], 0
    for batch in Steps(Batches(iter(torch.arange(400).split(1)), 4, seed=0), plan, 1, 0, 1):
        read.append(int(batch))
        steps = len(read) - ahead
        if steps in plan.trial_ends and len(plan.results) < len(plan.trial_ends):
            plan.results.append(0.15 if len(plan.results) == 4 else 1.0)
    trial = list(range(4, 24))
    assert read == [*trial * 5, *range(4, 204)] and plan.chosen == LR / 16


def numbers(batches, first, num):
    reading = batches.starting_at(first)
    return [int(next(reading).flatten()[0]) for _ in range(num)]


SOURCES = {
    "list": lambda data: list(data.split(1)),
    "loader": lambda data: DataLoader(TensorDataset(data), batch_size=1),
    "shuffled": lambda data: DataLoader(TensorDataset(data), batch_size=1, shuffle=True),
    "own generator": lambda data: DataLoader(
        TensorDataset(data), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_the_same_from_any_number_and_never_held_out(source):
    batches = Batches(SOURCES[source](torch.arange(11)), 3, seed=0)
    held_out = {int(batch) for batch in batches.held_out}
    whole = numbers(batches, 0, 40)
    assert len(held_out) == 3 - (source == "list") and not held_out & set(whole)
    assert len(set(whole)) == 11 - len(held_out)
    for first in (1, 7, 8, 9, 16, 25):
        assert numbers(batches, first, 10) == whole[first : first + 10]


def test_reading_does_not_move_the_random_numbers_of_the_run():
    batches, state = Batches(SOURCES["shuffled"](torch.arange(11)), 3, seed=0), torch.get_rng_state()
    numbers(batches, 20, 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_whose_order_changes_is_refused():
    class Restless:
        def __iter__(self):
            self.offset = getattr(self, "offset", 0) + 1
            return iter([torch.tensor([[self.offset + i]]) for i in range(9)])

    with pytest.raises(ValueError, match="change their order"):
        numbers(Batches(Restless(), 2, seed=0), 0, 20)


def test_a_generator_is_read_once_and_gives_trials_and_run_the_same_batches():
    batches = Batches(iter(torch.arange(400).split(1)), 4, seed=0)
    plan = Plan(300, results=[1.0, 2.0, 3.0])
    read = [int(batch) for batch in Steps(batches, plan, 1, 0, 1)]
    trial = list(range(4, 24))
    assert read == [*trial, *trial, *trial, *range(4, 244)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_share_the_batches_of_every_step(accumulate):
    plan, data = Plan(6, 0.1), list(torch.arange(60).split(1))
    alone = [int(batch) for batch in Steps(Batches(data, 1, 0), plan, 2 * accumulate, 0, 1)]
    ranks = [[int(b) for b in Steps(Batches(data, 1, 0), plan, accumulate, rank, 2)] for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == sorted(alone) and not set(ranks[0]) & set(ranks[1])
    later = Steps(Batches(data, 1, 0), plan, accumulate, 1, 2)
    later.first_step = 4
    assert [int(batch) for batch in later] == ranks[1][4 * accumulate :]
