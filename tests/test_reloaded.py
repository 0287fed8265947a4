"""Weights that are loaded without the pruner's state are noticed: zeroed again with one warning, or refused."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from toys import adamw, adamw_prune, assert_pruned_are_zero, backward, net, num_pruned, sgd, train

from prunus import Constant, Pruner, Ramp, Regrow, prune


def muon_like(model):
    """An optimizer that is not torch's: weights are zeroed after each of its steps."""

    class Own(torch.optim.SGD):
        pass

    return Own(model.parameters(), lr=0.05, momentum=0.9)


MAKERS = [adamw, adamw_prune, sgd, muon_like]


def pruned(make=adamw, num_steps=4, **options):
    """A model whose only event is past, its Pruner, and its weights from before."""
    model = net()
    dense = copy.deepcopy(model.state_dict())
    optimizer = make(model)
    pruner = Pruner(model, optimizer, **{"score": "magnitude", "schedule": Constant(0.5)} | options)
    train(model, optimizer, range(num_steps))
    return model, pruner, dense


def loaded_wrongly(model, masks):
    return sum(int(p[~masks[name]].count_nonzero()) for name, p in model.named_parameters() if name in masks)


@pytest.mark.parametrize("make", MAKERS)
def test_the_next_step_zeroes_them_again_and_warns_once(make):
    model, pruner, dense = pruned(make)
    model.load_state_dict(dense)
    assert loaded_wrongly(model, pruner.masks) == num_pruned(pruner)  # a state for the masks may still follow
    with pytest.warns(UserWarning, match=rf"^{num_pruned(pruner)} weights .*conv\.weight.*zero") as caught:
        train(model, pruner.optimizer, range(4, 6))
    assert len(caught) == 1
    assert_pruned_are_zero(pruner)
    model.load_state_dict(dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        train(model, pruner.optimizer, range(6, 7))
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
def test_or_it_raises_in_one_line_until_they_fit_the_masks(make):
    model, pruner, dense = pruned(make, reloaded="raise")
    sparse = copy.deepcopy(model.state_dict())
    state = pruner.state_dict()
    model.load_state_dict(dense)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^527 weights[^\n]*load_state_dict[^\n]*$"):
            train(model, pruner.optimizer, [4])
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(sparse)
    train(model, pruner.optimizer, [4])
    model.load_state_dict(dense)
    pruner.load_state_dict(state)
    train(model, pruner.optimizer, [5])
    assert_pruned_are_zero(pruner)


@pytest.mark.parametrize("make", MAKERS)
def test_a_part_of_the_model_and_a_wrapped_one_are_noticed_too(make):
    model, pruner, dense = pruned(make)
    part = {name.removeprefix("out."): value for name, value in dense.items() if name.startswith("out.")}
    model.out.load_state_dict(part)
    with pytest.warns(UserWarning, match=r"out\.weight"):
        train(model, pruner.optimizer, [4])
    assert_pruned_are_zero(pruner)
    wrapped = torch.nn.DataParallel(net())
    pruner = Pruner(wrapped, make(wrapped), score="magnitude", schedule=Constant(0.5), reloaded="raise")
    train(wrapped, pruner.optimizer, range(2))
    wrapped.module.load_state_dict(dense)
    with pytest.raises(ValueError, match=r"^527 weights"):
        train(wrapped, pruner.optimizer, [2])


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_an_event_notices_weights_that_were_written_in_another_way(make):
    ramp = Ramp(0.5, 1, 9)
    for reloaded in ("zero", "raise"):
        model, pruner, dense = pruned(make, 5, schedule=ramp, every=4, reloaded=reloaded)
        for name, p in model.named_parameters():
            p.data.copy_(dense[name])  # no hook sees this
        num_kept = sum(int(mask.sum()) for mask in pruner.masks.values())
        train(model, pruner.optimizer, range(5, 8))
        if reloaded == "zero":
            with pytest.warns(UserWarning, match=rf"^{1054 - num_kept} weights"):
                train(model, pruner.optimizer, [8])
            assert_pruned_are_zero(pruner)
        else:
            with pytest.raises(ValueError, match=rf"^{1054 - num_kept} weights"):
                train(model, pruner.optimizer, [8])
            assert sum(int(mask.sum()) for mask in pruner.masks.values()) == num_kept


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
        with pytest.raises(ValueError, match=r"^conv\.weight is another tensor [^\n]*assign=True[^\n]*$"):
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


def test_a_negative_zero_is_zero():
    model, pruner, _ = pruned(reloaded="raise")
    with torch.no_grad():
        for name, mask in pruner.masks.items():
            model.get_parameter(name)[~mask] = -0.0
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, pruner.optimizer, [4])


def test_copies_and_pickles_of_a_model_know_no_pruner():
    model, pruner, dense = pruned(reloaded="raise")
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        twin.load_state_dict(dense)
    train(model, pruner.optimizer, [4])
    assert b"prunus" not in pickle.dumps(model.out), "it must load where this package is not installed"


def test_a_model_keeps_no_pruner_alive_and_a_removed_one_says_nothing():
    model, pruner, dense = pruned(reloaded="raise")
    pruner.remove()
    model.load_state_dict(dense)
    train(model, pruner.optimizer, [4])
    model, pruner, dense = pruned(reloaded="raise")
    freed = weakref.ref(pruner)
    del pruner
    gc.collect()
    assert freed() is None
    model.load_state_dict(dense)


def test_gradients_may_be_accumulated_before_it_is_noticed():
    model, pruner, dense = pruned()
    pruner.optimizer.zero_grad()
    backward(model, 4)
    model.load_state_dict(dense)
    backward(model, 5)
    with pytest.warns(UserWarning):
        pruner.optimizer.step()
    assert_pruned_are_zero(pruner)


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


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lose", ["all", "one", "moments"])
def test_a_state_that_was_cleared_brings_no_pruned_weight_back(make, lose):
    model, pruner, _ = pruned(make)
    state = pruner.optimizer.state
    if lose == "all":
        state.clear()
    elif lose == "one":
        del state[model.hidden.weight]
    else:
        for own in state.values():
            own.clear()
    train(model, pruner.optimizer, range(4, 7))
    assert_pruned_are_zero(pruner)
    again = pruner.optimizer.state_dict()["state"]
    assert sum("mask" in own for own in again.values()) == 3


def saved_parts(make, num_steps=8):
    """States of a model, of its optimizer and of its Pruner, and what they prune."""
    model, pruner, _ = pruned(make, num_steps, schedule=Ramp(0.5, 1, 20), every=3)
    states = copy.deepcopy([part.state_dict() for part in (model, pruner.optimizer, pruner)])
    return *states, {name: mask.clone() for name, mask in pruner.masks.items()}


def resumed(make, loading, is_made_first, **options):
    """A Pruner before the first step of a new process that loads some states, in the order given."""
    model = net(9)
    parts = {"model": model, "optimizer": make(model)}

    def add_pruner():
        ramp = {"score": "magnitude", "schedule": Ramp(0.5, 1, 20), "every": 3}
        parts["pruner"] = Pruner(model, parts["optimizer"], **ramp | options)

    if is_made_first:
        add_pruner()
    for name, state in loading.items():
        if name == "pruner" and not is_made_first:
            continue
        parts[name].load_state_dict(copy.deepcopy(state))
    if not is_made_first:
        add_pruner()
        if "pruner" in loading:
            parts["pruner"].load_state_dict(loading["pruner"])
    return parts["pruner"]


def without_masks(optimizer):
    """An optimizer's state as a checkpoint has it that knows moments only."""
    state = copy.deepcopy(optimizer)
    for own in state["state"].values():
        own.pop("mask", None)
    return state


@pytest.mark.parametrize("is_made_first", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_a_resume_without_masks_and_pruner_is_refused_in_one_line_until_the_pruners_state_comes(make, is_made_first):
    model, optimizer, state, masks = saved_parts(make)
    loading = {"model": model, "optimizer": without_masks(optimizer)}
    pruner = resumed(make, loading, is_made_first)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^\d+% of the weights are zero but in no mask[^\n]*pruner\.load_[^\n]*$"):
            train(pruner.model, pruner.optimizer, [8])
        assert loaded_wrongly(pruner.model, masks) == 0
    pruner.load_state_dict(state)
    train(pruner.model, pruner.optimizer, [8])
    assert loaded_wrongly(pruner.model, masks) == 0 and pruner.step == 9
    pruner.remove()
    for given, num_back in (("zeros", 0), ({}, sum(int((~mask).sum()) for mask in masks.values()))):
        kept = resumed(make, loading, False, masks=given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(kept.model, kept.optimizer, [0])  # before its first event
        assert loaded_wrongly(kept.model, masks) == num_back


@pytest.mark.parametrize("make", MAKERS)
def test_a_sparser_model_loaded_into_a_run_under_way_is_refused_without_its_masks(make):
    model, optimizer, state, masks = saved_parts(make, 17)
    pruner = resumed(make, {}, True)
    train(pruner.model, pruner.optimizer, range(6))
    pruner.model.load_state_dict(model)
    pruner.optimizer.load_state_dict(without_masks(optimizer))
    with pytest.raises(ValueError, match="are zero but in no mask"):
        train(pruner.model, pruner.optimizer, [17])
    pruner.load_state_dict(state)
    train(pruner.model, pruner.optimizer, [17])
    assert loaded_wrongly(pruner.model, masks) == 0


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = Pruner(model, pruner.optimizer, score="magnitude", schedule=Ramp(0.5, 1, 9), every=4, masks=given)
        train(model, pruner.optimizer, range(7, 9))
    assert second.step == 2 and bool(model.hidden.weight.view(-1)[:31].any()) == (given != "zeros")


@pytest.mark.parametrize("make", MAKERS)
def test_empty_masks_let_zeros_be_filled_for_good(make):
    model, optimizer, _, masks = saved_parts(make, 17)
    pruner = resumed(make, {"model": model, "optimizer": without_masks(optimizer)}, False, masks={})
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(pruner.model, pruner.optimizer, [0])
        assert loaded_wrongly(pruner.model, masks) > 0
        pruner.model.load_state_dict(model)
        pruner.optimizer.load_state_dict(without_masks(optimizer))


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
        "pruner": "masks came with the optimizer's state, but the schedule begins at step 0",
        "optimizer": "goes on from step 8, but the optimizer begins without its state",
        "model": "goes on from step 8, but conv.weight was not zero where its masks prune",
        "nothing": None,
    }.items():
        loading = {name: value for name, value in everything.items() if name != forgotten}
        pruner = resumed(make, loading, is_made_first)
        said = warned(pruner)
        assert [text in line and "\n" not in line for line in said] == ([True] if text else [])
        assert loaded_wrongly(pruner.model, masks) == 0


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
