"""The largest per-sample products: kernel and definition agree, in the interpreter here and compiled on a GPU."""

import pytest
import torch

from prunus.oneshot.probe.taps import largest_outer_, largest_outer_reference_, outer

triton = pytest.importorskip("triton", reason="kernels need triton")

from prunus.ops._triton.outer import largest_outer_ as kernel  # noqa: E402

pytestmark = pytest.mark.rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1, 1), (3, 5, 7, 2), (2, 64, 128, 128), (4, 70, 130, 33), (2, 128, 16, 200)]
# the interpreter multiplies no bfloat16
HALF = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float16]


def factors(samples: int, tokens: int, rows: int, columns: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(samples, tokens, width, generator=generator) for width in (rows, columns))
    return left.to(DEVICE, dtype), right.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_definition_to_rounding(shape, dtype):
    left, right = factors(*shape, dtype)
    expected = torch.rand(shape[2:], device=DEVICE)  # which is larger than some of the products
    found = expected.clone()
    largest_outer_reference_(expected, left, right)
    kernel(found, left, right)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_nan_and_infinity_of_one_sample_are_not_lost():
    left, right = factors(4, 9, 20, 12, torch.float16)
    left[1, 3, 5], left[2, 0, 7] = torch.nan, torch.inf
    found, expected = (torch.zeros(20, 12, device=DEVICE) for _ in range(2))
    kernel(found, left, right)
    largest_outer_reference_(expected, left, right)
    assert found[5].isnan().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2)], ids=str)
def test_nothing_to_multiply_leaves_the_record(shape):
    left, right = factors(*shape, torch.float16)
    record = torch.rand(shape[2:], device=DEVICE)
    before = record.clone()
    largest_outer_(record, left, right)
    assert torch.equal(record, before)


def test_a_product_is_the_gradient_of_one_sample():
    left, right = factors(3, 5, 7, 2, torch.float32)
    expected = torch.stack([a.T @ b for a, b in zip(left, right, strict=True)])
    torch.testing.assert_close(outer(left, right), expected)
