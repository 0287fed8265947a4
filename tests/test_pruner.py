"""Pruner acts at the right steps, prunes the exact number, and always what scores lowest."""

from itertools import pairwise

import pytest
import torch
from covering import each_once
from reference import is_subset, keep_largest, same
from torch import nn
from toys import (
    NAMES,
    NUM_WEIGHTS,
    Conv1D,
    adamw,
    adamw_prune,
    assert_pruned_are_zero,
    backward,
    net,
    num_pruned,
    train,
)

from prunus import SCORES, Constant, NofM, OneShot, PerRow, Pruner, Ramp
from prunus.plot import svg

BY_STATE = [name for name, score in SCORES.items() if not {"movement", "input_norm"} & set(score.reads)]


def pruner_of(model, optimizer=None, **options):
    optimizer = optimizer or adamw(model)
    return Pruner(model, optimizer, **{"schedule": Ramp(0.7, 2, 14), "every": 5} | options)


def weights_of(model):
    return {name: dict(model.named_parameters())[name].detach() for name in NAMES}


def scores_by_definition(row, model, optimizer, **options):
    """Scores of all weights from copies of what they read, as stored tensors."""
    found = {}
    for name, weight in weights_of(model).items():
        state = optimizer.state[dict(model.named_parameters())[name]]
        group = optimizer.param_groups[0]
        values = {
            "weight": weight.clone(),
            "exp_avg": state["exp_avg"].clone(),
            "exp_avg_sq": state["exp_avg_sq"].clone(),
            "step": state["step"].item(),
            "position": torch.arange(weight.numel()).view(weight.shape),
        } | {"name": name, "beta1": group["betas"][0], "beta2": group["betas"][1], "adam_eps": group["eps"]}
        found[name] = row.of(**{n: values[n] for n in (*row.reads, *row.settings)}, **options)
    return found


@pytest.mark.parametrize(
    ("make", "formula"),
    each_once(
        [adamw, adamw_prune],
        [
            *((name, {}) for name in BY_STATE),
            ("bitter7", {"eps": 1e-8}),
            ("fisher", {"q": 0.25}),
            ("random", {"seed": 5}),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_event_prunes_the_exact_number_of_the_lowest_live_scores(make, formula):
    (score, options), model = formula, net()
    optimizer = make(model)
    seen = {}
    optimizer.register_step_post_hook(  # registered first, so that it sees the state an event reads
        lambda *_: seen.update(scores=scores_by_definition(SCORES[score], model, optimizer, **options))
    )
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights_of(model).items()}

    def check(event):
        expected = keep_largest(seen["scores"], round(event.sparsity * NUM_WEIGHTS), masks)
        assert same(dict(pruner.masks), expected) and is_subset(expected, masks)
        assert event.newly_pruned == sum(int((masks[n] & ~expected[n]).sum()) for n in masks)
        masks.update(expected)

    pruner = pruner_of(model, optimizer, score=score, score_options=options, on_event=check)
    train(model, optimizer, range(18))
    assert_pruned_are_zero(pruner)
    assert num_pruned(pruner) == round(0.7 * NUM_WEIGHTS)


def test_events_are_at_their_steps_with_exact_counts_and_subsets():
    model, events, masks = net(), [], []
    schedule = Ramp(0.83, 3, 17, "linear")

    def note(event):
        events.append(event)
        masks.append(dict(pruner.masks))
        assert num_pruned(pruner) == round(schedule(event.step) * NUM_WEIGHTS)

    pruner = pruner_of(model, schedule=schedule, every=4, on_event=note)
    train(model, pruner.optimizer, range(25))
    assert [event.step for event in events] == [7, 11, 15, 17]  # at step 3 the sparsity is zero: nothing to do
    assert [event.sparsity for event in events] == [schedule(step) for step in (7, 11, 15, 17)]
    assert sum(event.newly_pruned for event in events) == round(0.83 * NUM_WEIGHTS)
    assert all(event.seconds >= 0 for event in events)
    assert all(is_subset(tight, loose) for loose, tight in pairwise(masks))


@pytest.mark.parametrize(("schedule", "step"), [(Constant(0.4), 1), (OneShot(0.4, at=6), 6), (OneShot(0.4, at=0), 1)])
def test_constant_acts_at_the_first_step_and_one_shot_at_its_own(schedule, step):
    model, events = net(), []
    pruner = pruner_of(model, schedule=schedule, on_event=events.append)
    for now in range(1, 10):
        train(model, pruner.optimizer, [now])
        assert num_pruned(pruner) == (round(0.4 * NUM_WEIGHTS) if now >= step else 0)
        assert pruner.step == now
    assert [event.step for event in events] == [step]


def test_a_sparsity_of_zero_does_nothing():
    model, twin, events = net(), net(), []
    pruner = pruner_of(model, schedule=Constant(0.0), on_event=events.append)
    train(model, pruner.optimizer, range(5))
    train(twin, adamw(twin), range(5))
    assert not events and num_pruned(pruner) == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("schedule", [Constant(0.5), OneShot(0.5, at=2)], ids=str)
def test_n_of_m_runs_along_the_inputs_also_where_they_stand_first(schedule):
    model = nn.Sequential(nn.Linear(8, 12), Conv1D(4, 12), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1))
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, select=NofM(2, 4), schedule=schedule)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    for name, groups in (("0.weight", (12, 2, 4)), ("3.weight", (3, 1, 4))):
        assert pruner.masks[name].view(groups).sum(2).eq(2).all()
    assert pruner.masks["1.weight"].T.reshape(4, 3, 4).sum(2).eq(2).all()


@pytest.mark.parametrize(("n", "m", "sparsity"), [(1, 3, 2 / 3), (7, 10, 0.3), (1, 5, 0.8), (2, 4, 0.5)])
def test_n_of_m_goes_with_its_sparsity_however_it_was_computed(n, m, sparsity):
    model = nn.Linear(60, 2)
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, select=NofM(n, m), schedule=OneShot(sparsity, at=1))
    model(torch.randn(3, 60)).sum().backward()
    optimizer.step()
    assert pruner.masks["weight"].view(2, -1, m).sum(2).eq(n).all()


def test_a_function_is_a_score_of_what_it_names():
    model, seen = net(), {}

    def mine(weight, grad, exp_avg_sq, step, *, beta2, name, power):
        seen[name] = (step, beta2, power)
        return (weight * grad).abs() ** power

    pruner = pruner_of(model, score=mine, score_options={"power": 2.0}, schedule=OneShot(0.5, at=3))
    train(model, pruner.optimizer, range(3))
    assert seen == dict.fromkeys(NAMES, (3.0, 0.999, 2.0))
    assert_pruned_are_zero(pruner)


def test_scores_may_be_compared_in_half_precision():
    model, seen = net(), {}
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: seen.update({n: w.half().abs() for n, w in weights_of(model).items()}))
    pruner = pruner_of(model, optimizer, score="magnitude", score_dtype=torch.float16, schedule=OneShot(0.5, at=2))
    train(model, optimizer, range(2))
    assert same(dict(pruner.masks), keep_largest(seen, round(0.5 * NUM_WEIGHTS)))


def test_an_event_by_hand_uses_the_schedule_at_this_step():
    model = net()
    pruner = pruner_of(model, schedule=Ramp(0.8, 0, 10, "linear"), every=100)
    train(model, pruner.optimizer, range(5))
    pruner.update()
    assert num_pruned(pruner) == round(0.4 * NUM_WEIGHTS)
    assert_pruned_are_zero(pruner)


def test_a_layer_whose_first_gradient_comes_before_the_event_is_no_error():
    model = net()
    pruner = pruner_of(model, schedule=OneShot(0.5, at=6))
    for step in range(6):
        pruner.optimizer.zero_grad()
        backward(model, step)
        if step < 3:
            model.hidden.weight.grad = None
        pruner.optimizer.step()
    assert num_pruned(pruner) == round(0.5 * NUM_WEIGHTS)


def test_an_optimizer_without_moments_is_refused_by_the_first_event():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner_of(model, optimizer, schedule=OneShot(0.5, at=2))
    with pytest.raises(ValueError, match=r"exp_avg_sq.*SGD.*AdamW"):
        train(model, optimizer, range(2))


def test_a_weight_that_became_nan_is_named_at_the_event():
    model = net()
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: model.out.weight.data[1, 2].fill_(float("nan")))
    pruner_of(model, optimizer, score="magnitude", schedule=OneShot(0.5, at=1))
    with pytest.raises(ValueError, match=r"\bout\.weight"):
        train(model, optimizer, [0])


@pytest.mark.parametrize("select", [PerRow(), NofM(2, 4)], ids=str)
def test_rows_of_a_grouped_transposed_convolution_are_refused_at_once(select):
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, groups=2))
    with pytest.raises(ValueError, match=r"^0\.weight has no rows: .*select by layer or globally$"):
        Pruner(model, adamw(model), schedule=OneShot(0.5, at=1), select=select)


@pytest.mark.parametrize("make", [adamw, adamw_prune])
def test_an_event_that_failed_is_tried_again(make):
    model, failing = net(), [True]
    score = lambda weight, input_norm: (weight.abs() * input_norm)[: 1 if failing else None]  # noqa: E731
    pruner = Pruner(model, make(model), score=score, schedule=OneShot(0.5, at=3))
    train(model, pruner.optimizer, range(2))
    for step in (2, 3):
        with pytest.raises(ValueError, match=r"conv\.weight.*\(3, 1, 3, 3\)"):
            train(model, pruner.optimizer, [step])
    failing.clear()
    train(model, pruner.optimizer, range(4, 7))
    assert num_pruned(pruner) == round(0.5 * NUM_WEIGHTS)


@pytest.mark.parametrize("length", [40, 400])
def test_by_default_a_ramp_has_about_20_events_and_a_fixed_number_of_steps_stays(length):
    steps = {}
    for every in (None, 50):
        model, steps[every] = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        schedule = Ramp(0.5, 2, 2 + length)
        options = {"score": "magnitude", "schedule": schedule, "on_event": lambda e, at=steps[every]: at.append(e.step)}
        Pruner(model, optimizer, every=every, **options)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(length + 4):
            optimizer.step()
    assert steps[None] == list(range(2 + length // 20, 3 + length, length // 20))
    assert steps[50] == [*range(52, 2 + length, 50), 2 + length]


def test_a_schedule_of_the_users_own_gets_a_whole_number_of_steps():
    class Mine:
        final, end = 0.5, 3

        def __call__(self, step):
            return 0.5 if step >= 3 else 0.0

        def is_event(self, step, every):
            return step % every == 0 and step == 3

        def over(self, num_steps):
            return self

    model = net()
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, schedule=Mine())
    train(model, optimizer, range(4))
    assert pruner.sparsity == pytest.approx(0.5, abs=1e-3) and pruner.report().progress is None


def test_the_report_says_where_the_ramp_is_and_shows_itself():
    model = net()
    optimizer = adamw(model)
    pruner = pruner_of(model, optimizer, schedule=Ramp(0.6, 4, 8), every=1)
    seen = []
    for step in range(9):
        train(model, optimizer, [step])
        seen.append(pruner.report())
    assert str(seen[1]).endswith("\nstep 2 of a ramp from 4 to 8: not begun")
    assert seen[5].progress == "step 6 of a ramp from 4 to 8: 30.00% of 60.00%"
    assert seen[8].progress == "step 9 of a ramp from 4 to 8: ended, at 60.00%"
    report = seen[8]
    assert "\n" not in repr(report) and len(repr(report)) < 150
    html = report._repr_html_()
    assert all(name in html for name in NAMES) and svg(report.plot()) in html and report.progress in html
