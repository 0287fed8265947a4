"""Codes of few bits come back from their stream, which is what its definition says."""

import pytest
import torch

from prunus.ops import codes

SIZES = [0, 1, 2, 7, 8, 9, 16, 17, 21, 22, 63, 64, 65, 1000]


def by_definition(values: torch.Tensor, bits: int) -> list[int]:
    number = sum(int(value) << i * bits for i, value in enumerate(values))
    return list(number.to_bytes(codes.num_bytes(len(values), bits), "little"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_stream_is_one_long_number_and_gives_its_codes_back(bits, size):
    values = torch.randint(0, 2**bits, (size,), dtype=torch.uint8)
    stream = codes.pack(values, bits)
    assert stream.tolist() == by_definition(values, bits) and len(stream) % 8 == 0
    assert torch.equal(codes.unpack(stream, size, bits), values)


@pytest.mark.parametrize("size", [1, 5, 17, 21])
@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_a_bit_behind_the_last_code_is_refused_wherever_it_is(bits, size):
    stream = codes.pack(torch.zeros(size, dtype=torch.uint8), bits)
    for place in range(size * bits, 8 * len(stream)):
        wrong = stream.clone()
        wrong[place // 8] |= 1 << place % 8
        with pytest.raises(ValueError, match="bits behind the last one"):
            codes.unpack(wrong, size, bits)
