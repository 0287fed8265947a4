"""A run that was saved, and continued elsewhere, is the unbroken run to the bit."""

import copy
import functools
import itertools

import pytest
import torch
from covering import covering, each_once, quickly
from torch.utils import _pytree as pytree
from toys import NAMES, adamw, adamw_prune, assert_pruned_are_zero, net, sgd, through_a_file, train

from prunus import (
    Constant,
    Global,
    NofM,
    OneShot,
    PerLayer,
    PerRow,
    Pruner,
    Ramp,
    Rate,
    Regrow,
    Spam,
    parameter_groups,
)  # fmt: skip

LAST = 18
STOPS = [7, 0, 12, 1, 16, 3, 10, 6, 14, 2]


def spam(model):
    return adamw_prune(model, spam=Spam(theta=20.0, every=5, warmup=3, hold=2))


def split(model):
    return torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=0.01)


RUNS = {  # optimizer, options
    "adamw": (adamw, {"score": "bitter7"}),
    "fused": (lambda m: adamw(m, fused=True), {"score": "bitter8"}),
    "amsgrad": (lambda m: adamw(m, amsgrad=True), {"score": "magnitude"}),
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), 0.05), {"score": "magnitude"}),
    "sgd momentum": (sgd, {"score": "random"}),
    "movement": (adamw, {"score": "movement"}),
    "wanda": (adamw, {"score": "wanda"}),
    "adamw prune": (lambda m: adamw_prune(m, max_norm=0.5), {"score": "bitter7"}),
    "adamw prune movement": (adamw_prune, {"score": "movement"}),
    "spam": (spam, {"score": "bitter7"}),
    "regrow": (adamw, {"score": "magnitude", "regrow": Regrow(0.3)}),
    "regrow prune": (adamw_prune, {"score": "magnitude", "regrow": Regrow(0.3)}),
    "regrow sgd": (sgd, {"score": "magnitude", "regrow": Regrow(0.3, "momentum")}),
    "regrow spam": (spam, {"score": "magnitude", "regrow": Regrow(0.3)}),
    "rates": (lambda m: adamw(m, lr=torch.tensor(0.01)), {"score": "magnitude", "rate": Rate()}),
    "rates prune": (adamw_prune, {"score": "magnitude", "rate": Rate()}),
    "rates split": (split, {"score": "magnitude", "rate": Rate()}),
    "rates sgd": (sgd, {"score": "magnitude", "rate": Rate()}),
}


class Run:
    """A model, its optimizer and its pruner, and everything a checkpoint holds of them."""

    def __init__(self, name, seed=0, dtype=torch.float32, pruner=True):
        make, options = RUNS[name]
        self.model = net(seed, dtype)
        self.optimizer = make(self.model)
        options = {"schedule": Ramp(0.7, 2, 14), "every": 4} | options
        self.pruner = Pruner(self.model, self.optimizer, **options) if pruner else None

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
    """To the bit; states are trees of dicts and lists."""
    leaves, others = (dict(pytree.tree_flatten_with_path(state)[0]) for state in (first, second))
    assert leaves.keys() == others.keys()
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            assert leaf.dtype == others[path].dtype and torch.equal(leaf, others[path]), path
        else:
            assert leaf == others[path], path


@pytest.mark.parametrize(("name", "stop"), each_once(RUNS, STOPS, one_of=2))
def test_a_run_resumed_at_any_step_or_rewound_in_place_ends_as_the_unbroken_one(name, stop):
    saved = saved_run(name)[stop]
    assert_unbroken(Run(name, seed=9).load(saved).train(range(stop, LAST)), name)
    rewound = Run(name).train(range(100, 117))  # past its ramp
    assert_unbroken(rewound.load(saved).train(range(stop, LAST)), name)


@pytest.mark.parametrize("order", [*itertools.permutations(["model", "optimizer", "pruner"])], ids="-".join)
@pytest.mark.parametrize("name", quickly(["adamw", "spam", "sgd", "movement", "adamw prune"], "adamw", "spam"))
def test_the_order_of_loading_does_not_matter(name, order):
    assert_unbroken(Run(name, seed=9).load(saved_run(name)[9], order).train(range(9, LAST)), name)


@pytest.mark.parametrize(("name", "dtype"), [("adamw", torch.bfloat16), ("spam", torch.float32)], ids=str)
def test_a_run_saved_and_resumed_at_every_step_ends_as_the_unbroken_one(name, dtype):
    run = Run(name, dtype=dtype)
    for step in range(LAST):
        run = Run(name, seed=step, dtype=dtype).load(run.save()).train([step])
    assert_unbroken(run, name, dtype)


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


@pytest.mark.parametrize("name", ["adamw", "movement", "adamw prune"])
def test_a_state_is_a_copy_of_plain_tensors_and_numbers(name):
    run = Run(name).train(range(8))
    state, before = run.pruner.state_dict(), copy.deepcopy(run.pruner.state_dict())
    run.train(range(8, 16))
    assert_equal(state, before)
    assert all(packed.dtype == torch.uint8 for packed in state["masks"].values())


WRONG = {  # what stands in a state in the place of its own
    "a mask of no weight": ("masks", {"typo.weight": torch.zeros(4, dtype=torch.uint8)}),
    "a mask of another size": ("masks", {"out.weight": torch.zeros(3, dtype=torch.uint8)}),
    "a mask that is none": ("masks", {"out.weight": None}),
    "a movement of another shape": ("movement", {"out.weight": torch.zeros(3, 3)}),
    "a movement that is missing": ("movement", None),
    "a step that is none": ("step", "seven"),
    "masks that are none": ("masks", None),
}


@pytest.mark.parametrize("wrong", ["nothing", "a model's state", "no step", *WRONG])
def test_a_wrong_state_is_refused_in_one_line_and_changes_nothing(wrong):
    run = Run("movement").load(saved_run("movement")[8])
    before, state = run.save(), copy.deepcopy(saved_run("movement")[11]["pruner"])
    if wrong in WRONG:
        key, value = WRONG[wrong]
        state[key] = state[key] | value if isinstance(value, dict) else value
    else:
        del state["step"]
        state = {"nothing": {}, "a model's state": net().state_dict()}.get(wrong, state)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        run.pruner.load_state_dict(state)
    assert_equal(run.save(), before)


@pytest.mark.parametrize(("saved", "loaded"), [("movement", "adamw"), ("adamw", "movement")])
def test_a_state_of_another_score_is_refused_where_sums_are_missing(saved, loaded):
    state, run = Run(saved).train(range(8)).pruner.state_dict(), Run(loaded)
    with pytest.raises(ValueError, match="movement"):
        run.pruner.load_state_dict(state)
    assert run.pruner.step == 0 and all(mask.all() for mask in run.pruner.masks.values())


def test_a_loaded_state_zeroes_what_it_prunes_and_is_refused_with_masks_of_another_model():
    saved = Run("adamw").train(range(12)).save()
    run = Run("adamw", seed=9).train(range(3))
    run.pruner.load_state_dict(saved["pruner"])
    assert_pruned_are_zero(run.pruner)
    assert list(run.pruner.masks) == NAMES
    saved["optimizer"]["state"][0]["mask"] = torch.zeros(99)
    with pytest.raises(ValueError, match=r"conv\.weight"):
        Run("adamw").optimizer.load_state_dict(saved["optimizer"])


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


@pytest.mark.parametrize(
    ("final", "end", "options", "steps"),
    [(0.8, 30, {}, [22, 26, 30]), (0.8, 14, {"score": "wanda"}, [19]), (0.8, 14, {"regrow": Regrow(0.2)}, [19])],
    ids=str,
)
def test_more_asked_for_waits_for_an_event_to_come_or_goes_with_inputs_and_regrowth(final, end, options, steps):
    pruner, events = resumed(finished(), schedule=Ramp(final, 2, end), **options)
    train(pruner.model, pruner.optimizer, range(18, 32))
    assert [event.step for event in events] == steps and pruner.sparsity == round(0.8 * 1054) / 1054
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize(
    ("first", "select", "length", "steps"),
    [
        (Global(), PerLayer(), None, [1, 2]),
        (Global(), PerRow(), 8, [1, 2]),
        (Global(), NofM(2, 4), 4, [1, 2]),
        (NofM(2, 4), NofM(2, 4), 4, [1]),
    ],
    ids=str,
)
def test_another_selector_at_the_same_sparsity_gets_what_it_asks_for(first, select, length, steps):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 3))
    saved, events = {}, []
    for chosen in (first, select, select):
        options = {"score": "magnitude", "exclude": "1", "on_event": events.append}
        pruner = Pruner(model, adamw(model), select=chosen, schedule=Constant(0.5), **options)
        if saved:
            pruner.load_state_dict(saved)
        model(torch.ones(1, 8)).sum().backward()
        pruner.optimizer.step()
        saved = pruner.state_dict()
        pruner.remove()
    assert [event.step for event in events] == steps
    for mask in pruner.masks.values():
        pruned = ~mask.reshape(-1, length or mask.numel())
        assert (pruned.sum(1) >= pruned.shape[1] // 2).all()
