"""Rules for tau, stored ratios, and candidates without evidence."""

from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_models import entropy, llama, mlp
from torch import nn

from prunus import Global, PerLayer, PerRow, prune
from prunus.oneshot import Probe

SCHEDULES = ["joint", "sequential", "block"]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "select"), zip(SCHEDULES, [Global(), PerLayer(), PerRow()], strict=True), ids=str)
def test_tau_by_target_ends_at_the_sparsity_exactly(schedule, select):
    case, options = llama(num_layers=2), {"score": "wanda", "select": select}
    alone = prune(deepcopy(case.model), case.batches, 0.5, **options, repair=None)
    result = prune(case.model, case.batches, 0.5, **options, probe=Probe("target", schedule=schedule))
    assert result.num_pruned == alone.num_pruned
    assert any(not torch.equal(result.masks[name], alone.masks[name]) for name in alone.masks)
    if schedule == "sequential":
        assert [a.num_pruned for a in result.layers] == [b.num_pruned for b in alone.layers]


@pytest.mark.parametrize("tau", [0.0, 0.1, 3.0, "adaptive", {"0.*": 0.2, "*": 0.01}, [0.0, 0.5, 0.1]], ids=str)
def test_another_tau_from_stored_ratios_is_that_of_a_new_probe(tau):
    case = mlp()
    again = deepcopy(case.model)
    first = prune(case.model, case.batches, 0.5, probe=Probe(0.05, schedule="joint"), loss=case.loss)
    second = prune(again, case.batches, 0.5, probe=Probe(tau, schedule="joint"), loss=case.loss)
    first.retake_(tau)
    assert first.layers == second.layers
    for (name, a), b in zip(case.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    first.undo_()
    assert all(bool(p.count_nonzero() == p.numel()) for p in case.model.parameters())


def test_tau_may_differ_by_layer_and_adapts_to_the_size():
    case = mlp()
    result = prune(case.model, case.batches, 0.5, probe=Probe("adaptive", base=0.5), loss=case.loss)
    sizes = {layer.name: layer.num_weights for layer in result.layers}
    mean = sum(sizes.values()) / 3
    assert {layer.name: layer.tau for layer in result.layers} == pytest.approx(
        {n: 0.5 * (s / mean) ** 0.5 for n, s in sizes.items()}
    )
    result = prune(mlp().model, case.batches, 0.5, probe=Probe({"2.*": 0.3, "*": 1e9}), loss=case.loss)
    assert [layer.tau for layer in result.layers] == [1e9, 0.3, 1e9]
    assert result.layers[0].num_pruned == result.layers[0].num_candidates


class Dead(nn.Module):
    """Two hidden units whose gradient is zero for every sample."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.up.bias[:2] = -1e6

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.parametrize(("policy", "schedule"), each_once(["prune", "keep"], SCHEDULES))
def test_a_weight_without_any_gradient_follows_the_policy_and_is_counted(policy, schedule):
    model, batches = Dead(), [(torch.randn(5, 4), torch.randint(0, 3, (5,)))]
    probe = Probe(1e6, schedule=schedule, zero_gradient=policy)
    up, down = prune(model, batches, 0.6, select=PerLayer(), probe=probe, loss=entropy).layers
    assert up.num_zero_gradient > 0 and down.num_zero_gradient > 0
    assert up.num_pruned == up.num_candidates - (up.num_zero_gradient if policy == "keep" else 0)


@pytest.mark.parametrize(("schedule", "bad"), each_once(SCHEDULES, [float("nan"), float("inf")]))
def test_a_gradient_that_is_not_finite_keeps_its_weight(schedule, bad):
    case = mlp(torch.float32)
    case.model[1] = nn.Tanh()  # a unit that is off would pass zero on, whatever comes back
    assert any((target == 2).any() for _, target in case.batches)
    dense = deepcopy(case.model)

    def loss(output, target):
        return entropy(output, target) * (bad if target[0] == 2 else 1.0)

    result = prune(case.model, case.batches, 0.5, probe=Probe(1e9, schedule=schedule), loss=loss)
    assert result.num_pruned == 0 and all(x.num_not_finite == x.num_candidates for x in result.layers)
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), dense.parameters(), strict=True))


def test_tau_by_name_or_list_must_cover_the_weights():
    case = mlp()
    for tau, said in (
        ({"0.*": 1.0, "4.*": 1.0}, r"2\.weight"),
        ([1.0, 2.0], "3 weights, got 2"),
        ({"first.*": 1.0, "*": 0.1}, r"has the pattern 'first\.\*', which matches none of: 0\.weight"),
    ):
        with pytest.raises(ValueError, match=said):
            prune(case.model, case.batches, 0.5, probe=Probe(tau), loss=entropy)
