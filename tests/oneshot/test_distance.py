"""Outputs are compared as distributions where they are logits, over the dimension of their classes, else as numbers."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

from prunus.oneshot.distance import Distance, distance_of

DRAW = torch.Generator().manual_seed(0)
CLASSES, LAST = Distance("classes", 1), Distance("classes")
SINGLE, NUMBERS = Distance("bernoulli"), Distance()


def numbers(*shape, below=5):
    return torch.randint(0, below, shape, generator=DRAW)


def floats(*shape):
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "distance"), [((3, 4, 5, 6), CLASSES), ((3, 7, 4), LAST), ((1, 2), LAST)], ids=str)
def test_classes_are_compared_by_their_divergence_over_their_own_dimension(shape, distance, dtype):
    found, expected = (4 * floats(*shape).to(dtype) for _ in range(2))
    both = [Categorical(logits=each.double().movedim(distance.dim, -1)) for each in (expected, found)]
    torch.testing.assert_close(distance(found, expected).double(), kl_divergence(*both).mean(), rtol=1e-4, atol=1e-6)
    assert abs(float(distance(found, found))) < 1e-6


@pytest.mark.parametrize(("shape", "distance"), [((3, 4, 5, 6), CLASSES), ((3, 7, 4), LAST), ((1, 2), LAST)], ids=str)
def test_the_gradient_of_a_divergence_is_the_difference_of_the_probabilities(shape, distance):
    found, expected = (2 * floats(*shape)).requires_grad_(), 2 * floats(*shape)
    (3 * distance(found, expected)).backward()
    dim, places = distance.dim, found.numel() / found.shape[distance.dim]
    torch.testing.assert_close(found.grad, (found.softmax(dim) - expected.softmax(dim)).detach() * 3 / places)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 1, 3, 3), (3, 5)], ids=str)
def test_a_single_logit_is_compared_as_a_bernoulli_and_learns(shape):
    expected, found = 3 * floats(*shape), floats(*shape).requires_grad_()
    loss = SINGLE(found, expected)
    both = (Bernoulli(logits=each) for each in (expected, found.detach()))
    torch.testing.assert_close(loss.detach(), kl_divergence(*both).mean())
    loss.backward()
    torch.testing.assert_close(found.grad, (found.sigmoid() - expected.sigmoid()).detach() / found.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_single_logits_far_out_have_a_finite_divergence_and_gradient(dtype):
    expected = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0, 60.0], dtype=dtype)
    found = torch.tensor([1e4, -1e4, -1e4, 1e4, 1e4, 59.0], dtype=dtype).requires_grad_()
    loss = SINGLE(found, expected)
    loss.backward()
    assert loss.isfinite() and found.grad.isfinite().all() and found.grad[2] < 0 < found.grad[3]
    assert SINGLE(found[:2], expected[:2]) == 0


@pytest.mark.parametrize("distance", [LAST, SINGLE, NUMBERS], ids=str)
def test_tokens_that_the_mask_leaves_out_do_not_count(distance):
    found, expected, mask = floats(2, 5, 3), floats(2, 5, 3), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    kept = distance(found[mask.bool()], expected[mask.bool()])
    found[mask == 0] = torch.nan
    found.requires_grad_()
    loss = distance(found, expected, mask)
    torch.testing.assert_close(loss, kept)
    assert distance(found, expected, mask * 0) == 0
    if distance == LAST:
        loss.backward()
        assert found.grad[mask == 1].all() and not found.grad[mask == 0].any()


IMAGES = floats(6, 3, 8, 9)
CASES = {
    "segmentation": (floats(2, 5, 8, 9), (IMAGES, numbers(6, 8, 9)), CLASSES),
    "segmentation of a square with a class a row": (floats(2, 8, 8, 8), (IMAGES, numbers(6, 8, 8)), CLASSES),
    "labels that are left out": (floats(2, 5, 8, 9), (IMAGES, torch.full((6, 8, 9), 255)), CLASSES),
    "series": (floats(2, 5, 11), (floats(6, 1, 11), numbers(6, 11)), CLASSES),
    "classes of images": (floats(2, 7), (IMAGES, numbers(6)), LAST),
    "tokens with labels": (floats(2, 4, 7), (numbers(6, 4), numbers(6, 4)), LAST),
    "channels last": (floats(2, 8, 9, 5), (IMAGES, numbers(6, 8, 9)), LAST),
    "tokens": (floats(2, 4, 7), numbers(6, 4), LAST),
    "tokens by name": (floats(2, 4, 7), {"input_ids": numbers(6, 4), "attention_mask": numbers(6, 4)}, LAST),
    "yes or no": (floats(2, 1), (IMAGES, numbers(6, below=2)), SINGLE),
    "yes or no, flat": (floats(2), (IMAGES, numbers(6, below=2)), SINGLE),
    "a mask of an image": (floats(2, 1, 8, 9), (IMAGES, numbers(6, 8, 9, below=2)), SINGLE),
    "several yes or no": (floats(2, 3), (IMAGES, numbers(6, 3, below=2)), SINGLE),
    "yes or no in floats": (floats(2, 1), (IMAGES, numbers(6, 1, below=2).double()), SINGLE),
    "yes or no in floats, one flat": (floats(2, 1), (IMAGES, numbers(6, below=2).half()), SINGLE),
    "a mask of an image in floats": (floats(2, 1, 8, 9), (IMAGES, numbers(6, 1, 8, 9, below=2).float()), SINGLE),
    "named, several in floats": ({"logits": floats(2, 3)}, {"labels": numbers(6, 3, below=2).float()}, SINGLE),
    "shares": (floats(2, 3), (IMAGES, numbers(6, 3).double() / 4), NUMBERS),
    "floats for other outputs": (floats(2, 3), (IMAGES, numbers(6, below=2).float()), NUMBERS),
    "segmentation with a channel": (floats(2, 5, 8, 9), (IMAGES, numbers(6, 1, 8, 9)), CLASSES),
    "segmentation of a square with a channel": (floats(2, 8, 8, 8), (IMAGES, numbers(6, 1, 8, 8)), CLASSES),
    "series with a channel": (floats(2, 5, 11), (floats(6, 1, 11), numbers(6, 1, 11)), CLASSES),
    "classes with a channel": (floats(2, 7), (IMAGES, numbers(6, 1)), CLASSES),
    "one token": (floats(2, 1, 7), (numbers(6, 1), numbers(6, 1)), LAST),
    "counts": (floats(2, 1), (IMAGES, torch.arange(6)), NUMBERS),
    "regression": (floats(2, 1), (IMAGES, floats(6)), NUMBERS),
    "an autoencoder": (floats(2, 3, 8, 9), IMAGES, NUMBERS),
    "a denoiser with targets": (floats(2, 3, 8, 9), (IMAGES, IMAGES), NUMBERS),
    "hidden states": (floats(2, 4, 3), numbers(6, 4).fill_(4), NUMBERS),
    "embeddings of sentences": (floats(2, 16), numbers(6, 4), NUMBERS),
    "vectors": (floats(2, 4, 3), {"inputs_embeds": floats(6, 4, 3), "attention_mask": numbers(6, 4)}, NUMBERS),
    "named, segmentation": ({"loss": None, "logits": floats(2, 5, 4, 4)}, {"pixel_values": IMAGES}, CLASSES),
    "named, classes": ({"logits": floats(2, 5)}, {"pixel_values": IMAGES}, LAST),
    "named, yes or no": ({"logits": floats(2, 1)}, {"input_ids": numbers(6, 4)}, SINGLE),
    "named, regression": ({"logits": floats(2, 1)}, {"input_ids": numbers(6, 4), "labels": floats(6)}, NUMBERS),
    "another name, segmentation": ({"out": floats(2, 5, 8, 9)}, (IMAGES, numbers(6, 8, 9)), CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_logits_by_their_name_or_where_the_samples_show_it(name):
    output, samples, expected = CASES[name]
    assert distance_of(output, samples) == expected


def said(problem):
    return SimpleNamespace(config=SimpleNamespace(problem_type=problem))


def test_a_config_says_what_logits_mean():
    output, samples = {"logits": floats(2, 3)}, {"input_ids": numbers(6, 4)}
    assert distance_of(output, samples, said("regression")) == NUMBERS
    assert distance_of(output, samples, said("multi_label_classification")) == SINGLE
