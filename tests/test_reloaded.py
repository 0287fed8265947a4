"""Weights that are loaded without the pruner's state are noticed: zeroed again with one warning, or refused."""

import copy
import pickle
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from covering import each_once
from toys import adamw, adamw_prune, assert_pruned_are_zero, backward, net, num_pruned, sgd, train

from prunus import Constant, Pruner, Ramp, Regrow, prune


class Own(torch.optim.SGD):
    """An optimizer that is not torch's: weights are zeroed after each of its steps."""


def own(model):
    return Own(model.parameters(), lr=0.05, momentum=0.9)


MAKERS = [adamw, adamw_prune, sgd, own]


def pruned(make=adamw, num_steps=4, **options):
    """A model whose only event is past, its Pruner, and its weights from before."""
    model = net()
    dense = copy.deepcopy(model.state_dict())
    optimizer = make(model)
    pruner = Pruner(model, optimizer, **{"score": "magnitude", "schedule": Constant(0.5)} | options)
    train(model, optimizer, range(num_steps))
    return model, pruner, dense


def num_alive(model, masks):
    """How many pruned weights are not zero."""
    return sum(int(p[~masks[name]].count_nonzero()) for name, p in model.named_parameters() if name in masks)


@contextmanager
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def load_a_part(model, make, dense):
    model.out.load_state_dict({name[4:]: value for name, value in dense.items() if name.startswith("out.")})


def load_between_backwards(model, make, dense):
    backward(model, 4)
    model.load_state_dict(dense)


LOADS = {
    "all": lambda model, make, dense: model.load_state_dict(dense),
    "a part": load_a_part,
    "between backwards": load_between_backwards,
}


@pytest.mark.parametrize(("make", "load"), each_once(MAKERS, LOADS))
def test_the_next_step_zeroes_them_again_and_warns_once(make, load):
    model, pruner, dense = pruned(make)
    LOADS[load](model, make, dense)
    num = num_alive(model, pruner.masks)  # a state for the masks may still follow
    assert num == num_pruned(pruner) or load == "a part"
    backward(model, 5)
    with pytest.warns(UserWarning, match=rf"^{num} weights .*(conv|out)\.weight.*zero") as caught:
        pruner.optimizer.step()
        train(model, pruner.optimizer, [5])
    assert len(caught) == 1
    assert_pruned_are_zero(pruner)
    model.load_state_dict(dense)
    with silent():  # it was said
        train(model, pruner.optimizer, [6])
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel], ids=["plain", "wrapped"])
@pytest.mark.parametrize("make", MAKERS)
def test_or_it_raises_in_one_line_until_they_fit_the_masks(make, wrap):
    model = net()
    dense, whole = copy.deepcopy(model.state_dict()), wrap(model)
    pruner = Pruner(whole, make(whole), score="magnitude", schedule=Constant(0.5), reloaded="raise")
    train(whole, pruner.optimizer, range(4))
    sparse, state = copy.deepcopy(model.state_dict()), pruner.state_dict()
    model.load_state_dict(dense)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^527 weights[^\n]*load_state_dict[^\n]*$"):
            train(whole, pruner.optimizer, [4])
        assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())
    model.load_state_dict(sparse)
    train(whole, pruner.optimizer, [4])
    model.load_state_dict(dense)
    pruner.load_state_dict(state)
    train(whole, pruner.optimizer, [5])
    assert num_alive(model, pruner.masks) == 0


@pytest.mark.parametrize("reloaded", ["zero", "raise"])
@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_an_event_notices_weights_that_were_written_in_another_way(make, reloaded):
    model, pruner, dense = pruned(make, 5, schedule=Ramp(0.5, 1, 9), every=4, reloaded=reloaded)
    for name, p in model.named_parameters():
        p.data.copy_(dense[name])  # no hook sees this
    num = num_pruned(pruner)
    train(model, pruner.optimizer, range(5, 8))
    told = (
        pytest.warns(UserWarning, match=f"^{num} w")
        if reloaded == "zero"
        else pytest.raises(ValueError, match=f"^{num} w")
    )
    with told:
        train(model, pruner.optimizer, [8])
    if reloaded == "zero":
        assert_pruned_are_zero(pruner)
    else:
        assert num_pruned(pruner) == num


@pytest.mark.parametrize("reloaded", ["zero", "raise"])
def test_an_event_looks_at_the_first_weights_of_a_tensor_but_zeroes_all(reloaded):
    model = torch.nn.Linear(512, 1024, bias=False)
    optimizer = adamw(model)
    schedule = Ramp(0.5, 1, 9)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=schedule, every=1, reloaded=reloaded)

    def step():
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()

    for _ in range(3):
        step()
    model.weight.data[-1] = 1.0  # beyond the look
    with pytest.raises(ValueError, match="weights that the masks prune") if reloaded == "raise" else nullcontext():
        step()
    if reloaded == "zero":
        assert_pruned_are_zero(pruner)
        model.weight.data[0] = 1.0
        with pytest.warns(UserWarning, match="weights that the masks prune"):
            step()
        assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
def test_weights_that_fit_the_masks_are_loaded_without_a_word(make):
    for options in ({}, {"schedule": Ramp(0.5, 1, 9), "every": 4, "regrow": Regrow(0.3, by="gradient")}):
        model, pruner, _ = pruned(make, 3, reloaded="raise", **options)
        states = [copy.deepcopy(each.state_dict()) for each in (model, pruner.optimizer, pruner)]
        train(model, pruner.optimizer, range(3, 12))
        expected = copy.deepcopy(model.state_dict())
        for each, state in zip((model, pruner.optimizer, pruner), states, strict=True):
            each.load_state_dict(state)
        train(model, pruner.optimizer, range(3, 12))
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_moments_of_a_dense_optimizer_do_not_move_pruned_weights(make):
    model, pruner, dense = pruned(make)
    plain = net()
    optimizer = adamw(plain)
    train(plain, optimizer, range(4))
    model.load_state_dict(dense)
    pruner.optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="weights"):
        train(model, pruner.optimizer, range(4, 8))
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("reloaded", ["zero", "raise"])
def test_weights_that_were_assigned_are_refused_since_the_optimizer_has_the_old_ones(make, reloaded):
    model, pruner, dense = pruned(make, reloaded=reloaded)
    kept = {name: p.detach().clone() for name, p in pruner._weights.items()}
    model.load_state_dict(copy.deepcopy(dense), assign=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^conv\.weight was replaced by another tensor [^\n]*assign=True[^\n]*$"):
            train(model, pruner.optimizer, [4])
        assert pruner.step == 4 and all(torch.equal(p, kept[name]) for name, p in pruner._weights.items())
    with pytest.raises(ValueError, match="another tensor"):
        pruner.report()
    for name, p in pruner._weights.items():  # the old ones back
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, p)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, pruner.optimizer, [4])
    assert pruner.step == 5
    assert_pruned_are_zero(pruner)


def test_a_negative_zero_is_zero_and_copies_and_pickles_of_a_model_know_no_pruner():
    model, pruner, dense = pruned(reloaded="raise")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(dense)
    assert b"prunus" not in pickle.dumps(model.out), "it must load where this package is not installed"
    with torch.no_grad():
        for name, mask in pruner.masks.items():
            model.get_parameter(name)[~mask] = -0.0
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, pruner.optimizer, [4])


def test_a_removed_pruner_says_nothing():
    model, pruner, dense = pruned(reloaded="raise")
    pruner.remove()
    model.load_state_dict(dense)
    train(model, pruner.optimizer, [4])


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_weights_on_a_gpu_are_noticed_too(make):
    model = net().cuda()
    dense = copy.deepcopy(model.state_dict())
    optimizer = make(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5))
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        if step == 2:
            model.load_state_dict(dense)
            with pytest.warns(UserWarning, match=r"^527 weights"):
                optimizer.step()
        else:
            optimizer.step()
    assert_pruned_are_zero(pruner)


def test_zeros_that_no_mask_keeps_are_told_once_and_kept_by_one():
    for masks, warned in ((None, 1), ("zeros", 0)):
        model = net()
        prune(model, sparsity=0.5)
        optimizer = adamw(model)
        pruner = Pruner(model, optimizer, score="magnitude", schedule=Ramp(0.8, 5, 9), masks=masks)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(model, optimizer, range(3))
        told = [str(one.message) for one in said if "zero already" in str(one.message)]
        assert len(told) == warned and all("masks='zeros'" in line for line in told)
        assert (pruner.sparsity > 0.49) == (masks == "zeros")


CLEAR = {
    "all": lambda model, state: state.clear(),
    "one": lambda model, state: state.pop(model.hidden.weight),
    "moments": lambda model, state: [own.clear() for own in state.values()],
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR)
def test_a_state_that_was_cleared_brings_no_pruned_weight_back(make, clear):
    model, pruner, _ = pruned(make)
    clear(model, pruner.optimizer.state)
    train(model, pruner.optimizer, range(4, 7))
    assert_pruned_are_zero(pruner)
    assert sum("mask" in own for own in pruner.optimizer.state_dict()["state"].values()) == 3


def saved_parts(make, num_steps=8):
    """States of a model, of its optimizer and of its Pruner, and what they prune."""
    model, pruner, _ = pruned(make, num_steps, schedule=Ramp(0.5, 1, 20), every=3)
    states = copy.deepcopy([part.state_dict() for part in (model, pruner.optimizer, pruner)])
    return *states, {name: mask.clone() for name, mask in pruner.masks.items()}


def resumed(make, loading, is_made_first, **options):
    """A Pruner before the first step of a new process that loads some states, in the order given."""
    model = net(9)
    parts = {"model": model, "optimizer": make(model)}
    options = {"score": "magnitude", "schedule": Ramp(0.5, 1, 20), "every": 3} | options
    if is_made_first:
        parts["pruner"] = Pruner(model, parts["optimizer"], **options)
    else:
        loading = {name: loading[name] for name in sorted(loading, key="pruner".__eq__)}  # the pruner last
    for name, state in loading.items():
        if name == "pruner" and name not in parts:
            parts[name] = Pruner(model, parts["optimizer"], **options)
        parts[name].load_state_dict(copy.deepcopy(state))
    return parts.get("pruner") or Pruner(model, parts["optimizer"], **options)


def without_masks(optimizer):
    """An optimizer's state as a checkpoint has it that knows moments only."""
    state = copy.deepcopy(optimizer)
    for own in state["state"].values():
        own.pop("mask", None)
    return state


@pytest.mark.parametrize("when", ["made first", "loaded first", "under way"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_resume_without_masks_and_pruner_is_refused_in_one_line_until_the_pruners_state_comes(make, when):
    model, optimizer, state, masks = saved_parts(make, 17)
    loading = {"model": model, "optimizer": without_masks(optimizer)}
    pruner = resumed(make, {} if when == "under way" else loading, when != "loaded first")
    if when == "under way":
        train(pruner.model, pruner.optimizer, range(6))
        pruner.model.load_state_dict(model)
        pruner.optimizer.load_state_dict(loading["optimizer"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^\d+% of the weights are zero but in no mask[^\n]*pruner\.load_[^\n]*$"):
            train(pruner.model, pruner.optimizer, [17])
        assert num_alive(pruner.model, masks) == 0
    pruner.load_state_dict(state)
    train(pruner.model, pruner.optimizer, [17])
    assert num_alive(pruner.model, masks) == 0 and pruner.step == 18


@pytest.mark.parametrize(("given", "are_filled"), [("zeros", False), ({}, True)], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_masks_that_are_given_say_what_becomes_of_zeros_for_good(make, given, are_filled):
    model, optimizer, _, masks = saved_parts(make, 17)
    pruner = resumed(make, {"model": model, "optimizer": without_masks(optimizer)}, False, masks=given)
    for _ in range(2):
        with silent():
            train(pruner.model, pruner.optimizer, [0])  # before its first event
        assert num_alive(pruner.model, masks) == (
            sum(int((~mask).sum()) for mask in masks.values()) if are_filled else 0
        )
        pruner.model.load_state_dict(model)
        pruner.optimizer.load_state_dict(without_masks(optimizer))


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_weights_of_the_run_itself_are_loaded_without_a_word_while_some_come_back(make, with_optimizer):
    options = {"schedule": Ramp(0.5, 1, 20), "every": 4, "regrow": Regrow(0.5, by="gradient")}
    model, pruner, _ = pruned(make, 9, **options)
    with torch.no_grad():  # as many have come back as may in a larger model
        kept = pruner.masks["hidden.weight"]
        model.hidden.weight[:8] *= ~kept[:8]
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value + 0.1 for name, value in own.items()})  # an average, for an evaluation
    model.load_state_dict(own)
    if with_optimizer:
        pruner.optimizer.load_state_dict(copy.deepcopy(pruner.optimizer.state_dict()))
    with silent():
        train(model, pruner.optimizer, range(9, 12))
    assert pruner.step == 12


@pytest.mark.parametrize("given", [None, "zeros", {}], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_a_model_with_a_few_dead_weights_gets_another_pruner_after_dense_steps(make, given):
    model, pruner, _ = pruned(make)
    pruner.remove()
    train(model, pruner.optimizer, range(4, 7))
    with torch.no_grad():
        for p in model.parameters():
            p[p == 0] = 0.01
        model.hidden.weight.view(-1)[:31] = 0  # 3 %
    with silent():
        second = Pruner(model, pruner.optimizer, score="magnitude", schedule=Ramp(0.5, 1, 9), every=4, masks=given)
        train(model, pruner.optimizer, range(7, 9))
    assert second.step == 2 and bool(model.hidden.weight.view(-1)[:31].any()) == (given != "zeros")


def warned(pruner):
    """What the next two steps warn of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(pruner.model, pruner.optimizer, [8, 9])
    return [str(one.message) for one in said]


@pytest.mark.parametrize("is_made_first", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_a_resume_that_forgets_one_state_is_told_once_and_keeps_its_zeros(make, is_made_first):
    model, optimizer, state, masks = saved_parts(make)
    everything = {"pruner": state, "optimizer": optimizer, "model": model}
    for forgotten, text in {
        "pruner": "masks came with the optimizer's state, but the schedule starts at step 0",
        "optimizer": "continues from step 8, but the optimizer has no state",
        "model": "continues from step 8, but conv.weight was not zero where its masks prune",
        "nothing": None,
    }.items():
        loading = {name: value for name, value in everything.items() if name != forgotten}
        pruner = resumed(make, loading, is_made_first)
        said = warned(pruner)
        assert [text in line and "\n" not in line for line in said] == ([True] if text else [])
        assert num_alive(pruner.model, masks) == 0


def test_optimizers_that_keep_no_state_need_none():
    model, _, state, _ = saved_parts(lambda m: torch.optim.SGD(m.parameters(), 0.05))
    pruner = resumed(lambda m: torch.optim.SGD(m.parameters(), 0.05), {"model": model, "pruner": state}, True)
    assert not warned(pruner)


@pytest.mark.gpu
def test_zeros_that_no_mask_keeps_are_told_on_a_gpu_where_masks_are_made_at_once():
    model = net()
    prune(model, sparsity=0.5)
    optimizer = adamw_prune(model.cuda())
    Pruner(model, optimizer, score="magnitude", schedule=Ramp(0.8, 5, 9))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with pytest.warns(UserWarning, match="zero already"):
        optimizer.step()
