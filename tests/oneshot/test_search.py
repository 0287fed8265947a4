"""A search goes as far as its limit allows, takes back exactly what fails, and goes on where it was killed."""

import math
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
import torch
from probe_checks import assert_same, assert_same_masks, snapshot
from probe_models import mlp

from prunus import Global, PerRow, Repair, prune, search
from prunus.oneshot import Bisection, Levels, Limit, Probe, TauTuning, Trial


def held_out(case):
    """One and how far the outputs are from the dense model's, on samples that are not those of the calibration."""
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        dense = deepcopy(case.model)(x)
    return lambda model: 1 + (model(x) - dense).square().mean().item()


def zeros(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    return sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)


def searched(case, limit, probe=None, evaluate=None, **options):
    options = {"repair": None, "probe": probe, "loss": case.loss} | options
    return search(case.model, case.batches, evaluate or held_out(case), limit, **options)


@pytest.mark.parametrize("probe", [None, Probe(0.5), Probe(0.5, schedule="joint")], ids=str)
def test_levels_climb_until_one_fails_and_the_last_good_one_stays(probe):
    case = mlp()
    limit, evaluate = Limit(relative=0.02, better="lower"), held_out(case)
    found = searched(case, limit, probe)
    assert [trial.target for trial in found.trials] == [round(0.1 * (i + 1), 9) for i in range(len(found.trials))]
    assert [trial.accepted for trial in found.trials] == [True] * (len(found.trials) - 1) + [False]
    assert found.trials[-2].metric == found.metric == evaluate(case.model) <= found.dense * 1.02
    assert not limit.allows(found.dense, found.trials[-1].metric)
    assert found.sparsity == pytest.approx(zeros(case.model)) and found.sparsity > 0
    assert all(torch.equal(case.model.get_parameter(name) != 0, mask) for name, mask in found.masks.items())
    if probe is not None:  # beside it stands the strategy alone, at the same sparsity
        dense = mlp()
        alone = prune(dense.model, dense.batches, found.sparsity, score="magnitude", repair=None)
        assert found.alone_sparsity == alone.sparsity == pytest.approx(found.sparsity)
        assert found.alone == held_out(mlp())(dense.model)


def test_masks_are_cumulative_and_kept_weights_untouched():
    case, dense, seen = mlp(), mlp().model, []

    def evaluate(model):
        seen.append([p.detach().clone() for p in model.parameters()])
        return 1.0

    searched(
        case, Limit(absolute=0.0, better="lower"), Probe(0.3), evaluate, steps=Levels(0.2, 0.2, 0.8), compare=False
    )
    assert len(seen) == 5
    for before, after in pairwise(seen):
        assert all(((b == a) | (a == 0)).all() for b, a in zip(before, after, strict=True))
        assert any((b != a).any() for b, a in zip(before, after, strict=True))
    for original, last in zip(dense.parameters(), case.model.parameters(), strict=True):
        assert torch.equal(original[last != 0], last[last != 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("steps", [Levels(), Bisection(0.8, 0.3)], ids=str)
def test_where_every_level_fails_the_model_comes_back_dense(bad, steps):
    case = mlp()
    case.model.train()
    before = snapshot(case.model)

    def evaluate(model):
        return bad if zeros(model) else 1.0

    found = searched(case, Limit(absolute=100.0, better="lower"), Probe(1e9), evaluate, steps=steps)
    assert_same(before, snapshot(case.model))
    assert found.sparsity == 0.0 and found.metric == found.dense == 1.0 and found.alone is None
    assert all(mask.all() for mask in found.masks.values())
    assert len(found.trials) == (1 if isinstance(steps, Levels) else 3)


BAD = [None, "0.9", (1.0, 2.0), torch.ones(2), {"accuracy": 0.9}]


@pytest.mark.parametrize("bad", [*BAD, math.nan], ids=str)
def test_an_evaluation_that_returns_no_number_is_one_line(bad):
    case = mlp()
    before = snapshot(case.model)
    said = r"^evaluate must return a number, got [^\n]*; end it with return float|^the metric of the dense model is nan"
    with pytest.raises(ValueError, match=said):
        searched(case, Limit(relative=0.1, better="lower"), None, lambda _: bad)
    assert_same(before, snapshot(case.model))
    for good in (1, torch.tensor([1.0]), np.float32(1)):
        searched(case, Limit(absolute=0.0, better="higher"), None, lambda _, good=good: good, steps=Levels(0.5, 1))


def test_the_dense_metric_and_the_worst_allowed_are_said():
    values, limit = iter([0.91, 0.88, 0.5]), Limit(absolute=0.05, better="higher")
    found = searched(mlp(), limit, None, lambda _: next(values), steps=Levels(0.2, 0.2), progress=False)
    assert "metric 0.88, dense 0.91, at least 0.86 allowed" in repr(found) and len(found.trials) == 2
    assert Limit(relative=0.1, better="lower").in_words(-2.0) == "dense -2, at most -1.8 allowed"


@pytest.mark.parametrize("when", [2, 3, 5])
def test_an_exception_of_the_evaluation_gives_the_dense_model_back(when):
    case, calls = mlp(), []
    before = snapshot(case.model)

    def evaluate(model):
        calls.append(1)
        if len(calls) == when:
            raise RuntimeError("disk full")
        return 1.0

    with pytest.raises(RuntimeError, match="disk full"):
        searched(case, Limit(relative=0.1, better="lower"), Probe(0.5), evaluate)
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize("edge", [0.0, 0.137, 0.5, 0.83, 0.95])
def test_bisection_closes_in_on_the_sparsity_that_the_limit_allows(edge):
    options = {"steps": Bisection(0.9, 0.02), "select": PerRow()}
    found = searched(mlp(), NO_WORSE, None, count_limited(edge), **options)
    assert found.sparsity <= edge and found.metric == 0.0
    if 0 < edge < 0.9:
        assert edge - found.sparsity < 0.02 + 0.1  # rows of about ten weights
    if edge > 0.9:
        assert len(found.trials) == 1


def test_levels_and_bisection_follow_from_their_trials():
    def trials(*pairs):
        return [Trial(target, target, 0.0, accepted) for target, accepted in pairs]

    levels = Levels(0.3, 0.3, 0.9)
    assert levels.next([]) == 0.3 and levels.next(trials((0.3, True), (0.6, True))) == 0.9
    assert levels.next(trials((0.3, True), (0.6, False))) is None
    assert levels.next(trials((0.3, True), (0.6, True), (0.9, True))) is None
    halves = Bisection(0.8, 0.15)
    assert halves.next([]) == 0.8 and halves.next(trials((0.8, True))) is None
    assert halves.next(trials((0.8, False))) == 0.4
    assert halves.next(trials((0.8, False), (0.4, True))) == pytest.approx(0.6)
    assert halves.next(trials((0.8, False), (0.4, True), (0.6, False))) == pytest.approx(0.5)
    assert halves.next(trials((0.8, False), (0.4, True), (0.6, False), (0.5, True))) is None


NO_WORSE = Limit(absolute=0.0, better="lower")


def count_limited(num):
    """A metric that allows at most a fraction of zeros, so that a smaller tau is what helps."""
    return lambda model: float(zeros(model) > num)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_tuning_finds_a_smaller_tau_without_a_new_pass_or_takes_the_level_back(schedule):
    plain, tuned, dense = mlp(), mlp(), mlp()
    probe, steps = Probe(5.0, schedule=schedule), Levels(0.3, 0.3, 0.6)
    without = searched(plain, NO_WORSE, probe, count_limited(0.5), steps=steps)
    found = searched(tuned, NO_WORSE, probe, count_limited(0.5), steps=steps, tune_tau=TauTuning(6))
    assert not without.trials[-1].accepted and found.trials[-1].accepted
    assert 0 <= found.trials[-1].scale < 1 and found.trials[-1].evaluations <= 8
    assert found.trials[-1].passes == without.trials[-1].passes
    assert without.sparsity < found.sparsity <= 0.5 and found.sparsity == pytest.approx(zeros(tuned.model))
    none = searched(dense, NO_WORSE, probe, count_limited(0.0), tune_tau=TauTuning(3))
    assert none.sparsity == 0
    assert_same(snapshot(mlp().model), snapshot(dense.model))


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [0.3, None])
def test_tuning_both_steps_probes_the_level_before_again_or_puts_it_back(allowed):
    """Zeros in the first layer are what is limited, which the level before may have used up."""
    case, seen = mlp(), []

    def evaluate(model):
        seen.append([p.detach().clone() for p in model.parameters()])
        return float(len(seen) > 2 and (allowed is None or zeros(model[0]) > allowed))

    options = {"steps": Levels(0.35, 0.3, 0.65), "tune_tau": TauTuning(4, True), "compare": False}
    found = searched(case, NO_WORSE, Probe(5.0), evaluate, **options)
    assert found.trials[-1].passes >= 2 * 2 * 3 * 8
    assert found.trials[-1].accepted == (allowed is not None)
    if found.trials[-1].accepted:
        assert found.trials[-1].scale < 1 and zeros(case.model[0]) <= allowed
        assert any(((a == 0) & (b != 0)).any() for a, b in zip(seen[1], case.model.parameters(), strict=True))
    else:
        assert all(torch.equal(a, b) for a, b in zip(seen[1], case.model.parameters(), strict=True))
    assert found.sparsity == pytest.approx(zeros(case.model))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Limit(better="lower"), "either relative or absolute"),
        (lambda: Limit(0.1, 0.1, "lower"), "either relative or absolute"),
        (lambda: Limit(math.nan, better="lower"), "either relative or absolute"),
        (lambda: Limit(-0.1, better="lower"), "0 or more"),
        (lambda: Limit(0.1, better="more"), "'lower' .* or 'higher'"),
        (lambda: Limit(relative=0.1), r"^better must be 'lower' .* or 'higher' \(accuracy\), got None; give it[^\n]*$"),
        (lambda: Levels(0.5, 0.1, 0.4), "initial <= final"),
        (lambda: Levels(0.1, 0.0), "step"),
        (lambda: Bisection(1.0), "final"),
        (lambda: TauTuning(0), "one step"),
        (lambda: searched(mlp(), Limit(0.1, better="lower"), Probe("target"), tune_tau=TauTuning()), "cannot be tuned"),
    ],
)
def test_what_makes_no_sense_is_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_every_level_reads_the_inputs_of_the_model_as_it_is_then():
    case, again, stale = mlp(), mlp(), mlp()
    options = {"score": "wanda", "select": Global(), "repair": None}
    found = searched(case, NO_WORSE, None, lambda _: 1.0, steps=Levels(0.5, 0.2, 0.7), **options)
    prune(again.model, again.batches, 0.5, **options)
    second = prune(again.model, again.batches, 0.7, **options)
    assert_same_masks(second, found)
    at_once = prune(stale.model, stale.batches, 0.7, **options).masks
    assert any(not torch.equal(at_once[name], mask) for name, mask in second.masks.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"score": "wanda"}, {}, {"probe": Probe(0.5)}], ids=str)
def test_levels_are_repaired_from_the_dense_weights_and_a_failed_one_leaves_the_last_good_one(options, tmp_path):
    x, y = torch.randn(80, 9, dtype=torch.float64), torch.randint(0, 4, (80,))
    evaluate, limit = held_out(mlp()), Limit(relative=0.004, better="lower")

    def repaired(**more):
        case = mlp()
        case.batches = [(x, y)]
        return case.model, searched(case, limit, evaluate=evaluate, **{"repair": Repair()} | options | more)

    (model, found), (_, plain) = repaired(), repaired(repair=None)
    assert [trial.accepted for trial in found.trials] == [True] * (len(found.trials) - 1) + [False]
    assert len(found.trials) > 1 and evaluate(model) == found.metric == found.trials[-2].metric
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in found.masks.items())
    assert found.trials[1].metric < plain.trials[1].metric
    for _ in range(2):
        other, resumed = repaired(state=tmp_path / "state")
        assert resumed.metric == found.metric and [t.metric for t in resumed.trials] == [t.metric for t in found.trials]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_by_default_levels_are_repaired_where_there_is_no_probe():
    options = {"steps": Levels(0.5, 0.1, 0.5), "compare": False}
    models = []
    for repair in ({"repair": "auto"}, {"repair": Repair()}, {"repair": None}):
        case = mlp()
        searched(case, NO_WORSE, None, lambda _: 1.0, **options | repair)
        models.append([*case.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*models[:2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*models[1:], strict=True))
