"""A run that was saved, and continued elsewhere, is the unbroken run to the bit."""

import copy
import functools
import itertools

import pytest
import torch
from covering import covering, each_once
from toys import NAMES, adamw, adamw_prune, assert_pruned_are_zero, net, through_a_file, train

from prunus import Constant, Global, NofM, OneShot, PerLayer, PerRow, Pruner, Ramp, Regrow, Spam

LAST = 18
RUNS = {
    "adamw": (adamw, "bitter7"),
    "fused": (lambda m: adamw(m, fused=True), "bitter8"),
    "amsgrad": (lambda m: adamw(m, amsgrad=True), "magnitude"),
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), 0.05), "magnitude"),
    "sgd momentum": (lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), "random"),
    "movement": (adamw, "movement"),
    "wanda": (adamw, "wanda"),
    "adamw prune": (lambda m: adamw_prune(m, max_norm=0.5), "bitter7"),
    "adamw prune movement": (adamw_prune, "movement"),
    "spam": (lambda m: adamw_prune(m, spam=Spam(theta=20.0, every=5, warmup=3, hold=2)), "bitter7"),
}


class Run:
    """A model, its optimizer and its pruner, and everything a checkpoint holds of them."""

    def __init__(self, name, seed=0, dtype=torch.float32, pruner=True):
        make, score = RUNS[name]
        self.model = net(seed, dtype)
        self.optimizer = make(self.model)
        schedule = Ramp(0.7, 2, 14)
        self.pruner = Pruner(self.model, self.optimizer, score=score, schedule=schedule, every=4) if pruner else None

    def train(self, steps):
        train(self.model, self.optimizer, steps)
        return self

    def save(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "pruner": self.pruner}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, saved, order=("model", "optimizer", "pruner")):
        saved = through_a_file(saved)
        for part in order:
            getattr(self, part).load_state_dict(saved[part])
        return self


@functools.cache
def unbroken(name, dtype=torch.float32):
    """The states at the end of a run that was never saved, and its digest."""
    run = Run(name, dtype=dtype).train(range(LAST))
    return run.save(), run.pruner.digest()


@functools.cache
def saved_run(name, dtype=torch.float32):
    """The states of one run at every step."""
    run, states = Run(name, dtype=dtype), []
    for step in range(LAST):
        states.append(run.save())
        run.train([step])
    return states


def assert_unbroken(run, name, dtype=torch.float32):
    """Weights, masks, optimizer state and digest are those of the unbroken run, to the bit."""
    states, digest = unbroken(name, dtype)
    assert run.pruner.digest() == digest
    assert_equal(run.save(), states)


def assert_equal(first, second):
    if isinstance(first, dict):
        assert set(first) == set(second)
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second)
    else:
        assert first == second


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(("name", "stop"), each_once(RUNS, [7, 0, 12, 1, 16, 3, 10, 6, 14, 2]))
def test_a_run_resumed_at_any_step_ends_as_the_unbroken_one(name, stop):
    assert_unbroken(Run(name, seed=9).load(saved_run(name)[stop]).train(range(stop, LAST)), name)


@pytest.mark.parametrize(("name", "stop"), each_once(RUNS, [7, 1, 0, 12]))
def test_a_run_rewound_in_place_ends_as_the_unbroken_one(name, stop):
    run = Run(name).train(range(stop))
    saved = run.save()
    run.train(range(100, 115 - stop))  # past its ramp
    assert_unbroken(run.load(saved).train(range(stop, LAST)), name)


@pytest.mark.parametrize("order", [*itertools.permutations(["model", "optimizer", "pruner"])], ids="-".join)
@pytest.mark.parametrize("name", ["adamw", "spam", *slow("sgd", "movement", "adamw prune")])
def test_the_order_of_loading_does_not_matter(name, order):
    assert_unbroken(Run(name, seed=9).load(saved_run(name)[9], order).train(range(9, LAST)), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "spam", "movement"])
def test_a_run_saved_and_resumed_at_every_step_ends_as_the_unbroken_one(name):
    run = Run(name)
    for step in range(LAST):
        run = Run(name, seed=step).load(run.save()).train([step])
    assert_unbroken(run, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "fused", "sgd", "sgd momentum", "adamw prune"])
def test_masks_come_along_with_the_optimizers_state_alone(name, dtype):
    first = Run(name, dtype=dtype).train(range(12))
    saved = first.save()
    second = Run(name, seed=9, dtype=dtype).load(saved, ["model", "optimizer"])
    assert second.pruner.digest() == first.pruner.digest()
    second.train(range(12, 14))
    assert_pruned_are_zero(second.pruner)

    later = Run(name, seed=9, dtype=dtype, pruner=False).load(saved, ["model", "optimizer"])
    pruner = Pruner(later.model, later.optimizer, score="magnitude", schedule=Constant(0.1))
    assert pruner.digest() == first.pruner.digest()
    later.train(range(12, 14))
    assert_pruned_are_zero(pruner)


def test_bfloat16_runs_resume_to_the_bit():
    saved = Run("adamw", dtype=torch.bfloat16).train(range(9)).save()
    resumed = Run("adamw", seed=9, dtype=torch.bfloat16).load(saved).train(range(9, LAST))
    assert_unbroken(resumed, "adamw", torch.bfloat16)


@pytest.mark.parametrize("name", ["adamw", "movement", "adamw prune"])
def test_a_state_is_a_copy_of_plain_tensors_and_numbers(name):
    run = Run(name).train(range(8))
    state, before = run.pruner.state_dict(), copy.deepcopy(run.pruner.state_dict())
    run.train(range(8, 16))
    assert_equal(state, before)
    assert all(packed.dtype == torch.uint8 for packed in state["masks"].values())


def changed(state, **parts):
    return copy.deepcopy(state) | parts


def with_mask(state, name, value):
    return changed(state, masks=state["masks"] | {name: value})


WRONG = {
    "nothing": lambda s: {},
    "a model's state": lambda s: net().state_dict(),
    "no step": lambda s: {key: value for key, value in s.items() if key != "step"},
    "a mask of no weight": lambda s: with_mask(s, "typo.weight", torch.zeros(4, dtype=torch.uint8)),
    "a mask of another size": lambda s: with_mask(s, "out.weight", torch.zeros(3, dtype=torch.uint8)),
    "a mask that is none": lambda s: with_mask(s, "out.weight", None),
    "a movement of another shape": lambda s: changed(s, movement=s["movement"] | {"out.weight": torch.zeros(3, 3)}),
    "a movement that is missing": lambda s: changed(s, movement={"out.weight": torch.zeros(4, 13)}),
    "a step that is none": lambda s: changed(s, step="seven"),
    "masks that are none": lambda s: changed(s, masks=None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_state_is_refused_in_one_line_and_changes_nothing(wrong):
    run = Run("movement").load(saved_run("movement")[8])
    before = run.save()
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        run.pruner.load_state_dict(WRONG[wrong](saved_run("movement")[11]["pruner"]))
    assert_equal(run.save(), before)


@pytest.mark.parametrize(("saved", "loaded"), [("movement", "adamw"), ("adamw", "movement")])
def test_a_state_of_another_score_is_refused_where_sums_are_missing(saved, loaded):
    state, run = Run(saved).train(range(8)).pruner.state_dict(), Run(loaded)
    with pytest.raises(ValueError, match="movement"):
        run.pruner.load_state_dict(state)
    assert run.pruner.step == 0 and all(mask.all() for mask in run.pruner.masks.values())


def test_an_optimizer_state_with_masks_of_another_model_is_refused():
    run = Run("adamw")
    saved = Run("adamw").train(range(8)).save()["optimizer"]
    saved["state"][0]["mask"] = torch.zeros(99)
    with pytest.raises(ValueError, match=r"conv\.weight"):
        run.optimizer.load_state_dict(saved)


def test_loading_zeroes_what_its_masks_prune():
    state = Run("adamw").train(range(12)).pruner.state_dict()
    run = Run("adamw", seed=9).train(range(3))
    run.pruner.load_state_dict(state)
    assert_pruned_are_zero(run.pruner)
    assert list(run.pruner.masks) == NAMES


SELECTORS = [Global(), PerLayer(), PerLayer("erk"), PerLayer("depth"), PerRow()]


def resumed(saved, **options):
    model = net(9)
    events = []
    options = {"score": "bitter7", "every": 4, "on_event": events.append} | options
    pruner = Pruner(model, adamw(model), **options)
    for part, state in zip((model, pruner.optimizer, pruner), saved, strict=True):
        part.load_state_dict(through_a_file(state))
    return pruner, events


@functools.cache
def finished(**options):
    """States of a run whose schedule is over."""
    model = net()
    pruner = Pruner(model, adamw(model), **{"schedule": Ramp(0.5, 2, 14), "every": 4} | options)
    train(model, pruner.optimizer, range(18))
    return [part.state_dict() for part in (model, pruner.optimizer, pruner)]


@pytest.mark.parametrize(
    ("select", "schedule"),
    each_once(SELECTORS, [Ramp(0.8, 2, 14), Ramp(0.8, 2, 18), OneShot(0.8, 3), Constant(0.8)]),
    ids=str,
)
def test_more_asked_for_after_the_schedules_end_is_pruned_at_the_next_step(select, schedule):
    pruner, events = resumed(finished(select=select), select=select, schedule=schedule)
    fresh = Pruner(twin := net(), adamw(twin), select=select, schedule=Constant(0.8))
    train(twin, fresh.optimizer, [0])
    train(pruner.model, pruner.optimizer, range(18, 21))
    assert [event.step for event in events] == [19]
    assert pruner.sparsity == fresh.sparsity and abs(pruner.sparsity - 0.8) < 0.05
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize(
    ("options", "final", "sparse"),
    covering([{"select": select} for select in SELECTORS] + [{"regrow": Regrow(0.2)}], [0.5, 0.3], [0.5, 0.47, 0.513]),
    ids=str,
)
def test_no_more_asked_for_makes_no_event(options, final, sparse):
    saved = finished(**options, schedule=Ramp(sparse, 2, 14))
    schedule = Ramp(sparse if final == 0.5 else final, 2, 14)
    pruner, events = resumed(saved, **options, schedule=schedule)
    assert not pruner.state_dict()["due"]
    digest = pruner.digest()
    train(pruner.model, pruner.optimizer, range(18, 20))
    assert not events and pruner.digest() == digest


def test_more_asked_for_waits_for_an_event_that_is_to_come():
    pruner, events = resumed(finished(), schedule=Ramp(0.8, 2, 30))
    train(pruner.model, pruner.optimizer, range(18, 32))
    assert [event.step for event in events] == [22, 26, 30] and pruner.sparsity == round(0.8 * 1054) / 1054


@pytest.mark.parametrize("options", [{"score": "wanda"}, {"regrow": Regrow(0.2)}], ids=str)
def test_more_asked_for_goes_with_inputs_and_regrowth(options):
    pruner, events = resumed(finished(), schedule=Ramp(0.8, 2, 14), **options)
    train(pruner.model, pruner.optimizer, range(18, 24))
    assert [event.step for event in events] == [19] and pruner.sparsity == round(0.8 * 1054) / 1054
    assert_pruned_are_zero(pruner)


def test_two_of_four_are_what_is_asked_for_where_they_are_held():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    saved = {}
    for schedule in (OneShot(0.5, at=1), Constant(0.5)):
        pruner = Pruner(model, adamw(model), select=NofM(2, 4), schedule=schedule, score="magnitude")
        if saved:
            pruner.load_state_dict(saved)
            assert not pruner.state_dict()["due"]
        model(torch.ones(1, 8)).sum().backward()
        pruner.optimizer.step()
        saved = pruner.state_dict()
        pruner.remove()


@pytest.mark.parametrize("select", [PerLayer(), PerRow(), NofM(2, 4)], ids=str)
def test_another_selector_at_the_same_sparsity_gets_what_it_asks_for(select):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 3))
    saved, events = {}, []
    for chosen in (Global(), select, select):
        options = {"score": "magnitude", "exclude": "1", "on_event": events.append}
        pruner = Pruner(model, adamw(model), select=chosen, schedule=Constant(0.5), **options)
        if saved:
            pruner.load_state_dict(saved)
        model(torch.ones(1, 8)).sum().backward()
        pruner.optimizer.step()
        saved = pruner.state_dict()
        pruner.remove()
    assert [event.step for event in events] == [1, 2]
    groups = {PerLayer(): 1, PerRow(): 8, NofM(2, 4): 4}
    for mask in pruner.masks.values():
        pruned = ~mask.reshape(-1, groups[select] if groups[select] > 1 else mask.numel())
        assert (pruned.sum(1) >= pruned.shape[1] // 2).all()
