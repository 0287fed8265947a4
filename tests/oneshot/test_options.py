"""Options that make no sense are refused where they are made, in one clear line."""

import math

import pytest
from probe_models import mlp

from prunus import BlockTuning, Repair, search
from prunus.oneshot import Bisection, Levels, Limit, Probe, TauTuning

LIMIT = Limit(0.1, better="lower")


def tuned_target():
    case = mlp()
    probe = {"probe": Probe("target"), "loss": case.loss}
    search(case.model, case.batches, lambda _: 1.0, LIMIT, tune_tau=TauTuning(), **probe)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Limit(better="lower"), "either relative or absolute"),
        (lambda: Limit(0.1, 0.1, "lower"), "either relative or absolute"),
        (lambda: Limit(math.nan, better="lower"), "either relative or absolute"),
        (lambda: Limit(-0.1, better="lower"), "from 0 on, got -0.1"),
        (lambda: Limit(0.1, better="more"), "'lower' .* or 'higher'"),
        (lambda: Limit(relative=0.1), r"^better must be 'lower' .* or 'higher' \(accuracy\), got None; for example"),
        (lambda: Levels(0.5, 0.1, 0.4), "initial <= final"),
        (lambda: Levels(0.1, 0.0), "step"),
        (lambda: Bisection(1.0), "final"),
        (lambda: TauTuning(0), "one step"),
        (tuned_target, "cannot be tuned"),
        *[(lambda tau=tau: Probe(tau), "at least 0") for tau in (-1, math.nan, {"a": -2.0}, None, [1.0, "2"])],
        (lambda: Probe("best"), "best"),
        (lambda: Probe(order="sideways"), "reverse, forward"),
        (lambda: Probe(schedule="all"), "joint, sequential, block"),
        (lambda: Probe(reduction=1.0), "the factor on candidates"),
        (lambda: Probe(zero_gradient="drop"), "prune, keep"),
        (lambda: Probe(pool=0.7), "target"),
        (lambda: Repair(targets="none"), "targets must be dense or own"),
        (lambda: Repair(damping=-1.0), "damping must be"),
        (lambda: Repair(damping=math.nan), "damping must be"),
        (lambda: Repair(iterations=-1), "iterations must be"),
        (lambda: Repair(refine=1.5), "refine must be"),
        (lambda: Repair(refine=True), "refine must be"),
        (lambda: Repair(tune=8), "True, False or BlockTuning"),
        (lambda: Repair("own", tune=BlockTuning()), "needs targets='dense'"),
        (lambda: BlockTuning(epochs=-1), "whole number"),
        (lambda: BlockTuning(lr=0.0), "finite number above 0"),
        (lambda: BlockTuning(whole_lr=math.inf), "finite number above 0"),
        (lambda: BlockTuning(batch=0), "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(build, said):
    with pytest.raises(ValueError, match=said) as error:
        build()
    assert "\n" not in str(error.value)
