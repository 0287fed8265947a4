"""Models have the published sizes, read the data they are built for, and refuse other data in one line."""

import os
from pathlib import Path

import pytest
import torch
from covering import each_once

from prunus.lab.data import ImageShape, TokenShape
from prunus.lab.models import GPT, MODELS, build, in_field

GPT2 = TokenShape(vocab_size=50257, context=1024)
TOY = TokenShape(vocab_size=11, context=9)
CIFAR = ImageShape(channels=3, size=32, num_classes=10)
TOKENS = [name for name, kind in MODELS.items() if kind == "tokens"]
IMAGES = [name for name, kind in MODELS.items() if kind == "images"]
CHECKPOINT = Path(os.environ.get("PRUNUS_DATA", "")) / "models" / "resnet20_cifar10.th"


def count(name, shape, within=""):
    with torch.device("meta"):
        model = build(name, shape)
    return sum(weight.numel() for key, weight in model.named_parameters() if key.startswith(within))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("gpt2", GPT2, 124_439_808),
        ("gpt2-medium", GPT2, 354_823_168),
        ("gpt2-large", GPT2, 774_030_080),
        ("gpt2-xl", GPT2, 1_557_611_200),
        ("lenet5", ImageShape(1, 28, 10), 61_706),
        ("resnet20", CIFAR, 269_722),
        ("resnet18", CIFAR, 11_173_962),
        ("resnet50", CIFAR, 23_520_842),
        ("resnet18", ImageShape(3, 224, 1000), 11_689_512),
        ("resnet50", ImageShape(3, 224, 1000), 25_557_032),
    ],
)
def test_parameter_counts_are_the_published_ones(name, shape, expected):
    assert count(name, shape) == expected


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-tiny", 0.8), ("gpt2-mini", 10.6), ("gpt2-small8", 25.2), ("gpt2", 85.0)]
)
def test_block_weights_have_their_scale(name, millions):
    assert count(name, GPT2, within="blocks.") / 1e6 == pytest.approx(millions, rel=0.02)


def toy(**changes):
    torch.manual_seed(0)
    return GPT(**{"num_layers": 2, "num_heads": 3, "width": 24, "shape": TOY} | changes)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_later_token_changes_no_earlier_logit(length):
    model, tokens = toy(), torch.randint(11, (3, length))
    logits = model(tokens)
    assert logits.shape == (3, length, 11)
    for at in range(length):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 1) % 11
        changed = (model(other) - logits).abs().amax(dim=(0, 2))
        assert (changed[:at] < 1e-6).all()
        assert (changed[at:] > 1e-6).all()


def test_the_same_token_differs_by_its_position():
    logits = toy()(torch.zeros(1, 9, dtype=torch.long))[0]
    assert (logits[1:] - logits[:-1]).abs().amax(dim=1).min() > 1e-6


def test_the_head_is_the_embedding_after_a_step_and_a_load():
    model = toy()
    assert model.head.weight is model.embedding.weight
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    assert model.head.weight is model.embedding.weight


def test_initial_weights_have_the_spread_of_gpt2():
    torch.manual_seed(0)
    model = build("gpt2-tiny", TokenShape(500, 256))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif weight.ndim == 2:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert weight.std().item() == pytest.approx(0.02 / 8**0.5 if residual else 0.02, rel=0.05), name
        else:
            assert (weight == 1).all(), name


def test_too_long_an_input_and_a_ragged_head_are_refused():
    with pytest.raises(ValueError, match="at most 9 tokens, got 10"):
        toy()(torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(ValueError, match="multiple of num_heads, got 25 and 3"):
        toy(width=25)


def test_a_gpt_takes_another_width_and_depth():
    model = build("gpt2-tiny", TOY, width=96, layers=2)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)
    assert model.embedding.weight.shape == (11, 96) and len(model.blocks) == 2
    with pytest.raises(ValueError, match="multiple of the head width 32, got 100"):
        build("gpt2-tiny", TOY, width=100)
    with pytest.raises(ValueError, match=r"only GPTs take a width .* not lenet5"):
        build("lenet5", ImageShape(1, 8, 10), layers=2)


@pytest.mark.parametrize("name", TOKENS[:2])
def test_token_models_give_a_logit_for_each_token(name):
    assert build(name, TOY)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    each_once(["lenet5", "resnet18", "resnet20", "resnet50"], [1, 2, 3], [8, 28, 31, 32, 65]),
)
def test_image_models_take_images_of_any_size(name, channels, size):
    is_large = name == "resnet50" or (name == "resnet18" and size != 65)
    with torch.device("meta" if is_large else "cpu"):  # shapes cost nothing there
        model = build(name, ImageShape(channels, size, 7))
        logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    assert is_large or logits.isfinite().all()


@pytest.mark.parametrize("size", [28, 29, 31, 32])
def test_lenet_centres_images_in_its_field_unchanged(size):
    images = torch.randn(2, 1, size, size)
    field, before = in_field(images), (32 - size) // 2
    inner = slice(before, before + size)
    assert field.shape == (2, 1, 32, 32)
    assert torch.equal(field[:, :, inner, inner], images)
    assert field.count_nonzero() == images.count_nonzero()


@pytest.mark.parametrize("name", [n if n != "resnet50" else pytest.param(n, marks=pytest.mark.slow) for n in IMAGES])
def test_every_weight_of_an_image_model_has_a_gradient(name):
    torch.manual_seed(0)
    model = build(name, CIFAR)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert [key for key, weight in model.named_parameters() if not weight.grad.any()] == []


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("gpt3", TOY, ["'gpt3'", *MODELS]),
        ("", CIFAR, ["''", *MODELS]),
        ("gpt2", CIFAR, ["gpt2 reads tokens", "holds images", *IMAGES]),
        ("lenet5", TOY, ["lenet5 reads images", "holds tokens", *TOKENS]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(name, shape, words):
    with pytest.raises(ValueError) as refusal:
        build(name, shape)
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.skipif(not CHECKPOINT.is_file(), reason="PRUNUS_DATA names no folder with models/resnet20_cifar10.th")
def test_resnet20_loads_the_published_checkpoint_and_has_its_shortcuts():
    state = torch.load(CHECKPOINT, weights_only=True, map_location="cpu")["state_dict"]
    model = build("resnet20", CIFAR).eval()
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})

    shortcut = model.layer2[0].downsample(torch.arange(1.0, 65.0).view(1, 16, 2, 2))
    assert shortcut.shape == (1, 32, 1, 1)
    assert shortcut[0, 8:24].flatten().tolist() == [1.0 + 4 * channel for channel in range(16)]
    assert not shortcut[0, :8].any()
    assert not shortcut[0, 24:].any()
