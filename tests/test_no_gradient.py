"""Weights that no gradient reaches are named at the first step, and stay dense where that is wanted."""

import copy

import pytest
import torch

from prunus import AdamWPrune, Pruner, Ramp


class WithSpare(torch.nn.Module):
    """Two layers that are used and two that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 12), torch.nn.Linear(12, 4)
        self.pooler, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())


def trained_spare(steps, optimizer=torch.optim.AdamW, state=None, **options):
    torch.manual_seed(0)
    model = WithSpare()
    optimizer = optimizer(model.parameters(), lr=1e-2)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.6, 2, 8), every=2, **options)
    if state:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        pruner.load_state_dict(state[2])
    for _ in range(steps):
        model(torch.randn(16, 8, generator=torch.Generator().manual_seed(pruner.step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, pruner


def test_weights_without_a_gradient_are_named_at_the_first_step():
    with pytest.warns(UserWarning, match=r"reached pooler\.weight, unused\.weight in the first step.*no_gradient="):
        trained_spare(1)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"pooler\.weight has no Adam state.*no_gradient="):
        trained_spare(4)


@pytest.mark.filterwarnings("ignore:no gradient")
def test_steps_without_any_gradient_are_said_to_be_so():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    Pruner(model, optimizer, schedule=Ramp(0.5, 1, 2), every=1)
    with pytest.raises(ValueError, match=r"weight has no Adam state yet, since no gradient has reached it"):
        for _ in range(2):
            optimizer.step()


@pytest.mark.parametrize("score", ["magnitude", "movement"])
@pytest.mark.filterwarnings("error")
def test_scores_that_read_no_moments_rank_every_weight(score):
    _, _, pruner = trained_spare(8, score=score)
    assert pruner.sparsity == pytest.approx(0.6, abs=0.005) and pruner.report().layers[-1].dense is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamWPrune])
@pytest.mark.parametrize("score", ["bitter7", "gradient"])
def test_weights_without_a_gradient_stay_dense_by_option_and_the_rest_is_exact(optimizer, score):
    if score == "gradient":
        score = lambda weight, grad: weight.abs() * grad.abs()  # noqa: E731
    with pytest.warns(UserWarning, match=r"no gradient has reached pooler\.weight, unused\.weight: left dense") as said:
        model, _, pruner = trained_spare(8, optimizer, score=score, no_gradient="dense")
    assert len(said) == 1
    used = [model.first.weight, model.second.weight]
    assert sum(int((weight == 0).sum()) for weight in used) == round(0.6 * sum(weight.numel() for weight in used))
    assert bool(model.pooler.weight.all()) and bool(model.unused.weight.all())
    dense = {layer.name for layer in pruner.report().layers if layer.dense == "no gradient has reached it"}
    assert dense == {"pooler.weight", "unused.weight"} and set(pruner.masks) == {"first.weight", "second.weight"}
    assert pruner.sparsity == pytest.approx(0.6, abs=0.005)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, AdamWPrune])
@pytest.mark.filterwarnings("ignore:no gradient")
def test_a_gradient_that_comes_late_trains_a_weight_that_was_left_dense(optimizer):
    score = lambda weight, grad: weight.abs() * grad.abs()  # noqa: E731
    model, optimizer, pruner = trained_spare(4, optimizer, score=score, no_gradient="dense")
    before = model.pooler.weight.detach().clone()
    for _ in range(6):
        model.pooler(model(torch.randn(16, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool((model.pooler.weight != before).all()) and bool(model.pooler.weight.all())
    assert pruner.step == 10 and pruner.sparsity == pytest.approx(0.6, abs=0.005)
    assert [*pruner.masks] == ["first.weight", "second.weight"]


@pytest.mark.filterwarnings("ignore:no gradient")
def test_a_run_with_weights_left_dense_resumes_to_the_same_masks():
    model, optimizer, pruner = trained_spare(5, no_gradient="dense")
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), pruner.state_dict()))
    _, _, whole = trained_spare(12, no_gradient="dense")
    resumed_model, _, resumed = trained_spare(7, no_gradient="dense", state=state)
    assert resumed.digest() == whole.digest() and resumed.step == whole.step
    assert bool(resumed_model.pooler.weight.all())
