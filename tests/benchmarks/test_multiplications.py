"""Multiplications of a model are those of the formulas on paper, and go with the units that go."""

import torch
from torch import nn
from toys import Conv1D

from benchmarks.shrink_study import multiplications
from prunus.lab.data import ImageShape
from prunus.lab.models import build
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.cuts import Cuts
from prunus.oneshot.plain_units import plain_plan

STEM, WITHIN, ACROSS, HEAD = 3 * 16 * 9 * 32**2, 16 * 16 * 9 * 32**2, 16 * 32 * 9 * 16**2, 64 * 10


def test_a_resnet_20_takes_41_million_and_stays_in_training_mode():
    model, x = build("resnet20", ImageShape(3, 32, 10)).train(), torch.randn(1, 3, 32, 32)
    before = model.bn1.running_mean.clone()
    # a first convolution of a stage has half the inputs; channels double as both sides of the image halve
    assert multiplications(model, x) == STEM + 6 * WITHIN + 2 * (ACROSS + 5 * WITHIN) + HEAD == 40_551_040
    assert model.training and torch.equal(before, model.bn1.running_mean)


def test_half_of_the_inner_channels_take_half_of_what_blocks_multiply():
    model, x = build("resnet20", ImageShape(3, 32, 10)), torch.randn(1, 3, 32, 32)
    plan = plain_plan(Calibration(model, [x]))
    gone = {layer: torch.arange(layer.num // 2) for layer in plan.layers}
    left = {layer.field: layer.num // 2 for layer in plan.layers}
    dense = multiplications(model, x)
    Cuts.of_units(model, gone, plan.numbers(left)).apply_()
    assert 2 * multiplications(model, x) == dense + STEM + HEAD


def test_every_kind_of_layer_counts():
    x = torch.randn(1, 6, 8)
    assert multiplications(nn.Linear(8, 5), x) == 6 * 8 * 5
    assert multiplications(Conv1D(5, 8), x) == 6 * 8 * 5
    assert multiplications(nn.Conv1d(6, 4, 3, groups=2), x) == 6 * 4 * 3 * 3
    assert multiplications(nn.ConvTranspose1d(6, 4, 3, groups=2), x) == 8 * 6 * 2 * 3
    assert multiplications(nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)), {"input": x}) == 6 * 50
