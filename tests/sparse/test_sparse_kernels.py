"""The kernels compute what their definitions say: in the interpreter, and on a GPU where there is one."""

import itertools

import pytest
import torch

from prunus.sparse import product as products
from prunus.sparse.gaps import BLOCK, gaps_of_dense

pytest.importorskip("triton")

from prunus.sparse._triton import dense, product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (5, 31), (3, 300), (1, 5 * BLOCK + 3)]
SPARSITIES = [0.0, 0.5, 0.8, 0.97, 1.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cases(quick, *values):
    """All combinations of values; those that are not quick are for a GPU, or slow: the interpreter takes its time."""
    marks = () if torch.cuda.is_available() else pytest.mark.slow
    return [case if case in quick else pytest.param(*case, marks=marks) for case in itertools.product(*values)]


def sparse(shape, sparsity, dtype=torch.float32):
    weight = torch.randn(shape).to(dtype).masked_fill_(torch.rand(shape) < sparsity, 0)
    if shape[0] > 2:
        weight[1] = 0  # a dead row
        weight[2, : shape[1] // 2] = 0
    return weight.to(DEVICE)


def close(y, weight, x, bias=None):
    """Within the rounding of a sum in float32, and of the type of ``y``; the interpreter cuts bfloat16 off."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    ulp = torch.finfo(y.dtype).eps
    return bool(((y.double() - exact).abs() <= 4e-6 * size + ulp * exact.abs() + torch.finfo(y.dtype).tiny).all())


ONE = [(SHAPES[0], 0.0), (SHAPES[1], 0.8), (SHAPES[2], 0.97), (SHAPES[2], 1.0), (SHAPES[3], 0.5)]


@pytest.mark.rounding
@pytest.mark.parametrize(("shape", "sparsity"), cases(ONE, SHAPES, SPARSITIES), ids=str)
def test_a_product_with_one_vector(shape, sparsity):
    weight, x = sparse(shape, sparsity), torch.randn(1, shape[1], device=DEVICE)
    y = product(x, gaps_of_dense(weight), None)

    assert y.shape == (1, shape[0])
    assert close(y, weight, x)


SEVERAL = [(1, torch.float16), (4, torch.float32), (8, torch.bfloat16)]


@pytest.mark.rounding
@pytest.mark.parametrize(("batch", "dtype"), cases(SEVERAL, [1, 2, 4, 8], DTYPES), ids=str)
def test_products_with_several_vectors_of_any_type(batch, dtype):
    weight, bias = sparse((3, 1500), 0.6, dtype), torch.randn(3, device=DEVICE).to(dtype)
    x = torch.randn(batch, 1500, device=DEVICE).to(dtype)

    assert close(product(x, gaps_of_dense(weight), bias), weight, x, bias)
    assert close(product(x, gaps_of_dense(weight), None), weight, x)


def test_the_widest_row():
    weight = torch.zeros(1, 65536, device=DEVICE)
    weight[0, 40000:40600] = 1.0  # columns that 16 bits hold only without a sign
    weight[0, -1] = 7.0
    x = torch.randn(1, 65536, device=DEVICE)

    assert close(product(x, gaps_of_dense(weight), None), weight, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_entry_finds_its_own_column(dtype):
    """With another power of two at each entry's column, and a larger one elsewhere, any misplaced column would show."""
    columns = [0, 1, 16, 17, 300, 1023, 1498, 1499]
    weight = torch.zeros(1, 1500, dtype=dtype, device=DEVICE)
    weight[0, columns] = 1
    x = torch.full((1, 1500), 2.0**8, dtype=dtype, device=DEVICE)
    x[0, columns] = 2.0 ** torch.arange(8, device=DEVICE).to(dtype)

    assert product(x, gaps_of_dense(weight), None).item() == 2**8 - 1


BACK = [(0.0, torch.bfloat16), (0.5, torch.float32), (0.97, torch.float16), (1.0, torch.float32)]


@pytest.mark.parametrize(("sparsity", "dtype"), cases(BACK, SPARSITIES, DTYPES), ids=str)
def test_the_dense_matrix_comes_back_bit_for_bit(sparsity, dtype):
    weight = sparse((3, 1300), sparsity, dtype)
    assert torch.equal(dense(gaps_of_dense(weight)), weight)


@pytest.mark.parametrize("num", [0, 1, 3, 8, 9, 40])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_any_number_of_vectors_on_any_device(num, dtype):
    weight, bias = sparse((6, 200), 0.5), torch.randn(6, device=DEVICE).to(dtype)
    x = torch.randn(num, 200, device=DEVICE).to(dtype)
    weight = weight.to(dtype) if dtype != torch.float64 else weight
    y = products.product(x, gaps_of_dense(weight), bias)

    assert y.shape == (num, 6) and y.dtype == dtype
    assert torch.allclose(y.double(), x.double() @ weight.double().t() + bias.double(), atol=0.2, rtol=0.02)
    assert torch.equal(products.dense(gaps_of_dense(weight)), gaps_of_dense(weight).dense())
