"""Units of models without a configuration: those that can go, and only those, are in the plan; the model stays."""

from copy import deepcopy

import pytest
import torch
from plain_attentions import (
    HEADS,
    WIDTH,
    AllHeadNorm,
    Block,
    EmbedDim,
    Fused,
    Grouped,
    Lucid,
    NanoGPT,
    PositionBias,
    Timm,
    Torch,
)
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
from prunus.oneshot.cuts import Cuts
from prunus.oneshot.plain_units import plain_plan
from prunus.oneshot.unit_check import UnitCheck
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


ATTENTIONS = {
    "[q|k|v]": (Fused, "proj"),
    "by head": (lambda: Fused("by head"), "proj"),
    "as wide as the stream": (lambda: Fused(dim=3), "proj"),
    "timm": (Timm, "proj"),
    "embed_dim": (EmbedDim, "out_proj"),
    "groups": (Grouped, "wo"),
    "groups with a layer for keys and values": (lambda: Grouped(True), "wo"),
    "pairs in groups": (lambda: Grouped(True, 4, 2), "wo"),
    "lucidrains": (Lucid, "to_out.0"),
    "position biases": (PositionBias, "proj"),
}
TIED = {
    "timm before": lambda: Timm(is_old=True),
    "nanoGPT": NanoGPT,
    "a norm over all heads": AllHeadNorm,
    "torch": Torch,
}


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


def with_attention(attention, dtype=torch.float64):
    """A model of two blocks, and tokens for it."""
    torch.manual_seed(1)
    return nn.Sequential(Block(attention()), Block(attention())).to(dtype).eval(), torch.randn(2, 7, WIDTH, dtype=dtype)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_heads_go_with_all_that_belongs_to_them_whatever_the_layout(name):
    attention, consumer = ATTENTIONS[name]
    model, x = with_attention(attention)
    before = snapshot(model)
    plan = plain_plan(Calibration(model, [x]))
    assert_same(before, snapshot(model))
    names = [f"{block}.attention.{consumer}" if part else f"{block}.mlp.2" for block in (0, 1) for part in (1, 0)]
    assert [layer.consumer for layer in plan.layers] == [f"{name}.weight" for name in names]
    assert [layer.kind for layer in plan.layers] == ["heads", "neurons"] * 2
    gone, left = some_units(plan)
    expected = zeroed(model, gone)(x)
    Cuts.of_units(model, gone, plan.numbers(left)).apply_()
    torch.testing.assert_close(model(x), expected)
    for layer in plan.layers:
        assert (
            model.get_parameter(layer.consumer).shape[1]
            == left[layer.field] * layer.slices[layer.consumer].places[0].numel()
        )


@pytest.mark.parametrize("name", TIED)
def test_heads_that_are_tied_to_the_width_or_mixed_stay_and_a_line_says_so(name):
    model, x = with_attention(TIED[name])
    plan = plain_plan(Calibration(model, [x]))
    assert {layer.kind for layer in plan.layers} == {"neurons"}
    assert list(plan.reasons) == ["heads"]
    assert "width" in plan.reasons["heads"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["[q|k|v]", "by head"])
def test_the_layout_is_known_where_heads_add_little_to_the_outputs(name, dtype):
    model, x = with_attention(ATTENTIONS[name][0], dtype)
    for block in model:
        with torch.no_grad():
            block.attention.proj.weight.mul_(1e-4)
    layer = plain_plan(Calibration(model, [x])).layers[0]
    first = layer.slices["0.attention.qkv.weight"].places[0].tolist()
    assert first == (list(range(15)) if name == "by head" else [*range(5), *range(20, 25), *range(40, 45)])


def test_blocks_may_lose_different_numbers_of_heads():
    model, x = with_attention(Fused)
    plan = plain_plan(Calibration(model, [x]))
    heads = [layer for layer in plan.layers if layer.kind == "heads"]
    gone = {heads[0]: torch.tensor([0, 2, 3]), heads[1]: torch.tensor([1])}
    expected = zeroed(model, gone)(x)
    Cuts.of_units(
        model, gone, plan.numbers({layer.field: HEADS - len(units) for layer, units in gone.items()})
    ).apply_()
    torch.testing.assert_close(model(x), expected)
    assert [block.attention.num_heads for block in model] == [1, 3]


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_something_else_reads_or_mixes_are_refused(name):
    model, x = made(name, REFUSED)
    plan = plain_plan(Calibration(model, [x]))
    consumers = [layer.consumer for layer in plan.layers]
    assert consumers == (["0.conv2.weight"] if name == "a residual stream" else [])
    assert consumers or set(plan.reasons) == {"neurons", "heads"}


@pytest.mark.parametrize("name", ["torchvision", "gpt", "mobile", "gated"])
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
@pytest.mark.parametrize("name", ["torchvision", "gpt", "timm"])
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
    model, x = made("torchvision")
    plans = [plain_plan(Calibration(model, [x], offload=offload)) for offload in (None, "cpu")]
    assert [layer.consumer for layer in plans[0].layers] == [layer.consumer for layer in plans[1].layers]


def test_units_that_layers_share_by_a_table_are_refused():
    """Each layer loses other heads, so that no table fits both."""
    model, x = with_attention(PositionBias)
    model[1].attention.table = model[0].attention.table
    plan = plain_plan(Calibration(model, [x]))
    assert {layer.kind for layer in plan.layers} == {"neurons"}


def one_layer(num, producer, consumer, rows=None):
    rows = torch.arange(num)[:, None] if rows is None else rows
    slices = {f"{producer}.weight": Slices(0, rows), f"{producer}.bias": Slices(0, rows)}
    slices[f"{consumer}.weight"] = Slices(1, torch.arange(num)[:, None])
    return UnitLayer("neurons", "width", f"{consumer}.weight", slices)


def fault_of(model, x, layer, units=(2, 5)):
    return UnitCheck.of(Calibration(model, [x])).fault({layer: torch.tensor(units)}, [])


def test_the_check_finds_no_fault_in_right_units_and_one_in_others():
    model, x = made("mlp")
    assert fault_of(model, x, one_layer(12, "first", "last")) == ""
    assert fault_of(model, x, one_layer(12, "first", "last", torch.arange(12).roll(1)[:, None]))
    without_rows = one_layer(12, "first", "last")
    del without_rows.slices["first.weight"]
    assert fault_of(model, x, without_rows)
    with torch.no_grad():
        model.first.weight[3] = torch.nan
    with pytest.raises(ValueError, match="Between gives NaN for the first sample"):
        fault_of(model, x, one_layer(12, "first", "last"))


def test_a_forward_may_refuse_its_shapes_in_any_way():
    class Asserting(Between):
        def forward(self, x):
            assert self.first.weight.shape[0] == 12
            return super().forward(x)

    model, x = Asserting(nn.ReLU()), ROWS
    assert fault_of(model, x, one_layer(12, "first", "last"))
    assert not plain_plan(Calibration(model, [x])).layers
