"""Units of models without a configuration: those that can go, and only those, are in the plan; the model stays."""

from copy import deepcopy

import pytest
import torch
from plain_models import (
    Between,
    Gated,
    MobileBlock,
    PreActivation,
    Shared,
    SideReader,
    TimmBlock,
    TorchvisionBlock,
    UNet,
    conv3x3,
    images,
    with_statistics,
)
from probe_checks import assert_same, snapshot
from torch import nn
from toys import Conv1D

from prunus.lab.data import ImageShape, TokenShape
from prunus.lab.models import build
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.cut import Cuts
from prunus.oneshot.plain_units import plain_plan
from prunus.oneshot.unit_check import difference, is_right
from prunus.oneshot.units import Slices, UnitLayer

ROWS = torch.randn(3, 6)
MODELS = {
    "resnet20": lambda: (build("resnet20", ImageShape(3, 16, 10)), torch.randn(2, 3, 16, 16)),
    "lenet5": lambda: (build("lenet5", ImageShape(1, 28, 10)), torch.randn(2, 1, 28, 28)),
    "gpt": lambda: (build("gpt2-tiny", TokenShape(50, 32), 64, 3), torch.randint(50, (2, 16))),
    "torchvision": lambda: images(TorchvisionBlock(3, 4), TorchvisionBlock(16, 4), TorchvisionBlock(16, 8, 2)),
    "resnext": lambda: images(TorchvisionBlock(8, 4, groups=2), width=8),
    "timm": lambda: images(TimmBlock(3, 8), TimmBlock(8, 8), TimmBlock(8, 12, 2)),
    "pre-activation": lambda: images(PreActivation(3, 8), PreActivation(8, 8)),
    "mobile": lambda: images(conv3x3(3, 6), MobileBlock(6, 12), MobileBlock(6, 12)),
    "a chain of convolutions": lambda: images(
        conv3x3(3, 7), nn.PReLU(7), nn.MaxPool2d(2), conv3x3(7, 9), nn.BatchNorm2d(9), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(9, 4),
    ),
    "sound": lambda: (
        nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 3)), torch.randn(2, 2, 20)
    ),
    "volumes": lambda: (nn.Sequential(nn.Conv3d(2, 6, 1), nn.ReLU(), nn.Conv3d(6, 3, 3)), torch.randn(2, 2, 4, 4, 4)),
    "mlp": lambda: (Between(nn.Sequential(nn.GELU(), nn.Dropout(0.5))), torch.randn(3, 5, 6)),
    "Conv1D": lambda: (nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(5, 8)), torch.randn(3, 6)),
    "gated": lambda: (Gated(), torch.randn(3, 6)),
    "gated halves": lambda: (Gated("halves"), torch.randn(3, 6)),
    "gated pairs": lambda: (Gated("pairs"), torch.randn(3, 6)),
}  # fmt: skip
CONSUMERS = {
    "resnet20": [f"layer{stage}.{block}.conv2" for stage in (1, 2, 3) for block in range(3)],
    "lenet5": ["conv2", "fc2", "fc3"],
    "gpt": [f"blocks.{block}.mlp.down" for block in range(3)],
    "torchvision": [f"{block}.conv{conv}" for block in range(3) for conv in (2, 3)],
    "resnext": [],
    "timm": [f"{block}.conv2" for block in range(3)],
    "pre-activation": ["0.conv2", "1.conv2"],
    "mobile": ["1.project.0", "2.project.0"],
    "a chain of convolutions": ["3", "7"],
    "sound": ["3"],
    "volumes": ["2"],
    "mlp": ["last"],
    "Conv1D": ["2"],
    "gated": ["down"],
    "gated halves": ["down"],
    "gated pairs": ["down"],
}
REFUSED = {
    "channels that are joined": lambda: (UNet(), torch.randn(1, 3, 8, 8)),
    "a layer that is called twice": lambda: (Shared(), torch.randn(3, 5)),
    "a norm over all units": lambda: (Between(nn.LayerNorm(12)), ROWS),
    "a norm over groups": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1)), torch.randn(1, 3, 4, 4)
    ),
    "a softmax": lambda: (Between(nn.Softmax(-1)), ROWS),
    "another reader": lambda: (SideReader(), ROWS),
    "one unit": lambda: (Between(nn.ReLU(), 1), ROWS),
    "a residual stream": lambda: images(PreActivation(3, 8), nn.BatchNorm2d(8)),
    "one layer": lambda: (nn.Linear(6, 4), ROWS),
}  # fmt: skip


def made(name, models=MODELS, dtype=torch.float64):
    torch.manual_seed(3)
    model, x = models[name]()
    return with_statistics(model).to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x


def some_units(plan):
    """A third of the units of every layer, drawn for each by itself, and how many stay."""
    gone = {layer: torch.randperm(layer.num)[: -(-layer.num // 3)] for layer in plan.layers}
    return gone, {layer.field: layer.num - len(gone[layer]) for layer in plan.layers}


@torch.no_grad()
def zeroed(model, gone):
    """A copy of the model whose consumers read nothing of these units."""
    model = deepcopy(model)
    for layer, units in gone.items():
        slices = layer.slices[layer.consumer]
        model.get_parameter(layer.consumer).index_fill_(slices.dim, slices.places[units].flatten(), 0)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_has_the_layers_whose_units_nothing_else_reads_in_the_order_of_calls(name):
    model, x = made(name)
    plan = plain_plan(Calibration(model, [x]))
    assert [layer.consumer for layer in plan.layers if layer.kind == "neurons"] == [
        f"{module}.weight" for module in CONSUMERS[name]
    ]
    assert ("neurons" in plan.reasons) == (not CONSUMERS[name])
    assert all(layer.field == layer.consumer for layer in plan.layers)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_cut_by_the_plan_computes_what_it_does_where_nothing_reads_the_units(name):
    model, x = made(name)
    plan = plain_plan(Calibration(model, [x]))
    gone, left = some_units(plan)
    expected, dense = zeroed(model, gone)(x), model(x)
    cuts = Cuts.of_units(model, gone, plan.numbers(left))
    cuts.apply_()
    torch.testing.assert_close(model(x), expected)
    for layer in plan.layers:
        path = layer.consumer.removesuffix(".weight")
        assert model.get_parameter(layer.consumer).shape[layer.slices[layer.consumer].dim] % left[layer.field] == 0
        assert f"{path}.num_batches_tracked" not in layer.slices
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
        if isinstance(module, nn.BatchNorm2d):
            assert module.num_features == len(module.weight) == len(module.running_var)
    cuts.undo_()
    assert torch.equal(model(x), dense)


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_something_else_reads_or_mixes_are_refused(name):
    model, x = made(name, REFUSED)
    plan = plain_plan(Calibration(model, [x]))
    consumers = [layer.consumer for layer in plan.layers]
    assert consumers == (["0.conv2.weight"] if name == "a residual stream" else [])
    assert consumers or set(plan.reasons) == {"neurons", "heads"}


@pytest.mark.parametrize("name", ["resnet20", "gpt", "mobile", "gated"])
def test_the_model_is_as_before(name):
    model, x = made(name, dtype=torch.float32)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before, rng = snapshot(model), torch.get_rng_state()
    numbers = [{k: v for k, v in vars(module).items() if type(v) is int} for module in model.modules()]
    parameters = list(model.parameters())
    plain_plan(Calibration(model, [x]))
    assert_same(before, snapshot(model))
    assert torch.equal(rng, torch.get_rng_state())
    assert numbers == [{k: v for k, v in vars(module).items() if type(v) is int} for module in model.modules()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", [3, 4, 7])
def test_an_exception_in_any_pass_leaves_the_model_as_it_was(error, call):
    model, x = made("timm", dtype=torch.float32)
    before, num_calls = snapshot(model), 0

    def fail(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise error

    calibration = Calibration(model, [x])
    handle = model[2].conv2.register_forward_hook(fail)
    with pytest.raises(error):
        plain_plan(calibration)
    handle.remove()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["resnet20", "gpt", "timm"])
def test_rounding_changes_no_decision(name, dtype):
    model, x = made(name, dtype=dtype)
    plan = plain_plan(Calibration(model, [x]))
    neurons = [layer.consumer for layer in plan.layers if layer.kind == "neurons"]
    assert neurons == [f"{module}.weight" for module in CONSUMERS[name]]


def test_weights_that_are_excluded_keep_their_units():
    model, x = made("timm")
    plan = plain_plan(Calibration(model, [x], exclude=["0.conv1", "1.conv2"]))
    assert [layer.consumer for layer in plan.layers] == ["2.conv2.weight"]


def test_an_offloaded_model_has_the_same_plan():
    model, x = made("resnet20")
    plans = [plain_plan(Calibration(model, [x], offload=offload)) for offload in (None, "cpu")]
    assert [layer.consumer for layer in plans[0].layers] == [layer.consumer for layer in plans[1].layers]


def test_a_calibration_may_be_open_already():
    model, x = made("mlp")
    calibration = Calibration(model, [x])
    with calibration.open():
        assert len(plain_plan(calibration).layers) == 1
        assert calibration.is_open


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.slow
def test_resnets_of_the_lab_lose_inner_channels_only(name):
    model, x = build(name, ImageShape(3, 32, 10)), torch.randn(1, 3, 32, 32)
    plan = plain_plan(Calibration(with_statistics(model), [x]))
    inner = [path for path, _ in model.named_modules() if path.endswith((".conv2", ".conv3"))]
    assert [layer.consumer for layer in plan.layers] == [f"{path}.weight" for path in inner]


def one_layer(num, producer, consumer, rows=None):
    rows = torch.arange(num)[:, None] if rows is None else rows
    slices = {f"{producer}.weight": Slices(0, rows), f"{producer}.bias": Slices(0, rows)}
    slices[f"{consumer}.weight"] = Slices(1, torch.arange(num)[:, None])
    return UnitLayer("neurons", "width", f"{consumer}.weight", slices)


def distance_of(model, x, layer, units):
    calibration = Calibration(model, [x])
    with calibration.open():
        return difference(calibration, {layer: torch.tensor(units)}, [])


def test_the_difference_is_that_of_the_outputs_and_of_what_consumers_read():
    model, x = made("mlp")
    assert distance_of(model, x, one_layer(12, "first", "last"), [2, 5]) < 1e-12
    rows = torch.arange(12).roll(1)[:, None]  # of other neurons
    with torch.no_grad():
        model.last.weight.zero_()  # no output shows it
    assert 0.1 < distance_of(model, x, one_layer(12, "first", "last", rows), [2, 5]) < 10


def test_the_difference_is_infinite_where_the_cut_model_does_not_run_or_is_not_finite():
    model, x = made("mlp")
    layer = one_layer(12, "first", "last")
    del layer.slices["first.weight"]
    assert distance_of(model, x, layer, [1]) == torch.inf
    layer = one_layer(12, "first", "last")
    with torch.no_grad():
        model.first.weight[3] = torch.nan
    assert distance_of(model, x, layer, [1]) == torch.inf


def test_layers_of_one_field_need_equally_many_units():
    model = nn.Sequential(Between(nn.ReLU(), 4), nn.Linear(4, 6), Between(nn.ReLU(), 5)).double()
    calibration = Calibration(model, [ROWS.double()])
    layers = [one_layer(4, "0.first", "0.last"), one_layer(5, "2.first", "2.last")]
    with calibration.open():
        assert not is_right(calibration, layers, lambda left: [])
        assert all(is_right(calibration, [layer], lambda left: []) for layer in layers)
