"""A grid gives codes back from values, in every dtype and orientation, and none of its values is zero."""

import pytest
import torch
from torch import nn

from prunus.grids import OnGrid, check_on_grid, grid_of, on_grids, put_on_grid_, take_off_grid_
from prunus.ops.bits import words_of
from prunus.ops.grid import Grid, coded, decoded

SHAPES = {(0,): (6, 300), (1,): (300, 6), (0, 1): (3, 4, 129), (0, 2): (3, 129, 4)}


def example(grid, shape, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**grid.bits, shape, generator=rng, dtype=torch.uint8)
    scales = (torch.rand(grid.scales_shape(shape), generator=rng) + 0.01).to(torch.bfloat16)
    return codes, scales, grid.values(codes, scales, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("outputs", SHAPES)
def test_codes_follow_from_values_and_scales(bits, outputs, dtype):
    grid = Grid(bits, outputs=outputs)
    codes, scales, weight = example(grid, SHAPES[outputs], dtype)
    assert torch.equal(grid.codes(weight, scales), codes)
    assert grid.holds(weight, scales).all() and (weight != 0).all()


def sparse_example(grid, shape, dtype, density=0.3):
    _, scales, weight = example(grid, shape, dtype)
    weight[torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= density] = 0
    return scales, weight


@pytest.mark.parametrize("chunk", [8, 400, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", SHAPES)
def test_bits_codes_and_scales_give_a_weight_back_bit_for_bit(outputs, dtype, chunk, monkeypatch):
    monkeypatch.setattr("prunus.ops.bits.CHUNK", chunk)
    grid = Grid(3, group=100, outputs=outputs)
    scales, weight = sparse_example(grid, SHAPES[outputs], dtype)
    kept = coded(weight, scales, grid)
    assert torch.equal(kept.codes, grid.codes(weight, scales)[weight != 0]) and kept.shape == weight.shape
    assert torch.equal(words_of(decoded(kept, dtype)), words_of(weight))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (5, 7)])
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_weights_without_elements_or_without_zeros_have_codes_too(shape, density):
    scales, weight = sparse_example(Grid(4), shape, torch.bfloat16, density)
    assert torch.equal(decoded(coded(weight, scales, Grid(4)), torch.bfloat16), weight)


def test_a_zero_of_either_sign_is_pruned_and_comes_back_positive():
    scales, weight = sparse_example(Grid(4), (6, 300), torch.float32)
    negative = torch.where(weight == 0, -0.0, weight)
    assert torch.equal(words_of(decoded(coded(negative, scales, Grid(4)), torch.float32)), words_of(weight))


def test_a_weight_that_was_changed_is_found_where_it_is():
    grid = Grid(4)
    _, scales, weight = example(grid, (6, 300), torch.bfloat16)
    weight[2, 5], weight[3, 7] = weight[2, 5] * 1.1, 0
    assert (~grid.holds(weight, scales)).nonzero().tolist() == [[2, 5]]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_fitted_scale_is_a_positive_bfloat16_for_any_values(bits):
    grid = Grid(bits)
    weight = torch.tensor([[0.0, 0, 0], [1e-38, 0, 0], [3e38, 1, -1], [-1, 0.5, 0.25]])
    for mask in (weight != 0, torch.ones_like(weight).bool(), torch.zeros_like(weight).bool()):
        scale = grid.fitted(weight, mask)
        assert (scale > 0).all() and scale.isfinite().all() and torch.equal(scale.bfloat16().float(), scale)
        assert grid.rounded(weight, scale).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_kept_weight_becomes_zero_however_small(dtype):
    grid, least = Grid(4), torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight = torch.tensor([[least, -least, 3 * least], [1, least, -least]], dtype=dtype).float()
    scale = grid.fitted(weight, weight != 0, dtype)
    assert (grid.rounded(weight, scale).to(dtype) != 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_kept_weight_becomes_infinite_however_large(dtype, bits):
    grid, most = Grid(bits), min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    weight = torch.tensor([[most, -most, most / 3], [1, most, -1]], dtype=dtype)
    scale = grid.fitted(weight.float(), weight != 0, dtype)
    values = grid.values(grid.codes(weight, scale), scale, dtype)
    assert values.isfinite().all() and (values.double().abs()[0, 0] / most - 1).abs() < 0.02


@pytest.mark.parametrize("kwargs", [{"bits": 1}, {"bits": 9}, {"group": 0}])
def test_grids_that_cannot_be_are_refused(kwargs):
    with pytest.raises(ValueError, match="got"):
        Grid(**kwargs)


def quantised_linear(dtype=torch.float32):
    linear, grid = nn.Linear(300, 6, dtype=dtype), Grid(4)
    _, scales, weight = example(grid, (6, 300), dtype)
    linear.weight.data = weight
    put_on_grid_(linear, "weight", OnGrid(grid, scales))
    return linear


def test_a_layer_keeps_its_scales_beside_an_ordinary_weight_and_no_checkpoint_holds_them():
    model = nn.Sequential(quantised_linear(), nn.Linear(6, 2))
    assert set(on_grids(model)) == {"0.weight"} and "0.weight_scales" not in model.state_dict()
    check_on_grid("0.weight", model[0].weight, on_grids(model)["0.weight"])
    take_off_grid_(model[0], "weight")
    take_off_grid_(model[0], "weight")
    assert not on_grids(model) and grid_of(model[0]) is None and not dict(model.named_buffers())


def test_a_weight_that_left_its_grid_is_refused_by_name():
    linear = quantised_linear(torch.bfloat16)
    linear.weight.data[0, :3] *= 1.1
    with pytest.raises(ValueError, match=r"layer.weight has 3 weights off its 4-bit grid"):
        check_on_grid("layer.weight", linear.weight, grid_of(linear))


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"needs scales of shape \(6, 3\), got \(6, 2\)"):
        put_on_grid_(nn.Linear(300, 6), "weight", OnGrid(Grid(4), torch.ones(6, 2)))
