"""The masks of a Pruner applied to copies of its model, such as averages of its weights."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import adamw, net, num_pruned, train

from prunus import Pruner, Ramp

WRAPPERS = {
    "plain": lambda model: model,
    "data parallel": nn.DataParallel,
    "compiled": lambda model: nn.DataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_an_average_has_the_zeros_of_the_model(wrap):
    model = net()
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Ramp(0.5, 2, 8), every=2)
    averaged = AveragedModel(wrap(model).cpu(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(10):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
    dense = copy.deepcopy(averaged)
    assert pruner.apply_to(averaged) is None
    pairs = dict(zip((name for name, _ in model.named_parameters()), averaged.parameters(), strict=True))
    before = dict(zip(pairs, dense.parameters(), strict=True))
    for name, mask in pruner.masks.items():
        assert not pairs[name][~mask].any() and torch.equal(pairs[name][mask], before[name][mask])
        assert before[name][~mask].any(), "an average alone is not sparse"
    assert all(torch.equal(pairs[name], before[name]) for name in set(pairs) - set(pruner.masks))
    assert num_pruned(pruner) == round(0.5 * 1054)
    averaged.update_parameters(model)
    assert all(not pairs[name][~mask].any() for name, mask in pruner.masks.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_copy_may_have_another_dtype_and_nan(dtype):
    model = net()
    pruner = Pruner(model, adamw(model), masks={"out.weight": torch.rand(4, 13) > 0.5})
    twin = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        twin.out.weight.fill_(torch.nan)
    pruner.apply_to(twin)
    assert torch.equal(twin.out.weight == 0, ~pruner.masks["out.weight"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda model: model.hidden, "no 'conv.weight'"),
        (lambda model: nn.Sequential(model, nn.Linear(2, 2)), "no 'conv.weight'"),
        (lambda _: nn.ModuleDict({"conv": nn.Conv2d(1, 4, 3)}), r"conv\.weight .*\(4, 1, 3, 3\).*\(3, 1, 3, 3\)"),
        (lambda model: model.state_dict(), "model.* OrderedDict"),
    ],
)
def test_a_model_that_is_no_copy_is_refused_in_one_line_and_left_alone(other, words):
    model = net()
    pruner = Pruner(model, adamw(model), masks={name: torch.zeros_like(p) > 0 for name, p in masked(model)})
    given = other(net(1))
    before = copy.deepcopy(given if isinstance(given, dict) else given.state_dict())
    with pytest.raises(ValueError, match=words) as raised:
        pruner.apply_to(given)
    assert "\n" not in str(raised.value)
    after = given if isinstance(given, dict) else given.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def masked(model):
    return [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
