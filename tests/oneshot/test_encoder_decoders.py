"""Encoder-decoders are run on what their labels make of the decoder's inputs, by every method after training."""

import copy

import pytest
import torch
from covering import each_once, quickly
from families import build, inputs

from prunus import prune

NAMES = ("t5", "bart", "marian", "whisper")


@torch.no_grad()
def reference_norms(model, batch):
    """L2 norms of what every linear layer and convolution reads, sample by sample, by hooks."""
    squares = {}

    def add(module, args):
        x = args[0].double()
        if isinstance(module, torch.nn.Conv1d):
            x = torch.nn.functional.pad(x, module._reversed_padding_repeated_twice)
            x = x.unfold(-1, *module.kernel_size, *module.stride).movedim(1, -2).flatten(0, -3)  # (place, in, kernel)
            found = x.square().sum(0)
        else:
            found = x.flatten(0, -2).square().sum(0)
        squares[module] = squares.get(module, 0) + found

    kinds = (torch.nn.Linear, torch.nn.Conv1d)
    handles = [m.register_forward_pre_hook(add) for m in model.modules() if isinstance(m, kinds)]
    for i in range(len(next(iter(batch.values())))):
        model(**{name: array[i : i + 1] for name, array in batch.items()})
    for handle in handles:
        handle.remove()
    return {name: squares[m].sqrt() for name, m in model.named_modules() if m in squares}


@pytest.mark.parametrize(("name", "form"), each_once(NAMES, ["labels", "pair"]))
def test_wandas_masks_are_those_of_a_plain_reference(name, form, tmp_path):
    model, batch = build(name), inputs(name)
    norms, dense = reference_norms(model, batch), copy.deepcopy(model)
    given = batch if form == "labels" else ({k: v for k, v in batch.items() if k != "labels"}, batch["labels"])
    result = prune(model, [given], 0.5, score="wanda", repair=None)
    assert len(result.layers) > 8
    for layer in result.layers:
        weight = dense.get_parameter(layer.name)
        scores = (weight.abs() * norms[layer.name.removesuffix(".weight")]).flatten(1)
        lost = scores.argsort(1)[:, : round(scores.shape[1] / 2)]
        expected = torch.ones_like(scores, dtype=torch.bool).scatter(1, lost, False).view(weight.shape)
        assert torch.equal(model.get_parameter(layer.name) != 0, expected), layer.name


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(NAMES, "t5", "whisper"))
def test_they_are_repaired(name):
    model, batch = build(name), inputs(name)
    before = model(**batch).logits
    result = prune(model, [batch], 0.3)
    assert result.sparsity == pytest.approx(0.3, abs=0.01) and not [x for x in result.layers if x.not_repaired]
    repaired = (model(**batch).logits - before).norm()
    with result.masks_alone():
        assert repaired < (model(**batch).logits - before).norm()


@pytest.mark.parametrize("name", NAMES)
def test_their_gradients_are_read(name):
    model, batch = build(name), inputs(name)
    assert prune(model, [batch], 0.5, score="fisher", repair=None).sparsity == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), each_once(NAMES, ["labels", "pair"]))
def test_a_loss_of_ones_own_sees_the_outputs_that_the_labels_lead_to(name, form):
    def loss(output, labels):
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    masks = []
    for own in (None, loss):
        model, batch = build(name), inputs(name)
        pair = ({k: v for k, v in batch.items() if k != "labels"}, batch["labels"])
        result = prune(model, [batch if form == "labels" else pair], 0.5, score="fisher", loss=own, repair=None)
        masks.append({name: mask.clone() for name, mask in result.masks.items()})
    agree = [(masks[0][key] == masks[1][key]).float().mean() for key in masks[0]]
    assert min(agree) > 0.98  # but for ties and rounding
