"""What cannot be meant is refused when it is said, in one line, and not at the first event of a training."""

from functools import partial
from inspect import signature

import pytest
import torch
from toys import adamw, adamw_prune, net, through_a_file, train

from prunus import AdamWPrune, Constant, Global, NofM, OneShot, PerLayer, Pruner, Ramp, Rate, Regrow
from prunus.integrations.pruner_options import PruneCallbackBase
from prunus.validation import check_options

RAMP = Ramp(0.5, 2, 14)
WRONG = [
    ({"schedule": 0.5}, r"schedule.*Ramp\(.*got 0\.5"),
    ({"schedule": None}, "masks= to keep"),
    ({"schedule": "linear"}, r"schedule.*got 'linear'"),
    ({"schedule": Ramp}, r"schedule.*got <class"),
    ({"select": "global"}, r"select.*Global\(\).*'global'"),
    ({"select": Global}, r"select.*Global\(\).*<class"),
    ({"select": None}, r"select.*None"),
    ({"select": 0.5}, r"select.*0\.5"),
    ({"regrow": 0.1}, r"regrow.*Regrow\(0\.1\).*got 0\.1"),
    ({"regrow": Regrow}, r"regrow.*<class"),
    ({"every": 2.5}, r"every.*whole number.*2\.5"),
    ({"every": "50"}, r"every.*'50'"),
    ({"every": 0}, r"every.*at least 1.*0"),
    ({"score": 3}, r"score.*function.*3"),
    ({"score": None}, r"score.*None"),
    ({"score": "bitter77"}, "bitter77"),
    ({"score_options": 1e-8}, r"score_options.*1e-08"),
    ({"score_options": {"epsilon": 1}}, "epsilon"),
    ({"score_dtype": "float32"}, r"score_dtype.*torch\.float32.*'float32'"),
    ({"score_dtype": torch.int32}, r"score_dtype.*floating-point.*torch\.int32"),
    ({"score_dtype": torch.complex64}, r"score_dtype.*floating-point.*torch\.complex64"),
    ({"masks": [torch.ones(2, 2)]}, r"masks.*\[tensor"),
    ({"masks": torch.ones(99, 99)}, r"masks.*tensor"),
    ({"on_event": "print"}, r"on_event.*'print'"),
    ({"rate": 0.5}, r"rate must be a Rate, such as Rate\(power=1\)"),
    ({"rate": Rate}, r"rate must be a Rate.*<class"),
    ({"reloaded": "ignore"}, r"^reloaded must be \"zero\".*\"raise\".*got 'ignore'$"),
    ({"no_gradient": "warn"}, 'no_gradient must be "raise" or "dense"; got \'warn\''),
]
MISFITS = [  # which only the model shows
    ({"include": "typo"}, "typo"),
    ({"masks": "ones"}, "ones"),
    ({"masks": {"typo": torch.ones(2)}}, "typo"),
    ({"masks": {"conv.weight": torch.ones(2)}}, "conv.weight"),
    ({"select": NofM(2, 4)}, "2.*4"),
    ({"select": NofM(2, 4), "schedule": Constant(0.6)}, "0.6"),
]


@pytest.mark.parametrize(("options", "text"), WRONG + MISFITS, ids=str)
def test_a_wrong_option_is_refused_at_once_and_leaves_no_trace(options, text):
    model, twin = net(), net()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=text) as error:
        Pruner(model, optimizer, **{"schedule": RAMP} | options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    train(model, optimizer, range(4))
    train(twin, adamw(twin), range(4))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


CALLS = {
    "sparsity": (lambda model, optimizer: Pruner(sparsity=0.5), r"sparsity is part of the schedule: .*Ramp\(0\.5, "),
    "torch's name": (lambda m, o: Pruner(m, o, amount=0.3), r"amount is part of the schedule: .*Ramp\(0\.3, "),
    "percent": (lambda m, o: Pruner(m, o, sparsity=50), r"schedule=Ramp\(0\.5, "),
    "misspelt": (lambda m, o: Pruner(m, o, shedule=RAMP), "no option 'shedule'; did you mean schedule"),
    "unknown": (lambda m, o: Pruner(m, o, schedule=RAMP, warmup=3), "no option 'warmup'; the options are score, "),
    "no optimizer": (lambda m, o: Pruner(m, schedule=RAMP), "a model and the optimizer that trains it"),
    "position": (lambda m, o: Pruner(m, o, RAMP), r"options by name: Pruner\(model, optimizer, schedule="),
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_a_call_that_does_not_fit_is_answered_with_what_to_write(call, text):
    model = net()
    with pytest.raises(TypeError, match=text) as error:
        call(model, adamw(model))
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_the_step_count_is_a_plain_number_that_any_file_takes():
    model = net()
    pruner = Pruner(model, adamw(model), schedule=RAMP)
    train(model, pruner.optimizer, range(2))
    assert type(pruner.step) is int and pruner.step == 2
    assert int not in torch.serialization.get_safe_globals()
    assert through_a_file({"at": pruner.step}) == {"at": 2}


@pytest.mark.parametrize("option", ["sparsity", "amount", "fused"])
def test_an_option_that_adamwprune_does_not_have_is_answered_with_what_to_write(option):
    with pytest.raises(
        TypeError, match=rf"^AdamWPrune has no option '{option}'[^\n]*max_norm[^\n]*schedule=Ramp\("
    ) as error:
        AdamWPrune(net().parameters(), lr=1e-3, **{option: 0.5})
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    assert list(signature(AdamWPrune).parameters)[:2] == ["params", "lr"]


@pytest.mark.parametrize("make", [adamw, adamw_prune])
@pytest.mark.parametrize("masks", [None, "zeros"])
def test_weights_without_values_are_refused_when_the_pruner_is_made(make, masks):
    with torch.device("meta"):
        model = net()
    with pytest.raises(ValueError, match=r"^conv\.weight is on the meta device[^\n]*to_empty[^\n]*$"):
        Pruner(model, make(model), schedule=RAMP, masks=masks)


def test_the_options_of_a_pruner_and_their_defaults_can_be_looked_up():
    parameters = signature(Pruner).parameters
    assert list(parameters)[:3] == ["model", "optimizer", "score"]
    assert parameters["score"].default == "bitter7" and parameters["select"].default == Global()


def test_fractions_are_refused_with_what_turns_them_into_steps():
    model = net()
    with pytest.raises(ValueError, match=r"schedule\.over\(num_steps\)"):
        Pruner(model, adamw(model), schedule=Ramp(0.5, 0.1, 0.9))


@pytest.mark.parametrize(("options", "text"), WRONG, ids=str)
def test_a_callbacks_option_is_refused_when_the_callback_is_made(options, text):
    with pytest.raises(ValueError, match=text):
        PruneCallbackBase(**{"schedule": RAMP} | options)


def test_model_and_optimizer_the_other_way_round_are_told_apart():
    model = net()
    optimizer = adamw(model)
    for wrong in (
        (optimizer, model),
        (model, model),
        (None, optimizer),
        (model, None),
        (list(model.parameters()), optimizer),
    ):
        with pytest.raises(ValueError, match=r"^a Pruner takes a model, then the optimizer[^\n]*$"):
            Pruner(*wrong, schedule=RAMP)


@pytest.mark.parametrize("final", ["50%", "0.5", None, [0.5], 1j, 50, True, float("nan")], ids=str)
@pytest.mark.parametrize(
    "make", [lambda s: Ramp(s, 1, 5), lambda s: OneShot(s, at=3), Constant], ids=["ramp", "one", "all"]
)
def test_a_sparsity_that_is_no_fraction_is_refused(make, final):
    with pytest.raises(ValueError, match=r"^final sparsity must lie in \[0, 1\), such as 0\.5, got [^\n]+$"):
        make(final)


@pytest.mark.parametrize("step", ["10", None, [1], 1j], ids=str)
def test_a_step_that_is_no_number_is_refused(step):
    for make in (lambda: Ramp(0.5, step, 20), lambda: Ramp(0.5, 1, step), lambda: OneShot(0.5, at=step)):
        with pytest.raises(ValueError, match="whole number of steps"):
            make()


def test_what_can_be_meant_is_taken():
    for select in (Global(), PerLayer("erk"), NofM(2, 4)):
        check_options({"select": select, "schedule": Constant(0.5), "every": 7, "on_event": print})
    check_options({"schedule": Ramp(0.5, 0.1, 0.85), "score": lambda weight: weight, "regrow": Regrow(0.2)})
    check_options({"masks": {}, "score": "fisher", "score_options": {"q": 0.25}, "score_dtype": torch.bfloat16})


def test_a_pruner_prints_what_it_was_asked_for_and_how_far_it_is(monkeypatch):
    model = net()
    pruner = Pruner(model, adamw(model), schedule=RAMP, every=4)
    assert "bitter7" in repr(pruner) and repr(RAMP) in repr(pruner) and "sparsity=0.0000" in repr(pruner)
    train(model, pruner.optimizer, range(16))
    monkeypatch.setattr(torch.Tensor, "count_nonzero", lambda *_: pytest.fail("counted"))
    assert "step=16" in repr(pruner) and "sparsity=0.5000 of 1,054 in 3 weights" in str(pruner)
    pruner.remove()
    assert "sparsity=0.5000" in repr(pruner) and "\n" not in repr(pruner)


@pytest.mark.parametrize("score", [lambda weight: weight.abs(), partial(lambda weight, p: weight**p, p=2)])
def test_a_pruner_prints_whatever_it_is_made_of(score):
    model = net()
    assert "schedule=None" in repr(Pruner(model, adamw(model), score=score, masks="zeros"))
    assert "Pruner object" in repr(Pruner.__new__(Pruner))
