"""Products of 16-bit numbers on CPUs that have none of their own: the bits of float32, rounded once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prunus.ops import wide_products as module
from prunus.ops.wide_products import WideProducts, add_product_, wide_products
from prunus.sparse import SparseLinear
from prunus.sparse.gaps import gaps_of_dense
from prunus.sparse.product import product

pytestmark = pytest.mark.rounding

NARROW = [torch.bfloat16, torch.float16]
X, W, B = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate([(5, 8), (6, 8), (6,)])
)
CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear by name": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "matmul": lambda x, w, b: x @ w.t(),
    "method": lambda x, w, b: x.matmul(w.t()),
    "mm": lambda x, w, b: torch.mm(x, w.t()),
    "mv": lambda x, w, b: torch.mv(w, x[0]),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "bmm": lambda x, w, b: torch.bmm(x[None], w.t()[None]),
    "baddbmm": lambda x, w, b: torch.baddbmm(b[None, None], x[None], w.t()[None]),
    "einsum": lambda x, w, b: torch.einsum("bi,oi->bo", x, w),
    "einsum of a list": lambda x, w, b: torch.einsum("bi,oi->bo", [x, w]),
    "conv1d": lambda x, w, b: F.conv1d(x[None], w[:, :5, None], b),
    "conv2d": lambda x, w, b: F.conv2d(x[None, :, :, None], w[:, :5, None, None], b),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_product_is_that_of_float32_rounded_once(call, dtype):
    x, w, b = (value.to(dtype) for value in (X, W, B))
    with WideProducts(dtype):
        found = call(x, w, b)
    expected = call(x.float(), w.float(), b.float()).to(dtype)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_gradients_go_through_it():
    x, w, b = (value.to(torch.bfloat16).requires_grad_() for value in (X, W, B))
    with WideProducts(torch.bfloat16):
        F.linear(x, w, b).sum().backward()
    wide = [value.detach().float().requires_grad_() for value in (x, w, b)]
    F.linear(*wide).to(torch.bfloat16).sum().backward()
    for found, expected in zip((x, w, b), wide, strict=True):
        assert found.grad.dtype == torch.bfloat16 and torch.equal(found.grad, expected.grad.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_types_are_left_alone(dtype):
    x, w, b = (value.to(dtype) for value in (X, W, B))
    plain = F.linear(x, w, b)
    with WideProducts(torch.bfloat16):
        assert torch.equal(F.linear(x, w, b), plain)
        assert torch.empty(0, 8, dtype=torch.bfloat16).matmul(torch.empty(8, 3, dtype=torch.bfloat16)).shape == (0, 3)
        assert (X.to(torch.bfloat16) + 1).dtype == torch.bfloat16  # what is no product is torch's own


def test_a_bfloat16_model_does_not_turn_onednn_off():
    before = torch.backends.mkldnn.enabled
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    with WideProducts(torch.bfloat16):
        layer(torch.randn(64, 256, dtype=torch.bfloat16)).sum().backward()
    assert torch.backends.mkldnn.enabled == before


@pytest.mark.parametrize("of", [nn.Linear(2, 2).bfloat16(), torch.zeros(1).bfloat16()], ids=["model", "factor"])
def test_it_is_on_where_a_type_is_used_that_the_cpu_lacks_and_nowhere_else(monkeypatch, of):
    monkeypatch.setattr(module, "slow_types", lambda: [torch.bfloat16])
    assert isinstance(wide_products("cpu", of), WideProducts)
    assert not isinstance(wide_products("cuda", of), WideProducts)
    for other in (torch.zeros(1), nn.Linear(2, 2), nn.Linear(2, 2).half()):
        assert not isinstance(wide_products("cpu", other), WideProducts)
    monkeypatch.setattr(module, "slow_types", list)
    assert not isinstance(wide_products("cpu", of), WideProducts)


def test_it_is_on_for_a_model_whose_only_narrow_numbers_are_sparse_weights(monkeypatch):
    monkeypatch.setattr(module, "slow_types", lambda: [torch.bfloat16])
    model = nn.Sequential(nn.LayerNorm(8), SparseLinear.from_linear(nn.Linear(8, 8).bfloat16()))
    assert isinstance(wide_products("cpu", model), WideProducts)


@pytest.mark.parametrize("num", [1, 5])
def test_sparse_products_go_by_it_too(monkeypatch, num):
    monkeypatch.setattr(module, "slow_types", lambda: NARROW)
    x, w, b = (value.to(torch.bfloat16) for value in (X[:num], W.masked_fill(W.abs() < 0.6, 0), B))
    exact = F.linear(x.double(), w.double(), b.double())
    assert torch.allclose(product(x, gaps_of_dense(w), b).double(), exact, rtol=2**-8, atol=0)  # rounded once


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64], ids=str)
def test_a_product_is_added_in_the_type_of_the_total_also_to_a_part_of_it(dtype, device):
    total = torch.full((10, 12), 300.0, device=device, dtype=torch.promote_types(dtype, torch.float32))
    left, right = X.to(device, dtype)[:, :6], X.to(device, dtype)
    part, before = total[2:8, 3:11], total.clone()
    add_product_(part, left, right)
    before[2:8, 3:11] += (left.double().T @ right.double()).to(total.dtype)
    torch.testing.assert_close(total, before, rtol=3e-7, atol=0)
