"""Weights in few bits lie on their grid, keep their zeros, and lose less than by rounding to the nearest."""

import pytest
import torch

from prunus.oneshot.quantizer import DAMPING, damped, descended, factor_of, gptq, nearest
from prunus.oneshot.resources import Clock
from prunus.ops.grid import Grid


def layer(out=24, num=300, sparsity=0.5, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * num, num, generator=rng) @ torch.randn(num, num, generator=rng)
    weight = torch.randn(out, num, generator=rng)
    mask = torch.rand(out, num, generator=rng) >= sparsity
    return (weight * mask).to(dtype), mask, x.T @ x


def by_gptq(weight, mask, gram, grid):
    return gptq(weight, mask, factor_of(damped(gram, DAMPING), Clock()), grid)


def solved(weight, mask, gram, grid):
    return descended(weight, *by_gptq(weight, mask, gram, grid), damped(gram, DAMPING), grid)


def error(change, gram):
    return float((change @ gram * change).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("out", "num", "sparsity"), [(24, 300, 0.5), (7, 129, 0.8), (1, 1, 0.0), (3, 128, 0.0)])
def test_zeros_are_exactly_the_mask_and_values_are_on_the_grid(bits, out, num, sparsity, dtype):
    weight, mask, gram = layer(out, num, sparsity, dtype=dtype)
    grid = Grid(bits)
    for how in (by_gptq, solved, lambda weight, mask, gram, grid: nearest(weight, mask, grid)):
        values, scales = how(weight, mask, gram, grid)
        assert values.dtype == dtype and scales.dtype == torch.bfloat16
        assert torch.equal(values != 0, mask) and grid.holds(values, scales).all()
        assert scales.shape == grid.scales_shape((out, num))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_the_outputs_lose_less_with_each_step(bits, sparsity):
    weight, mask, gram = layer(sparsity=sparsity)
    grid, shifted = Grid(bits), damped(gram, DAMPING)
    rounded, passed_on = nearest(weight, mask, grid), by_gptq(weight, mask, gram, grid)
    errors = [error(values - weight, shifted) for values, _ in (rounded, passed_on)]
    for sweeps in (1, 2, 4):
        values, _ = descended(weight, *passed_on, shifted, grid, sweeps)
        errors.append(error(values - weight, shifted))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.97 * errors[1]


def test_each_weight_and_each_scale_is_the_best_in_the_end():
    weight, mask, gram = layer(3, 40, seed=1)
    grid, shifted = Grid(3), damped(gram, DAMPING)
    values, scales = descended(weight, *nearest(weight, mask, grid), shifted, grid, 50)
    least = error(values - weight, shifted)
    for i, j in mask.nonzero().tolist():
        for code in range(8):
            other = values.clone()
            other[i, j] = (code - 3.5) * scales[i, 0].float()
            assert error(other - weight, shifted) >= least * (1 - 1e-5)


def test_rows_without_weights_inputs_without_tokens_and_huge_ranges_are_no_fault():
    weight, mask, gram = layer()
    weight[0], mask[0] = 0, False
    weight[1] *= 1e-30
    weight[2] *= 1e30
    gram[5], gram[:, 5] = 0, 0
    values, scales = solved(weight, mask, gram, Grid(4))
    assert values.isfinite().all() and scales.isfinite().all() and torch.equal(values != 0, mask)


def test_a_gram_matrix_without_a_factor_is_told():
    assert factor_of(-torch.eye(3), Clock()) is None
    assert factor_of(damped(torch.zeros(3, 3), DAMPING), Clock()) is not None  # no token at all


def test_a_layer_without_inputs_or_rows_has_no_values():
    for shape in ((0, 5), (5, 0)):
        weight = torch.zeros(shape)
        for values, scales in (
            nearest(weight, weight != 0, Grid(4)),
            gptq(weight, weight != 0, torch.eye(shape[1]), Grid(4)),
        ):
            assert values.shape == shape and scales.shape == Grid(4).scales_shape(shape)
