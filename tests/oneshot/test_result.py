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


@pytest.mark.parametrize("options", [{}, {"score": "wanda", "repair": None}, {"repair": None}], ids=str)
def test_a_result_says_where_its_time_went_and_counts_passes_only_where_there_were_some(options):
    case = mlp(torch.float32)
    result = prune(case.model, case.batches, 0.5, **options)
    text, parts = str(result), result.cost.parts
    assert "weights in 3 layers are zero" in text and " 0 " not in text and "\n" not in repr(result)
    assert ("passes of one sample" in text) == bool(result.cost.forwards)
    assert all(f"{part} {parts[part]:.1f}" in text for part in sorted(parts, key=parts.get)[-3:])
    probed = prune(mlp(torch.float32).model, case.batches, 0.5, probe=Probe(0.5), loss=case.loss)
    assert f"passes of one sample: {probed.cost.passes:,} with gradients" in str(probed)


def tuned(model, batches, **options):
    repair = Repair(tune=BlockTuning(epochs=1, whole_epochs=1, batch=4))
    return str(prune(model, batches, 0.5, repair=repair, **options))


def test_tuning_says_by_which_loss_and_what_was_left_out():
    case, other = llama(torch.float32), llama(torch.float32)
    text = tuned(case.model, case.batches)
    assert "of 3 blocks nearer to the dense ones" in text and "took its KL divergence from" in text
    assert "not tuned" not in text
    text = tuned(other.model, case.batches, exclude="model.layers.0.*")
    assert "Blocks that were not tuned: 1 of 3, as nothing was pruned in them or before." in text
    assert "took its mean square from" in tuned(*convolutions())
    text = tuned(Crossed(), [torch.randn(30, 6)])
    assert "No block was tuned by itself: the model does not run as a chain of blocks." in text
    assert "Tuning the whole model" in text


class Crossed(nn.Module):
    """Blocks that read more than what the one before gives."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        first = self.blocks[0](x)
        return self.blocks[2](torch.tanh(self.blocks[1](torch.tanh(first)))) + first
