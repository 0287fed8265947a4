"""Prepared launches give the driver what each call is about, on any stream and from any thread; here torch computes."""

import ctypes
import gc
import threading
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from prunus.sparse import _cuda, _nvrtc
from prunus.sparse.coded_gaps import coded_gaps_of_dense
from prunus.sparse.coded_tiles import coded_tiles_of_dense
from prunus.sparse.gaps import gaps_of_dense
from prunus.sparse.tiles import COLUMNS, tiles_of_dense
from prunus.sparse.times import rounded_to_grid


def codes_of_dense(weight):
    return coded_tiles_of_dense(*rounded_to_grid(weight))


def coded_gaps(weight):
    return coded_gaps_of_dense(*rounded_to_grid(weight))


TILES, GAPS = (tiles_of_dense, _cuda.tile_product), (gaps_of_dense, _cuda.gap_product)
CODES, CODED_GAPS = (codes_of_dense, _cuda.tile_product), (coded_gaps, _cuda.coded_gap_product)
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


def at(address, shape, dtype):
    """The memory from an address on."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Driver:
    """The driver's launch, which multiplies a matrix of its own by the vectors that it is given."""

    def __init__(self, weight, form, first):
        self.weight, self.form = weight, form
        self.first = first  # which of a kernel's arguments is x; the bias and y follow
        self.stream, self.done, self.before, self.contexts = 0, [], lambda: 0, []
        self.cuLaunchKernelEx = SIGNATURE(self.launch)

    def kernel(self, name, device):
        vectors = ctypes.c_void_p(int(name.split(", ")[2 if name.startswith("coded_gap_product") else 1]))
        rest = {"stream_of": lambda device: self.stream, "resident": lambda threads, shared: 3}
        rest |= {"context": device, "check": self.check}
        found = SimpleNamespace(driver=self, device=device, function=vectors, **rest)
        found.current = lambda: _nvrtc.Kernel.current(found)
        return found

    def launch(self, config, vectors, pointers, _):
        if code := self.before():
            return code
        num = 8 if self.form is CODED_GAPS[0] else 9
        cells = [ctypes.c_uint64.from_address(p).value for p in (ctypes.c_void_p * num).from_address(pointers)]
        x, bias, y, num_rows, width = cells[self.first : self.first + 5]
        if self.form is CODED_GAPS[0]:
            assert x % 16 == 0 or vectors > 1 or width * self.weight.element_size() % 16
        elif self.first == 2:  # of tiles, whose vectors are fewer than the kernel could take
            vectors = cells[8]
            assert x % 16 == 0 and width % COLUMNS == 0
        dtype = self.weight.dtype
        result = at(x, (vectors, width), dtype)[:, : self.weight.shape[1]].double() @ self.weight.double().t()
        if bias:
            result += at(bias, (num_rows,), dtype)
        at(y, (vectors, num_rows), dtype).copy_(result)
        found = _nvrtc.Config.from_address(config)
        self.done.append((found.stream, found.grid_x, found.block_x, found.shared, found.num_attributes))
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def check(self, code):
        if code:
            raise RuntimeError(f"code {code}")


@pytest.fixture
def driver(monkeypatch):
    """What makes a matrix, a driver that knows it, and its form."""

    def new(form_of, shape=(37, 200), dtype=torch.bfloat16, most_shared=1 << 16):
        weight = torch.randn(shape).to(dtype).masked_fill_(torch.rand(shape) < 0.5, 0)
        found = Driver(weight, form_of, 4 if form_of is gaps_of_dense else 2)
        monkeypatch.setattr(_nvrtc, "kernel", found.kernel)
        monkeypatch.setattr(_nvrtc, "most_shared", lambda device: most_shared)
        return found, form_of(weight)

    return new


def linear(x, weight, bias=None):
    return (x.double() @ weight.double().t() + (0 if bias is None else bias.double())).to(x.dtype)


@pytest.mark.parametrize("most_shared", [1 << 16, 2 * 3 * 200 * 4])  # the latter has room for a few vectors
@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [TILES, GAPS, CODES, CODED_GAPS], ids=["tiles", "gaps", "codes", "coded gaps"])
def test_every_vector_is_multiplied(form, dtype, num, most_shared, driver):
    if form in (TILES, CODES) and dtype == torch.float32:
        pytest.skip("tiles have 16-bit numbers")
    for shape in ((37, 200), (48, 256), (1, 7)):
        found, matrix = driver(form[0], shape, dtype, most_shared)
        run = form[1](matrix, num, 0)
        bias = torch.randn(shape[0]).to(dtype)
        wide = torch.randn(num, 2 * shape[1]).to(dtype)
        for x in (torch.randn(num, shape[1]).to(dtype), wide[:, ::2], wide[:, None, : shape[1]]):
            for added in (None, bias, None):
                y = run(x, matrix, added)
                assert y.shape == (*x.shape[:-1], shape[0]) and y.is_contiguous()
                assert torch.equal(y, linear(x, found.weight, added))
    assert all(config[4] == 0 for config in found.done)


@pytest.mark.parametrize("form", [TILES, CODED_GAPS], ids=["tiles", "coded gaps"])
def test_vectors_may_begin_anywhere(form, driver):
    found, matrix = driver(form[0], (40, 256))
    long = torch.randn(600).bfloat16()
    for num, first in ((1, 1), (2, 3), (2, 8)):
        x = long[first : first + num * 256].view(num, 256)
        assert torch.equal(form[1](matrix, num, 0)(x, matrix, None), linear(x, found.weight))


@pytest.mark.parametrize("form", [TILES, GAPS], ids=["tiles", "gaps"])
def test_a_call_goes_to_the_stream_of_the_moment(form, driver):
    found, matrix = driver(form[0])
    run, x = form[1](matrix, 2, 0), torch.randn(2, 200).bfloat16()
    for found.stream in (0, 1 << 40, 5, 0):
        run(x, matrix, None)
    assert [config[0] for config in found.done] == [None, 1 << 40, 5, None]
    threads, grid = (_cuda.TILE_WARPS * 32, 3) if form is TILES else (_cuda.GAP_WARPS * 32, 2)
    assert {config[1:3] for config in found.done} == {(grid, threads)}


@pytest.mark.parametrize("form", [TILES, GAPS], ids=["tiles", "gaps"])
def test_threads_that_launch_at_the_same_time_keep_their_arguments(form, driver):
    found, matrix = driver(form[0])
    run, inputs, outputs = form[1](matrix, 4, 0), torch.randn(4, 4, 200).bfloat16(), {}
    barrier = threading.Barrier(len(inputs))
    found.before = lambda: barrier.wait(20) and 0  # all have filled in theirs before one is read

    def work(i):
        outputs[i] = run(inputs[i], matrix, None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outputs[i], linear(inputs[i], found.weight)) for i in range(len(inputs)))


@pytest.mark.parametrize("current", [[0], []], ids=["another device", "none"])
def test_a_launch_beside_its_device_is_made_again_on_it(current, driver):
    found, matrix = driver(tiles_of_dense)
    run, x, found.contexts = _cuda.tile_product(matrix, 1, 1), torch.randn(1, 200).bfloat16(), [*current]

    found.before = lambda: 0 if found.contexts[-1:] == [1] else 201
    assert torch.equal(run(x, matrix, None), linear(x, found.weight))
    assert found.contexts == current
    found.before = lambda: 700
    with pytest.raises(RuntimeError, match="code 700"):
        run(x, matrix, None)
    assert found.contexts == current


@pytest.mark.parametrize("form", [TILES, GAPS], ids=["tiles", "gaps"])
def test_a_form_goes_with_its_last_name(form, driver):
    _, matrix = driver(form[0])
    matrix.launches[2] = form[1](matrix, 2, 0)
    gc.collect()
    gc.disable()
    try:
        known = ref(matrix)
        del matrix
        assert known() is None  # no launch keeps it
    finally:
        gc.enable()
