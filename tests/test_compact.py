"""Compacting and expanding are what their definitions say, bit for bit, by numpy and by kernel."""

import pytest
import torch

from prunus.ops import bits, compact
from prunus.ops.compact import compact_reference, expand_reference, nonzero_reference

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4097]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that little data makes many."""
    monkeypatch.setattr(compact, "CHUNK", 64)


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(size: int, dtype: torch.dtype, density: float = 0.5) -> torch.Tensor:
    """Random patterns, so also NaNs of every kind, infinities and negative zeros, with zeros between them."""
    raw = torch.randint(0, 256, (size, dtype.itemsize), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    raw[torch.rand(size) >= density] = 0
    if size and dtype.is_floating_point:
        raw[0] = torch.tensor([-0.0]).to(dtype).view(torch.uint8)
    return raw.view(dtype).reshape(size)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    equal = torch.equal(bits.words_of(a), bits.words_of(b))
    return a.dtype == b.dtype and a.shape == b.shape and equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_each_way_equals_its_definition_and_gives_every_bit_back(size, dtype, threads):
    tensor = drawn(size, dtype)
    packed = compact.nonzero(tensor)
    values = compact.compact(tensor, packed)
    assert torch.equal(packed, nonzero_reference(tensor))
    assert same(values, compact_reference(tensor, packed))
    assert same(compact.expand(values, packed, (size,)), tensor)
    assert same(expand_reference(values, packed, (size,)), tensor)
    assert len(values) == int(bits.count(packed))


def test_only_the_pattern_of_positive_zero_counts_as_zero():
    tensor = torch.tensor([0.0, -0.0, float("nan"), 1e-45, 0.0])
    assert bits.unpack(compact.nonzero(tensor), (5,)).tolist() == [False, True, True, True, False]


FORMS = {f"density {part}": lambda part=part: drawn(1001, torch.bfloat16, part) for part in (0.0, 0.01, 0.99, 1.0)}
FORMS |= {f"shape {shape}": lambda shape=shape: torch.randn(shape) for shape in [(), (1,), (3, 5, 2), (0, 4), (2, 0)]}
FORMS |= {
    "transposed": lambda: drawn(600, torch.float32).view(20, 30).T,
    "every third": lambda: drawn(600, torch.float32).view(20, 30)[:, ::3],
    "a part": lambda: drawn(600, torch.float32).view(20, 30)[2:, 1:],
}


@pytest.mark.parametrize("form", FORMS)
def test_any_density_shape_and_stride_comes_back_in_the_order_of_the_shape(form, threads):
    tensor = FORMS[form]()
    packed = compact.nonzero(tensor)
    assert torch.equal(packed, compact.nonzero(tensor.contiguous()))
    assert same(compact.expand(compact.compact(tensor, packed), packed, tensor.shape), tensor.contiguous())
    assert len(compact.compact(tensor, bits.full(tensor.numel()))) == tensor.numel()  # a mask may keep zeros


@pytest.mark.parametrize("num_values", [0, 499, 501, 2000])
def test_values_that_do_not_fit_their_mask_are_refused(num_values, threads):
    packed = bits.pack(torch.arange(1000) % 2 == 0)
    with pytest.raises(ValueError, match=f"keeps 500 elements, but there are {num_values}"):
        compact.expand(torch.ones(num_values), packed, (1000,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [0, 1, 9, 255, 256, 257, 3000])
def test_kernels_equal_their_definitions(size, dtype, monkeypatch):
    kernels = pytest.importorskip("prunus.ops._triton.compact", reason="kernels need triton")
    monkeypatch.setattr(kernels, "BLOCK", 256)
    monkeypatch.setattr(kernels, "SCANNED", 512)
    monkeypatch.setattr(kernels, "COUNTED", 4)
    tensor = drawn(size, dtype)
    words = bits.words_of(tensor).to(DEVICE)
    packed = kernels.nonzero(words)
    values = kernels.compact(words, packed)
    assert torch.equal(packed.cpu(), nonzero_reference(tensor))
    assert torch.equal(values.cpu(), bits.words_of(compact_reference(tensor, packed.cpu())))
    assert torch.equal(kernels.expand(values, packed, size), words)
    with pytest.raises(ValueError, match=f"keeps {size} elements, but there are {size + 1}"):
        kernels.expand(torch.ones(size + 1, dtype=torch.int32, device=DEVICE), bits.full(size, DEVICE), size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_on_a_gpu_come_back(dtype):
    tensor = torch.randn(5000, 3001, device="cuda").to(dtype)
    tensor[torch.rand(tensor.shape, device="cuda") < 0.5] = 0
    packed = compact.nonzero(tensor)
    values = compact.compact(tensor, packed)
    assert torch.equal(packed.cpu(), compact.nonzero(tensor.cpu()))
    assert same(values.cpu(), compact.compact(tensor.cpu(), packed.cpu()))
    assert same(compact.expand(values, packed, tensor.shape), tensor)
