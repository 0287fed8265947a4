"""A weight has one Pruner at a time, and only its optimizer steps it: others would undo what it was asked for."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from covering import each_once
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toys import adamw, adamw_prune, assert_pruned_are_zero, net, num_pruned, sgd, through_a_file, train

from prunus import Constant, Pruner, Ramp, Regrow

MAKERS = [adamw, adamw_prune]


def pruner_of(model, optimizer, **options):
    return Pruner(model, optimizer, **{"score": "magnitude", "schedule": Ramp(0.5, 1, 8), "every": 3} | options)


@pytest.mark.parametrize("options", [{}, {"score": "movement"}, {"include": "hidden", "exclude": ["conv", "out"]}])
@pytest.mark.parametrize("make", MAKERS)
def test_a_second_one_is_refused_in_one_line_that_names_the_weight_until_the_first_is_removed(make, options):
    model = net()
    optimizer = make(model)
    with pytest.raises(ValueError, match="typo"):  # what is refused for something else is in nobody's way
        pruner_of(model, optimizer, masks={"typo": torch.ones(2)})
    first = pruner_of(model, optimizer)
    with pytest.raises(ValueError, match=r"^(conv|hidden)\.weight .*\.remove\(\) on the first[^\n]*$"):
        pruner_of(model, optimizer, **options)
    train(model, optimizer, range(12))
    assert num_pruned(first) == round(0.5 * 1054)
    assert_pruned_are_zero(first)
    first.remove()
    second = pruner_of(model, optimizer, masks="zeros")
    train(model, optimizer, range(12))
    assert num_pruned(second) == round(0.5 * 1054)


@pytest.mark.parametrize("options", [{}, {"exclude": "hidden"}])
@pytest.mark.parametrize("make", MAKERS)
def test_one_over_another_optimizer_takes_the_weights_over_and_the_old_optimizer_is_refused(make, options):
    model = net()
    first = pruner_of(model, make(model), score="movement")
    train(model, first.optimizer, range(6))
    with pytest.raises(ValueError, match="typo"):  # a Pruner that is refused takes nothing over
        pruner_of(model, make(model), masks={"typo": torch.ones(2)})
    train(model, first.optimizer, range(6, 8))
    assert_pruned_are_zero(first)
    with pytest.warns(UserWarning, match=rf"^conv\.weight .*another {type(first.optimizer).__name__}, [^\n]*$"):
        second = pruner_of(model, make(model), masks="zeros", **options)
    train(model, second.optimizer, range(8, 12))
    assert_pruned_are_zero(second)
    assert second.step == 4 and first.step == 8
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^conv\.weight belongs to another optimizer's Pruner"):
        train(model, first.optimizer, [12])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first.remove()  # again
    train(model, second.optimizer, [12])
    assert_pruned_are_zero(second)


@pytest.mark.parametrize("make", MAKERS)
def test_the_lines_that_make_one_may_run_again_though_a_name_holds_the_last(make):
    model = net()
    for run in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = make(model)
            pruner = pruner_of(model, optimizer, masks="zeros")
        assert [one.filename for one in said] == [__file__] * (run > 0)
        train(model, optimizer, range(12))
        assert num_pruned(pruner) == round(0.5 * 1054)
        assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
def test_one_that_nobody_can_reach_is_in_nobodys_way(make):
    model = net()
    gc.disable()
    try:
        for _ in range(3):
            train(model, pruner_of(model, make(model)).optimizer, range(2))
    finally:
        gc.enable()


@pytest.mark.parametrize("num_steps", [0, 6])
@pytest.mark.parametrize(("make", "other"), each_once(MAKERS, [adamw_prune, adamw, sgd]))
def test_the_step_of_an_optimizer_made_again_is_refused_before_it_moves_a_weight(make, other, num_steps):
    model = net()
    pruner = pruner_of(model, make(model))
    train(model, pruner.optimizer, range(num_steps))
    again = other(model)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^conv\.weight belongs to another optimizer's Pruner[^\n]*remove\(\)[^\n]*$"
        ):
            train(model, again, [6])
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, pruner.optimizer, range(num_steps, 12))
    assert num_pruned(pruner) == round(0.5 * 1054)
    assert_pruned_are_zero(pruner)
    pruner.remove()
    train(model, again, [12])


def test_optimizers_of_other_weights_step_as_ever():
    model, other = net(), net(1)
    pruner = pruner_of(model, torch.optim.AdamW(model.hidden.parameters()), schedule=Constant(0.5))
    rest = torch.optim.SGD([*model.conv.parameters(), *model.norm.parameters(), *model.out.parameters()], 0.1)
    for step in range(3):
        train(model, rest, [step])
        train(model, pruner.optimizer, [step])
        train(other, adamw(other), [step])
    assert num_pruned(pruner) == round(0.5 * 975)
    assert_pruned_are_zero(pruner)


class Outer(torch.optim.Optimizer):
    """Steps by another optimizer, which it holds."""

    def __init__(self, inner, part):
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        setattr(self, *part(inner))

    def step(self, closure=None):
        held = getattr(self, "base", None) or self.several
        while not isinstance(held, torch.optim.Optimizer):
            held = next(iter(held.values())) if isinstance(held, dict) else held[0]
        return held.step(closure)


HELD = {
    "itself": lambda inner: ("base", inner),
    "list": lambda inner: ("several", [inner]),
    "dict": lambda inner: ("several", {"all": (inner,)}),
    "wrapper": lambda inner: ("base", Outer(inner, lambda it: ("several", {"all": it}))),
}


@pytest.mark.parametrize("part", HELD.values(), ids=HELD)
@pytest.mark.parametrize("is_outer", [True, False])
def test_an_optimizer_that_steps_by_another_is_taken_for_one_with_it(part, is_outer):
    model = net()
    inner = adamw(model)
    outer = Outer(inner, part)
    outer.loop = []
    outer.loop.append(outer.loop)
    pruner = pruner_of(model, outer if is_outer else inner)
    train(model, outer, range(12))
    assert pruner.step == 12 and num_pruned(pruner) == round(0.5 * 1054)
    for name, mask in pruner.masks.items():
        assert not model.get_parameter(name)[~mask].any()


class Hiding(torch.optim.SGD):
    """Steps by another optimizer, which it reaches through a function; it may fail before or after."""

    fails = ""

    def step(self, closure=None):
        if self.fails == "before":
            raise RuntimeError("out of memory")
        self.inner().step(closure)
        if self.fails == "after":
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", ["", "before", "after"])
def test_what_steps_inside_a_step_may_and_the_same_alone_may_not(fails):
    model = net()
    inner = adamw(model)
    outer = Hiding(model.parameters(), 0.1)
    outer.inner = lambda: inner
    pruner = pruner_of(model, outer)
    train(model, outer, range(6))
    outer.fails = fails
    with pytest.raises(RuntimeError) if fails else nullcontext():
        train(model, outer, [6])
    outer.fails = ""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="belongs to another optimizer's Pruner"):
        train(model, inner, [7])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, outer, range(7, 12))
    for name, mask in pruner.masks.items():
        assert not model.get_parameter(name)[~mask].any()


def test_a_step_of_the_owner_in_one_thread_allows_no_other_step_in_another():
    model, said = net(), []
    again, outer = adamw(model), Hiding(model.parameters(), 0.1)

    def step_again():
        try:
            again.step()
        except ValueError as error:
            said.append(str(error))

    class Elsewhere:
        def step(self, _):
            thread = threading.Thread(target=step_again)
            thread.start()
            thread.join()

    outer.inner = Elsewhere
    pruner = pruner_of(model, outer)
    train(model, outer, [0])
    assert len(said) == 1 and said[0].startswith("conv.weight belongs") and pruner.step == 1


@pytest.mark.parametrize("make", [adamw_prune, adamw])
def test_a_weight_that_an_optimizer_gets_later_is_seen(make):
    model = net()
    pruner = pruner_of(model, adamw(model), schedule=Constant(0.5))
    train(model, pruner.optimizer, range(2))
    other = make(model.norm)
    other.step()
    other.add_param_group({"params": [model.hidden.weight]})
    with pytest.raises(ValueError, match=r"^hidden\.weight belongs to another optimizer's Pruner"):
        other.step()
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
def test_each_sums_the_movement_of_its_own_weights(make):
    alone, model = net(), net()
    one = pruner_of(alone, make(alone), score="movement", schedule=Ramp(0.5, 20, 30))
    train(alone, one.optimizer, range(6))
    optimizer, options = make(model), {"score": "movement", "schedule": Ramp(0.5, 20, 30)}
    first = pruner_of(model, optimizer, exclude=["conv", "out"], **options)
    second = pruner_of(model, optimizer, exclude="hidden", **options)
    train(model, optimizer, range(3))
    sums = {name: value.clone() for name, value in second.state_dict()["movement"].items()}
    second.remove()
    train(model, optimizer, range(3, 6))
    expected = one.state_dict()["movement"]
    assert torch.equal(first.state_dict()["movement"]["hidden.weight"], expected["hidden.weight"])
    assert all(torch.equal(value, sums[name]) and value.any() for name, value in second._movement.sums.items())


@pytest.mark.parametrize("options", [{"regrow": Regrow(0.1)}, {"score": "movement"}], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_other_weights_may_have_their_own_which_moves_no_weight_of_another(make, options):
    model = net()
    optimizer = make(model)
    first = pruner_of(model, optimizer, exclude="hidden", schedule=Constant(0.5))
    second = pruner_of(model, optimizer, exclude=["conv", "out"], **options)
    for step in range(12):
        train(model, optimizer, [step])
        assert_pruned_are_zero(first)
    assert num_pruned(first) == round(0.5 * 79) and num_pruned(second) == round(0.5 * 975)


@pytest.mark.parametrize("make", MAKERS)
def test_a_loaded_or_copied_optimizer_begins_without_one(make):
    model, twin = net(), net(9)
    first = pruner_of(model, make(model))
    train(model, first.optimizer, range(6))
    optimizer = make(twin)
    optimizer.load_state_dict(through_a_file(first.optimizer.state_dict()))
    assert pruner_of(twin, optimizer).digest() == first.digest()
    both = copy.deepcopy({"model": model, "optimizer": first.optimizer})
    assert pruner_of(both["model"], both["optimizer"]).digest() == first.digest()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_copy_which_would_hold_nothing_is_refused(make, copied):
    model = net()
    pruner = pruner_of(model, make(model))
    train(model, pruner.optimizer, range(6))
    with pytest.raises(TypeError, match=r"^a Pruner cannot be copied or pickled[^\n]*state_dict\(\)[^\n]*$"):
        copied(pruner)


def test_no_owner_is_kept_by_it():
    from prunus.owners import _OWNERS

    model = net()
    pruner = pruner_of(model, adamw(model))
    assert pruner._store in _OWNERS
    num_others = len(_OWNERS) - 1
    pruner.remove()
    assert len(_OWNERS) == num_others


@pytest.mark.parametrize("make", MAKERS)
def test_one_may_be_freed_while_another_steps(make):
    """Torch walks over its hooks at every step, and the garbage collector may run at any time."""

    def collect(*_):
        gc.collect()

    collecting = register_optimizer_step_pre_hook(collect)
    try:
        model, other = net(), net(1)
        pruner = pruner_of(model, make(model))
        freed = weakref.ref(pruner_of(other, make(other)))
        train(model, pruner.optimizer, range(2))
    finally:
        collecting.remove()
    assert pruner.step == 2 and freed() is None
