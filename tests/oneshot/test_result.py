"""A result counts the model's zeros as they are now, and says in words what was done and what was not."""

import pytest
import torch
from probe_models import convolutions, llama, mlp
from torch import nn

from prunus import BlockTuning, Repair, prune
from prunus.oneshot import Probe


def zeros(result):
    return sum(int((weight.parameter == 0).sum()) for weight in result.level.weights.values())


@pytest.mark.parametrize("repair", ["auto", None])
def test_sparsity_is_that_of_the_model_when_it_is_read(repair):
    case = mlp(torch.float32)
    result = prune(case.model, case.batches, 0.5, repair=repair)
    pruned, masks = result.num_pruned, {name: mask.clone() for name, mask in result.masks.items()}
    assert pruned == zeros(result) == round(0.5 * result.num_weights)
    result.undo_()
    assert result.sparsity == result.num_pruned == 0 and all(layer.sparsity == 0 for layer in result.layers)
    assert repr(result).startswith("Result(0.0000%: 0 of ")
    assert all(torch.equal(result.masks[name], mask) for name, mask in masks.items())
    result.apply_()
    assert result.num_pruned == pruned
    optimizer = torch.optim.SGD(case.model.parameters(), 0.1)
    case.loss(case.model(case.batches[0][0]), case.batches[0][1]).backward()
    optimizer.step()
    assert result.num_pruned == zeros(result) < pruned
    case.model.load_state_dict({name: value + 1 for name, value in case.model.state_dict().items()}, assign=True)
    assert result.num_pruned == sum(int((p == 0).sum()) for p in case.model.parameters() if p.ndim > 1) < pruned


def test_a_search_compares_with_the_strategy_alone_at_the_sparsity_that_it_had():
    from prunus import search
    from prunus.oneshot import Levels, Limit

    case, limit = mlp(), Limit(relative=1.0, better="lower")
    options = {"steps": Levels(0.4, 0.5), "probe": Probe(0.5), "loss": case.loss}
    found = search(case.model, case.batches, lambda _: 1.0, limit, **options)
    assert found.alone_sparsity == pytest.approx(found.sparsity)


@pytest.mark.parametrize("options", [{}, {"score": "wanda", "repair": None}, {"repair": None}], ids=str)
def test_a_result_says_where_its_time_went_and_counts_passes_only_where_there_were_some(options):
    case = mlp(torch.float32)
    result = prune(case.model, case.batches, 0.5, **options)
    text = str(result)
    assert "weights in 3 layers are zero" in text and " 0 " not in text and "\n" not in repr(result)
    assert ("passes of one sample" in text) == bool(result.cost.forwards)
    assert all(
        f"{part} {result.cost.parts[part]:.1f}" in text
        for part in sorted(result.cost.parts, key=result.cost.parts.get)[-3:]
    )
    probed = prune(mlp(torch.float32).model, case.batches, 0.5, probe=Probe(0.5), loss=case.loss)
    assert f"passes of one sample: {probed.cost.passes:,} with gradients" in str(probed)


def tuned(model, batches, **options):
    repair = Repair(tune=BlockTuning(epochs=1, whole_epochs=1, batch=4))
    return str(prune(model, batches, 0.5, repair=repair, **options))


def test_tuning_says_by_which_loss_and_what_was_left_out():
    case = llama(torch.float32)
    text = tuned(case.model, case.batches)
    assert "of 3 blocks nearer to the dense ones" in text and "took its KL divergence from" in text
    assert "not tuned" not in text
    case = llama(torch.float32)
    text = tuned(case.model, case.batches, exclude="model.layers.0.*")
    assert "Blocks that were not tuned: 1 of 3, as nothing was pruned in them or before." in text
    model, batches = convolutions()
    assert "took its mean square from" in tuned(model, batches)


class Crossed(nn.Module):
    """Blocks that read more than what the one before gives."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        first = self.blocks[0](x)
        return self.blocks[2](torch.tanh(self.blocks[1](torch.tanh(first)))) + first


def test_a_model_whose_blocks_cannot_be_tuned_says_so():
    torch.manual_seed(0)
    text = tuned(Crossed(), [torch.randn(30, 6)])
    assert "No block was tuned by itself: the model does not run as a chain of blocks." in text
    assert "Tuning the whole model" in text


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool], ids=str)
def test_tokens_with_a_mask_as_their_target_are_refused(dtype):
    case = llama(torch.float32)
    ids = torch.randint(0, 31, (4, 9))
    for mask in (torch.ones_like(ids), (ids > 3)):
        with pytest.raises(ValueError, match=r"^[^\n]*looks like an attention mask[^\n]*give a dict"):
            prune(case.model, [(ids, mask.to(dtype))], 0.5)
    assert prune(case.model, [(ids, ids)], 0.5).sparsity == 0.5
