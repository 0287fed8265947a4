"""The loss in parts is the model's own, and so is what goes back from it."""

import pytest
import torch
from probe_checks import findings
from probe_models import llama
from torch.nn import functional as F

from prunus import prune
from prunus.oneshot import Probe
from prunus.oneshot.probe import objective
from prunus.oneshot.probe.objective import IN_PARTS, Objective, entropy_in_parts


@pytest.mark.parametrize("elements", [1, 40, 10_000])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_value_and_gradient_are_those_of_torch(elements, spread, monkeypatch):
    monkeypatch.setitem(objective.ELEMENTS, "cpu", elements)
    hidden = (torch.randn(3, 5, 4) * spread).requires_grad_()
    weight, labels = torch.randn(13, 4), torch.randint(0, 13, (3, 5))
    labels[0, 1:3] = labels[2, 0] = -100
    found = entropy_in_parts(hidden, weight, labels)
    expected = sum(F.cross_entropy(hidden[i] @ weight.t(), labels[i], ignore_index=-100) for i in range(3))
    assert torch.allclose(found, expected, rtol=1e-5)
    one, other = (torch.autograd.grad(loss * 3, hidden)[0] for loss in (found, expected))
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not one[0, 1:3].any()
    with torch.no_grad():
        assert torch.equal(entropy_in_parts(hidden, weight, labels), found)


@pytest.mark.parametrize(("dtype", "form"), [(torch.float32, IN_PARTS), (torch.float64, "next token")], ids=str)
def test_it_is_taken_for_a_plain_head_in_float32(dtype, form):
    case = llama(dtype)
    found, names = findings(case.model, case.batches)
    assert found.form == form and found.quick == names and found.chained


def test_a_head_with_more_behind_it_shows_itself_and_is_not_replaced():
    case = llama(torch.float32)
    forward = case.model.forward

    def capped(*args, labels=None, **kwargs):
        found = forward(*args, **kwargs)
        found.logits = 3 * torch.tanh(found.logits / 3)
        if labels is not None:
            found.loss = case.model.loss_function(found.logits, labels, case.model.config.vocab_size)
        return found

    case.model.forward = capped
    assert findings(case.model, case.batches)[0].form == "next token"


def test_the_head_itself_can_be_pruned_too():
    case = llama(torch.float32, tie=False)
    result = prune(case.model, case.batches, 0.5, include="lm_head", probe=Probe(0.05))
    head_row = result.layers[-1]
    assert head_row.name == "lm_head.weight" and 0 < head_row.num_pruned < head_row.num_candidates
    assert Objective(case.model).loss is None
