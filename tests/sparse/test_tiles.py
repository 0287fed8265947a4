"""Matrices in tiles: every bit comes back, and products on a GPU are those of the dense matrix."""

import pickle
import threading
from copy import deepcopy

import pytest
import torch

from prunus.ops import bits
from prunus.sparse import SparseLinear
from prunus.sparse.coded_tiles import coded_tiles_of_dense
from prunus.sparse.gaps import gaps_of_dense
from prunus.sparse.product import dense, product
from prunus.sparse.tiles import joined_tiles, tiles_of, tiles_of_dense
from prunus.sparse.times import rounded_to_grid

SHAPES = [(16, 128), (1, 1), (37, 200), (64, 1032), (0, 5), (3, 0), (100, 130), (256, 4096)]
LEVELS = [0.0, 0.5, 0.8, 0.97, 1.0]


def codes_of_dense(weight):
    return coded_tiles_of_dense(*rounded_to_grid(weight))


def sparse(shape, level, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(hash((shape, level)) % (1 << 31))
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < level] = 0
    return weight.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_comes_back(shape, level, dtype):
    weight = sparse(shape, level, dtype)
    tiles = tiles_of_dense(weight)
    tiles.check()
    assert torch.equal(tiles.dense().view(torch.int16), weight.view(torch.int16))
    keep = weight != 0
    packed = tiles_of(bits.pack(keep), weight[keep], shape)
    assert torch.equal(packed.data, tiles.data) and torch.equal(packed.starts, tiles.starts)
    assert packed.stage == tiles.stage


def test_odd_values_are_kept_as_they_are():
    weight = torch.zeros(16, 128, dtype=torch.bfloat16)
    weight[0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, 3e38, -0.0])
    back = tiles_of_dense(weight).dense()
    assert torch.equal(back.view(torch.int16)[0, :5], weight.view(torch.int16)[0, :5])
    assert not back.view(torch.int16)[0, 5:].any()  # -0.0 is left out


def test_it_takes_few_bytes():
    for level, most in ((0.5, 0.57), (0.8, 0.275)):
        weight = sparse((512, 4096), level, torch.bfloat16)
        assert tiles_of_dense(weight).nbytes <= most * weight.nbytes


def test_joined_tiles_are_the_matrices_one_below_the_other():
    weights = [sparse((rows, 300), 0.6, torch.bfloat16) for rows in (32, 16, 64)]
    whole, views = joined_tiles([tiles_of_dense(weight) for weight in weights])
    whole.check()
    assert torch.equal(whole.dense(), torch.cat(weights))
    for view, weight in zip(views, weights, strict=True):
        assert torch.equal(view.dense(), weight)
        assert view.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("part", ["data", "starts"])
def test_damaged_tiles_are_refused(part):
    tiles = tiles_of_dense(sparse((37, 200), 0.5, torch.bfloat16))
    if part == "data":
        tiles.data[:16] = -1  # bits for which there are no values
    else:
        tiles.starts[1] += 200
    with pytest.raises(ValueError, match="do not fit together"):
        tiles.check()


def test_tiles_compute_on_a_cpu_too():
    weight, x = sparse((40, 200), 0.5, torch.bfloat16), torch.randn(3, 200).bfloat16()
    tiles = tiles_of_dense(weight)
    assert torch.equal(product(x, tiles), torch.nn.functional.linear(x, weight))


def close(y, x, weight, bias):
    """Whether an output is as near to the exact product as the type allows."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    eps = torch.finfo(y.dtype).eps
    return bool(((y.double() - exact).abs() <= eps * exact.abs() + 1e-5 * size + torch.finfo(y.dtype).tiny).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8, 11, 16])
@pytest.mark.parametrize("form_of", [tiles_of_dense, gaps_of_dense])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_on_a_gpu(dtype, form_of, num):
    if form_of is tiles_of_dense and dtype == torch.float32:
        pytest.skip("tiles have 16-bit numbers")
    for shape in [*SHAPES, (5000, 64), (48, 14336)]:
        for level in LEVELS:
            weight = sparse(shape, level, dtype, "cuda")
            form = form_of(weight)
            assert torch.equal(dense(form), weight)
            x = torch.randn(num, shape[1], device="cuda", dtype=dtype)
            for bias in (None, torch.randn(shape[0], device="cuda", dtype=dtype)):
                y = product(x, form, bias)
                assert y.shape == (num, shape[0]) and y.dtype == dtype
                assert close(y, x, weight, bias), (shape, level)


@pytest.mark.gpu
@pytest.mark.parametrize("form_of", [tiles_of_dense, gaps_of_dense, codes_of_dense])
def test_they_are_captured_in_a_graph(form_of):
    form = form_of(sparse((640, 1024), 0.5, torch.bfloat16, "cuda"))
    for num in (1, 4, 16):
        x = torch.randn(num, 1024, device="cuda", dtype=torch.bfloat16)
        expected = product(x, form)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product(x, form)
        graph.replay()
        assert torch.equal(y, expected)
        x.mul_(2)  # exact in binary numbers
        graph.replay()
        assert torch.equal(y, 2 * expected)


@pytest.mark.gpu
def test_parts_of_a_larger_tensor_are_multiplied():
    weight = sparse((64, 256), 0.5, torch.bfloat16, "cuda")
    x = torch.randn(4, 3, 512, device="cuda", dtype=torch.bfloat16)[..., ::2]
    for form in (tiles_of_dense(weight), gaps_of_dense(weight)):
        y = product(x, form)
        assert y.shape == (4, 3, 64)
        assert close(y.view(12, 64), x.reshape(12, 256), weight, None)
        for num in (1, 2, 3):  # begins at no multiple of 16 bytes
            part = x.reshape(-1)[1 : 1 + num * 256].view(num, 256)
            assert close(product(part, form), part, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize("form_of", [tiles_of_dense, gaps_of_dense])
def test_a_thread_that_has_used_no_device_yet_computes_too(form_of):
    weight = sparse((64, 256), 0.5, torch.bfloat16, "cuda")
    form, x, found = form_of(weight), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16), {}
    expected = product(x, form)
    for name, call in {"dense": lambda: dense(form), "product": lambda: product(x, form)}.items():
        thread = threading.Thread(target=lambda name=name, call=call: found.update({name: call()}))
        thread.start()
        thread.join()
    assert torch.equal(found["dense"], weight)
    assert torch.equal(found["product"], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form_of", [tiles_of_dense, gaps_of_dense, codes_of_dense])
def test_a_copy_keeps_no_address_of_the_original(form_of):
    layer = SparseLinear(form_of(sparse((64, 256), 0.5, torch.bfloat16, "cuda")))
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    expected = layer(x)
    for other in (deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        kept = [getattr(layer.form, name).clone() for name in layer.form.PARTS]
        for name in layer.form.PARTS:
            getattr(layer.form, name).zero_()
        assert torch.equal(other(x), expected)
        for name, part in zip(layer.form.PARTS, kept, strict=True):
            getattr(layer.form, name).copy_(part)
