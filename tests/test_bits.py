"""Packed masks are what their definitions say, and zeroing by them is exact for every value."""

import pytest
import torch

from prunus.ops import bits

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NASTY = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, -1.0, 3e38])


def drawn(size):
    return torch.rand(size) < 0.5


@pytest.mark.parametrize("size", SIZES)
def test_masks_are_packed_unpacked_counted_read_and_added_to_as_defined(size):
    for keep in (drawn(size), torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)):
        packed = bits.pack(keep)
        assert packed.dtype == torch.uint8 and packed.shape == (bits.num_bytes(size),)
        assert torch.equal(packed, bits.pack_reference(keep))
        assert torch.equal(bits.unpack(packed, (size,)), keep)
        assert torch.equal(bits.unpack_reference(packed, size), keep)
        assert int(bits.count(packed)) == int(keep.sum())
        positions = torch.randint(0, max(1, size), (50,))[: 50 * size]
        assert torch.equal(bits.at(packed, positions), keep[positions])
        missing = (~keep).nonzero().squeeze(1)
        chosen = missing[torch.randperm(len(missing))[: len(missing) // 2]]
        bits.add_(packed, chosen)
        keep[chosen] = True
        assert torch.equal(packed, bits.pack(keep))
    assert torch.equal(bits.full(size), bits.pack(torch.ones(size, dtype=torch.bool)))  # unused bits are zero


def test_bit_i_stands_at_place_i_of_its_byte():
    for i in range(17):
        packed = bits.pack(torch.arange(17) == i)
        assert packed.tolist() == [1 << i % 8 if byte == i // 8 else 0 for byte in range(3)]


@pytest.mark.parametrize("shape", [(3, 5, 2), (4, 3, 3, 3), (1, 1), (0, 4), (9,), ()], ids=str)
def test_unpacking_restores_every_shape(shape):
    keep = torch.rand(shape) < 0.5
    assert torch.equal(bits.unpack(bits.pack(keep), shape), keep)


def test_count_is_right_for_every_byte():
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    assert bits.count(every).tolist() == [byte.bit_count() for byte in range(256)]


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 16), (5, 11), (0, 8), (2, 3, 24)], ids=str)
def test_bits_are_counted_as_defined_whatever_the_shape_and_the_order_in_memory(shape):
    packed = torch.randint(256, shape, dtype=torch.uint8)
    for given in (packed, packed.transpose(0, -1), packed[..., ::2]):
        assert torch.equal(bits.count(given), bits.count_reference(given))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_are_counted_together_as_each_by_itself(device):
    keeps = [drawn(size).to(device) for size in (1, 8, 1023, 20000)] + [torch.zeros(0, dtype=torch.bool, device=device)]
    masks = [bits.pack(keep) for keep in keeps]
    assert bits.count_each(masks, [len(keep) for keep in keeps]) == [int(keep.sum()) for keep in keeps]
    assert bits.count_each([], []) == []


@pytest.mark.parametrize("pieces", ["one piece", "many pieces"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_zeroing_equals_its_reference(size, dtype, pieces, request):
    if pieces == "many pieces":
        request.getfixturevalue("small_chunks")
    tensor = torch.randn(size).mul(9).to(dtype)
    expected, packed = tensor.clone(), bits.pack(drawn(size))
    bits.zero_(tensor, packed)
    bits.zero_reference_(expected, packed)
    assert torch.equal(tensor, expected)


def zero_in_a_row_(tensor: torch.Tensor, packed: torch.Tensor) -> None:
    bits.zero_each_([(tensor[:0], packed[:0]), (tensor, packed)])


@pytest.mark.parametrize("zero_", [bits.zero_, bits.zero_reference_, zero_in_a_row_])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_become_positive_zero_and_the_kept_stay_to_the_bit(dtype, zero_):
    values = NASTY.to(dtype).repeat(11)
    tensor, keep = values.clone(), drawn(len(values))
    zero_(tensor, bits.pack(keep))

    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert not tensor.view(width)[~keep].any()
    assert torch.equal(tensor.view(width)[keep], values.view(width)[keep])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 3),
        lambda x: x[:, ::2],
        lambda x: x.permute(2, 0, 3, 1),
    ],
    ids=["channels_last", "transposed", "every second", "permuted"],
)
def test_masks_follow_the_order_of_the_shape_not_of_the_memory(strided, dtype):
    tensor = strided(torch.randn(3, 6, 5, 4).to(dtype))
    expected, keep = tensor.clone(), torch.rand(tensor.shape) < 0.5
    bits.zero_(tensor, bits.pack(keep))
    expected[~keep] = 0
    assert not tensor.is_contiguous()
    assert torch.equal(tensor, expected)
    assert torch.equal(bits.unpack(bits.pack(keep), tensor.shape), keep)


def test_zeroing_a_parameter_counts_as_a_change_of_it():
    weight = torch.nn.Parameter(torch.randn(20))
    before = weight._version
    with torch.no_grad():
        bits.zero_(weight, bits.pack(drawn(20)))
    assert weight._version > before
