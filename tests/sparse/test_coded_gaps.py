"""Lists of steps and 4-bit codes: every code comes back, and products on a GPU are those of the codes."""

from dataclasses import replace

import pytest
import torch
from coded_weights import GRID, LEVELS, RAGGED, SHAPES, close, sparse

from prunus.ops.grid import Coded, coded, decoded
from prunus.sparse import coded_gaps
from prunus.sparse.coded_gaps import LONGEST, UNITS, coded_gaps_of, coded_gaps_of_dense
from prunus.sparse.product import dense, product

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def with_columns(shape, keep, scale=0.5):
    """A weight whose kept columns are those of ``keep``, with every code."""
    codes = (torch.arange(shape[0] * shape[1]).view(shape) % 16).to(torch.uint8)
    scales = torch.full(GRID.scales_shape(shape), scale).bfloat16()
    return coded(GRID.values(codes, scales, torch.float32) * keep(torch.arange(shape[1])), scales, GRID)


@pytest.mark.parametrize("step", [1, 2, LONGEST, LONGEST + 1, 16, 127, 128, 300])
@pytest.mark.parametrize("first", [0, 7, 8, 127])
def test_steps_of_any_length_are_bridged(step, first):
    weight = with_columns((3, 700), lambda column: (column >= first) & ((column - first) % step == 0))
    form = coded_gaps_of(weight, torch.float32)
    form.check()
    assert torch.equal(form.dense(), decoded(weight, torch.float32))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 4e37])
def test_scales_of_any_size_come_back(scale):
    weight = with_columns((20, 300), lambda column: column % 3 == 0, scale)
    form = coded_gaps_of(weight, torch.float32)
    assert torch.equal(form.dense(), decoded(weight, torch.float32))
    assert torch.equal(form.scales(), weight.scales)


def test_a_tile_is_as_long_as_its_longest_list():
    keep = torch.zeros(16, 256, dtype=torch.bool)
    keep[3, 128:137] = True  # nine entries are three words
    form = coded_gaps_of_dense(0.5 * keep.float(), torch.ones(16, 2))
    assert form.starts.tolist() == [0, 4 * UNITS]
    assert coded_gaps_of_dense(torch.zeros(16, 256), torch.ones(16, 2)).starts.tolist() == [0, UNITS]


def test_chunks_make_no_difference(monkeypatch):
    form = coded_gaps_of(sparse((100, 1300), 0.6), torch.float32)
    whole = form.dense()
    monkeypatch.setattr(coded_gaps, "CHUNK", 3)
    form.check()
    assert torch.equal(form.dense(), whole)


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


BROKEN = {
    "a column too far": lambda form: replace(form, data=changed(form.data, slice(32, 320), 0x07070707)),
    "a column beyond the last": lambda form: replace(form, shape=(37, 140)),
    "half a code": lambda form: replace(form, data=changed(form.data, 32, 0x08080808)),
    "a wrong length": lambda form: replace(form, data=changed(form.data, 0, 3)),
    "wrong starts": lambda form: replace(form, starts=changed(form.starts, 1, int(form.starts[1]) + UNITS)),
    "starts of floats": lambda form: replace(form, starts=form.starts.float()),
    "short data": lambda form: replace(form, data=form.data[:-1]),
    "data of bytes": lambda form: replace(form, data=form.data.view(torch.uint8)),
    "more rows": lambda form: replace(form, shape=(50, 200)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_forms_that_would_read_astray_are_refused(what):
    with pytest.raises(ValueError, match="do not fit together"):
        BROKEN[what](coded_gaps_of(sparse((37, 200), 0.5), torch.bfloat16)).check()


def test_the_arithmetic_of_the_kernel_finds_each_code():
    """The kernel's words, entry by entry: the bits of 4096 with a byte of an entry are 4096 + v, and columns add up."""
    weight = sparse((16, 256), 0.7)
    weight = Coded(weight.packed, weight.codes, torch.full((16, 2), 2.0), GRID, weight.shape)
    form, matrix = coded_gaps_of(weight, torch.float32), torch.zeros(16, 384)
    words = form.data.view(-1, 32)
    assert set((words[0] & 0xFFFF).tolist()) == {len(words) - 1}
    for lane in range(32):
        column = 128 * (lane // 16) - 1
        for word in words[1:, lane].tolist():
            steps, values = word & 0x07070707, word & 0xF8F8F8F8
            for i in range(4):
                column += 1 + (steps >> 8 * i & 255)
                magic = torch.tensor(0x45800000 | (values >> 8 * i & 255) << 8).int().view(torch.float32)
                matrix[lane % 16, min(column, 383)] += magic - 4111
    assert torch.equal(matrix[:, :256], decoded(weight, torch.float32)) and not matrix[:, 256:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_on_a_gpu(dtype, num):
    for shape in [*SHAPES, *RAGGED, (5000, 64), (48, 14336), (20, 60000)]:
        for level in LEVELS:
            weight = sparse(shape, level, "cuda")
            form = coded_gaps_of(weight, dtype)
            assert torch.equal(dense(form), decoded(weight, dtype)), (shape, level)
            x = torch.randn(num, shape[1], device="cuda", dtype=dtype)
            for bias in (None, torch.randn(shape[0], device="cuda", dtype=dtype)):
                y = product(x, form, bias)
                assert y.shape == (num, shape[0]) and y.dtype == dtype
                if num > 16:  # torch multiplies, and may sum in half precision
                    expected = torch.nn.functional.linear(x, decoded(weight, dtype), bias)
                    assert (y - expected).norm() <= 0.02 * expected.norm(), (shape, level)
                    continue
                is_exact = not (shape[1] == 60000 and dtype == torch.float32)
                assert close(y, x, weight, bias, torch.float64 if is_exact else dtype), (shape, level)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_on_a_gpu_may_begin_anywhere(dtype):
    weight, long = sparse((64, 1001), 0.5, "cuda"), torch.randn(4000, device="cuda").to(dtype)
    form = coded_gaps_of(weight, dtype)
    for num, first in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 5)):
        x = long[first : first + num * 1001].view(num, 1001)
        assert close(product(x, form), x, weight, None)


@pytest.mark.gpu
def test_a_row_without_weights_gives_exactly_the_bias():
    form = coded_gaps_of(sparse((64, 1024), 0.5, "cuda"), torch.bfloat16)
    x, bias = torch.randn(3, 1024, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    for num in (1, 2, 3):
        assert torch.equal(product(x[:num], form, bias)[:, 32], bias[32].expand(num))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_of_any_size_on_a_gpu(scale):
    weight = with_columns((64, 1024), lambda column: column % 2 == 0, scale)
    weight = Coded(weight.packed.cuda(), weight.codes.cuda(), weight.scales.cuda(), GRID, weight.shape)
    x = torch.randn(1, 1024, device="cuda").bfloat16()
    assert close(product(x, coded_gaps_of(weight, torch.bfloat16)), x, weight, None)
