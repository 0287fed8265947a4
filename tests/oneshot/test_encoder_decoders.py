"""Encoder-decoders are run on what their labels make of the decoder's inputs, by every method after training."""

import copy

import pytest
import torch
from covering import each_once
from families import build, inputs

from prunus import prune

NAMES = ("t5", "bart", "marian", "whisper")


def given(batch, form):
    """Labels among the inputs, or as the second of a pair."""
    return batch if form == "labels" else ({k: v for k, v in batch.items() if k != "labels"}, batch["labels"])


@torch.no_grad()
def reference_norms(model, batch):
    """L2 norms of what every linear layer and convolution reads, sample by sample, by hooks."""
    squares = {}

    def add(module, args):
        x = args[0].double().flatten(0, -2)
        if isinstance(module, torch.nn.Conv1d):
            x = torch.nn.functional.pad(args[0].double(), module._reversed_padding_repeated_twice)
            x = x.unfold(-1, *module.kernel_size, *module.stride).movedim(1, -2).flatten(0, -3)  # (place, in, kernel)
        squares[module] = squares.get(module, 0) + x.square().sum(0)

    kinds = (torch.nn.Linear, torch.nn.Conv1d)
    handles = [m.register_forward_pre_hook(add) for m in model.modules() if isinstance(m, kinds)]
    for i in range(len(next(iter(batch.values())))):
        model(**{name: array[i : i + 1] for name, array in batch.items()})
    for handle in handles:
        handle.remove()
    return {name: squares[m].sqrt() for name, m in model.named_modules() if m in squares}


@pytest.mark.parametrize(("name", "form"), each_once(NAMES, ["labels", "pair"], one_of=2))
def test_wandas_masks_are_those_of_a_plain_reference(name, form):
    model, batch = build(name), inputs(name)
    norms, dense = reference_norms(model, batch), copy.deepcopy(model)
    result = prune(model, [given(batch, form)], 0.5, score="wanda", repair=None)
    assert len(result.layers) > 8
    for layer in result.layers:
        weight = dense.get_parameter(layer.name)
        scores = (weight.abs() * norms[layer.name.removesuffix(".weight")]).flatten(1)
        lost = scores.argsort(1)[:, : round(scores.shape[1] / 2)]
        expected = torch.ones_like(scores, dtype=torch.bool).scatter(1, lost, False).view(weight.shape)
        assert torch.equal(model.get_parameter(layer.name) != 0, expected), layer.name


@pytest.mark.parametrize(("name", "form"), each_once(NAMES, ["labels", "pair"], one_of=2))
def test_gradients_are_read_and_a_loss_of_ones_own_sees_what_the_labels_lead_to(name, form):
    def loss(output, labels):
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    masks = []
    for own in (None, loss):
        model, batch = build(name), given(inputs(name), form)
        result = prune(model, [batch], 0.5, score="fisher", loss=own, repair=None)
        assert result.sparsity == pytest.approx(0.5, abs=0.01)
        masks.append(dict(result.masks))
    agree = [(masks[0][key] == masks[1][key]).float().mean() for key in masks[0]]
    assert min(agree) > 0.98  # but for ties and rounding
