"""Scores of one weight are the same however they are asked for: in pieces, at positions, by rows."""

import math
from itertools import pairwise, product

import pytest
import torch

from prunus.ops.lazy import Lazy, alike, as_rows, from_rows, from_sortable, sortable, stored
from prunus.score import random

SHAPES = [(1,), (130,), (7, 19), (3, 5, 11), (4, 3, 3, 5)]
STRIDES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


def by_pieces(source, size=None):
    parts = list(source.chunks(size) if size else source.chunks())
    assert [start for start, _ in parts] == list(range(0, source.numel, size or 64))
    return torch.cat([scores for _, scores in parts]).view(source.shape)


@pytest.mark.parametrize("strided", STRIDES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_and_positions_agree_with_the_whole(shape, strided, small_chunks):
    weight, moment = STRIDES[strided](torch.randn(shape)), torch.rand(shape)
    source = Lazy("a", weight, lambda weight, moment: weight * moment, {"weight": weight, "moment": moment})
    assert torch.equal(by_pieces(source), weight * moment)
    assert torch.equal(by_pieces(source, 8), weight * moment)
    positions = torch.randperm(weight.numel())
    assert torch.equal(source.at(positions), (weight * moment).reshape(-1)[positions])


@pytest.mark.parametrize("norm_shape", [(5,), (11, 1, 5), (6, 1, 5), (1, 1, 1), (6, 11, 1)], ids=str)
def test_what_is_read_is_broadcast_to_the_weight(norm_shape, small_chunks):
    weight = torch.randn(6, 11, 5)
    norm = torch.rand(norm_shape) if norm_shape != (11, 1, 5) else torch.rand(11, 5)
    source = Lazy("a", weight, lambda weight, norm: weight * norm, {"weight": weight, "norm": norm})
    positions = torch.randint(0, weight.numel(), (99,))
    assert torch.equal(by_pieces(source), weight * norm)
    assert torch.equal(source.at(positions), (weight * norm).reshape(-1)[positions])
    assert torch.equal(torch.cat([scores for _, scores in source.rows()]), (weight * norm).flatten(1))


def test_positions_are_those_in_the_flattened_weight(small_chunks):
    source = Lazy("a", torch.empty(9, 20), random, {}, {"name": "a", "seed": 1}, takes_position=True)
    whole = random(torch.arange(180), name="a", seed=1)
    assert torch.equal(by_pieces(source).view(-1), whole)
    assert torch.equal(source.at(torch.tensor([3, 179, 0])), whole[[3, 179, 0]])
    assert torch.equal(torch.cat([scores for _, scores in source.rows()]).view(-1), whole)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((0,), lambda w: w.flatten(1)),
        ((1,), lambda w: w.transpose(0, 1).flatten(1)),
        ((0, 1), lambda w: w.flatten(0, 1)),
        ((), lambda w: w.reshape(1, -1)),
    ],
    ids=["first", "second", "both", "none"],
)
def test_rows_are_the_inputs_of_each_output(outputs, expected, small_chunks):
    weight = torch.randn(12, 8, 5)
    source = Lazy("a", weight, lambda weight: weight, {"weight": weight}, outputs=outputs)
    parts = list(source.rows())
    assert torch.equal(torch.cat([scores for _, scores in parts]), expected(weight))
    assert parts[0][0].start == 0 and all(a.stop == b.start for (a, _), (b, _) in pairwise(parts))


def test_what_is_read_is_cast_and_scaled_before_it_is_scored():
    weight = torch.randn(5, 4).bfloat16()
    source = Lazy("a", weight, lambda weight: weight, {"weight": weight}, scales={"weight": 0.3})
    assert torch.equal(by_pieces(source, 64), weight.float() * 0.3)


COMPARED = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32)
COMPARED |= dict.fromkeys((torch.int64, torch.int32, torch.bool, torch.uint8), torch.int64)
COMPARED[torch.float64] = torch.float64


@pytest.mark.parametrize(("dtype", "compared"), COMPARED.items(), ids=str)
def test_stored_scores_are_compared_without_loss(dtype, compared):
    scores = torch.randint(0, 2, (6,)).to(dtype)
    source = stored("a", scores)
    assert source.compared == compared
    assert torch.equal(by_pieces(source, 64), scores.to(compared))


def test_scores_of_different_kinds_are_compared_as_float64():
    mixed = alike([stored("a", torch.ones(2)), stored("b", torch.ones(2).long())])
    assert {source.compared for source in mixed} == {torch.float64}
    alone = [stored("a", torch.ones(2).half()), stored("b", torch.ones(2).bfloat16())]
    assert alike(alone) == alone


@pytest.mark.parametrize(
    ("of", "came"),
    [
        (lambda weight: weight.abs().mean(), r"shape \(\)"),
        (lambda weight: weight.abs().sum(0), r"shape \(5,\)"),
        (lambda weight: weight.abs().sum(1, keepdim=True), r"shape \(4, 1\)"),
        (lambda weight: weight.T, r"shape \(5, 4\)"),
        (lambda weight: weight.reshape(-1), r"shape \(20,\)"),
        (lambda weight: weight.to(torch.complex64), "complex64"),
        (lambda weight: weight.tolist(), "list"),
        (lambda weight: 3, "int"),
        (lambda weight: None, "NoneType"),
    ],
)
def test_a_function_that_does_not_score_each_element_is_refused_in_one_line(of, came):
    source = Lazy("block.weight", torch.randn(4, 5), of, {"weight": torch.randn(4, 5)})
    calls = (source.all, lambda: source.at(torch.tensor([1])), lambda: [*source.chunks()], lambda: [*source.rows()])
    for ask in calls:
        with pytest.raises(ValueError, match=rf"^[^\n]*block\.weight[^\n]*\(4, 5\)[^\n]*{came}$"):
            ask()


ROWS = [((2, 3), (0,)), ((2, 3), (1,)), ((2, 3, 4), (0,)), ((2, 3, 4), (1,)), ((2, 3, 4), (0, 1)), ((2, 3, 4), (0, 2)),
          ((5,), ()), ((0, 3), (0,)), ((3, 0), (0,)), ((2, 3, 1, 1), (0,))]  # fmt: skip


@pytest.mark.parametrize(("shape", "outputs"), ROWS, ids=str)
def test_rows_hold_all_inputs_of_an_output_and_go_back(shape, outputs):
    tensor = torch.arange(math.prod(shape)).view(shape)
    rows = as_rows(tensor, outputs)
    assert rows.shape[0] == math.prod(shape[dim] for dim in outputs)
    every = product(*(range(shape[dim]) for dim in outputs))
    for row, index in zip(rows, every, strict=True):
        here = tensor[tuple(index[outputs.index(dim)] if dim in outputs else slice(None) for dim in range(tensor.ndim))]
        assert torch.equal(row, here.flatten())
    assert torch.equal(from_rows(rows, outputs, shape), tensor)


LIMITS = {
    torch.float32: [-math.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1e-30, 1.0, 3e38, math.inf],
    torch.float64: [-math.inf, -1e308, -1.0, -5e-324, 0.0, 5e-324, 1.0, 1 + 2**-52, 1e308, math.inf],
    torch.int64: [-(2**63), -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1],
}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_sortable_keys_rise_strictly_with_the_scores_and_lead_back(dtype):
    scores = torch.tensor(LIMITS[dtype], dtype=dtype)
    keys = sortable(scores).tolist()
    assert keys == sorted(set(keys)) and [from_sortable(key, dtype) for key in keys] == scores.tolist()
    zeros = torch.tensor([-0.0, 0.0], dtype=dtype)
    assert sortable(zeros).tolist() == [0, 0] and zeros[0].signbit() == dtype.is_floating_point  # it is left alone
