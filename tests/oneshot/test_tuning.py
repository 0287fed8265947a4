"""After a repair blocks and the whole model learn what the dense one computes, or are left alone."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from probe_checks import assert_same, snapshot, zeros
from probe_models import cnn, convolutions, llama
from torch import nn
from torch.distributions import Bernoulli, Categorical, kl_divergence

from prunus import BlockTuning, Repair, prune

TOKENS = torch.randint(0, 31, (24, 12), generator=torch.Generator().manual_seed(0))


def test_tuning_lowers_the_error_of_blocks_on_held_out_samples_or_is_undone(tmp_path):
    models, results, counts = [], [], []
    masks = Repair(iterations=0, refine=0)  # there is much to learn
    tuned = replace(masks, tune=BlockTuning(lr=1e-3, whole_epochs=0, batch=4))
    for options in ({"repair": masks}, *[{"repair": tuned, "state": tmp_path / "state"}] * 2):
        case = llama(torch.float32, num_layers=2)
        before = snapshot(case.model)
        results.append(prune(case.model, [TOKENS], 0.6, **options))
        counts.append(results[-1].num_pruned)
        models.append(deepcopy(case.model))
        results[-1].undo_()
        assert_same(before, snapshot(case.model))
    plain, learned, resumed = models
    assert (
        not results[0].level.tuned and sorted(results[1].level.tuned) == [0, 1] and results[1].level.tuned_whole is None
    )
    assert any(found.helped for found in results[1].level.tuned.values())
    assert not torch.equal(plain.model.layers[0].input_layernorm.weight, learned.model.layers[0].input_layernorm.weight)
    assert torch.equal(plain.model.norm.weight, learned.model.norm.weight)
    assert all(torch.equal(a, b) for a, b in zip(learned.parameters(), resumed.parameters(), strict=True))
    assert counts == [sum(zeros(learned, results[1].masks).values())] * 3


@pytest.mark.parametrize(
    ("dtype", "again"), [(torch.float32, 0), pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow)]
)  # and other ways to the same bits
def test_the_whole_model_learns_the_dense_distribution_or_is_left_alone(dtype, again, tmp_path):
    many = torch.randint(0, 31, (96, 12), generator=torch.Generator().manual_seed(1))  # of fewer not all learn to help
    weights = []
    for offload, state in ((None, None), ("cpu", "state"), (None, "state"))[: 1 + again]:
        case = llama(dtype, num_layers=2)
        before, embedding = snapshot(case.model), case.model.get_input_embeddings().weight.clone()
        repair = Repair(tune=BlockTuning(epochs=0, whole_epochs=2, whole_lr=2e-3, batch=4))
        state = state and tmp_path / state
        result = prune(case.model, [many], 0.6, repair=repair, offload=offload, state=state)
        assert not result.level.tuned and result.level.tuned_whole.helped
        assert result.num_pruned == sum(zeros(case.model, result.masks).values())
        assert not torch.equal(case.model.model.norm.weight, torch.ones_like(case.model.model.norm.weight))
        assert torch.equal(case.model.get_input_embeddings().weight, embedding)
        weights.append(deepcopy([*case.model.parameters()]))
        result.undo_()
        assert_same(before, snapshot(case.model))
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))
    case, plain = llama(dtype, num_layers=2), llama(dtype, num_layers=2)
    far_too_fast = Repair(tune=BlockTuning(epochs=1, lr=1e3, whole_epochs=1, whole_lr=1e3))
    result = prune(case.model, [TOKENS], 0.6, repair=far_too_fast)
    prune(plain.model, [TOKENS], 0.6)
    assert not any(found.helped for found in (*result.level.tuned.values(), result.level.tuned_whole))
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), plain.model.parameters(), strict=True))


def test_outputs_that_are_no_logits_are_tuned_to_be_equal_and_classes_to_be_alike():
    for make in (cnn, convolutions):
        case = make()
        model, batches = case if isinstance(case, tuple) else (case.model, case.batches)
        before = snapshot(model)
        result = prune(model, batches, 0.9, repair=Repair(tune=BlockTuning(whole_epochs=2, whole_lr=1e-3)))
        assert result.level.tuned_whole.helped and result.num_pruned == sum(zeros(model, result.masks).values())
        assert result.level.tuned_whole.loss == ("KL divergence" if make is cnn else "mean square")
        result.undo_()
        assert_same(before, snapshot(model))


@pytest.mark.parametrize(("num", "loss"), [(5, "KL divergence"), (1, "KL divergence of single logits")])
def test_segmentation_learns_over_its_classes_and_a_single_logit_as_a_bernoulli(num, loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, num, 1)).double()
    dense, x = deepcopy(model), torch.randn(20, 2, 6, 7, dtype=torch.float64)
    labels = torch.randint(0, max(2, num), (20, 6, 7))
    repair = Repair(iterations=0, refine=0, tune=BlockTuning(epochs=0, whole_epochs=0))
    prune(masked := deepcopy(model), [(x, labels)], 0.7, repair=repair)
    logits = [each(x[9::10]).detach() for each in (dense, masked)]
    kind = Bernoulli if num == 1 else Categorical
    both = [kind(logits=each.movedim(1, -1)) for each in logits]
    result = prune(
        model, [(x, labels)], 0.7, repair=replace(repair, tune=BlockTuning(0, whole_epochs=4, whole_lr=1e-2))
    )
    assert result.level.tuned_whole.before == pytest.approx(kl_divergence(*both).mean().item())
    assert result.level.tuned_whole.helped and result.level.tuned_whole.loss == loss


def crowded(model, limit):
    """Memory that holds the gradients of at most so many samples."""

    def check(_, __, options):
        if torch.is_grad_enabled() and len(options["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.slow
def test_tuning_takes_smaller_passes_where_memory_runs_out():
    models = crowded(llama(num_layers=2).model, 1), llama(num_layers=2).model
    for model in models:
        prune(model, [TOKENS], 0.6, repair=Repair(tune=BlockTuning(epochs=1, whole_epochs=1)))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_model_too_large_to_be_tuned_as_a_whole_is_left_as_repaired():
    model, other = crowded(llama(num_layers=2).model, 0), llama(num_layers=2).model
    with pytest.warns(UserWarning, match="too little memory to tune the model as a whole"):
        result = prune(model, [TOKENS], 0.6, repair=Repair(tune=BlockTuning(epochs=0)))
    prune(other, [TOKENS], 0.6)
    assert result.level.tuned_whole is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
