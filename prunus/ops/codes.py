"""Codes of few bits, one after another: code j starts at bit j * b of a stream of bytes, lowest bit first.

A stream is padded with zeros to whole words of 64 bits. Some codes fill whole bytes together, as 8 codes of 3 bits fill
3 bytes; streams are worked on by the columns of such groups.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def num_bytes(num_codes: int, bits: int) -> int:
    return 8 * -(-num_codes * bits // 64)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The stream of codes, one a byte, that are less than ``2^bits``."""
    num, width = _group(bits)
    groups = pad(codes, (0, -len(codes) % num)).view(-1, num)
    stream = torch.zeros(len(groups), width, dtype=torch.uint8, device=codes.device)
    for number in range(num):
        byte, start = divmod(number * bits, 8)
        stream[:, byte] |= groups[:, number] << start
        if start + bits > 8:
            stream[:, byte + 1] |= groups[:, number] >> 8 - start
    stream = stream.view(-1)
    return pad(stream, (0, num_bytes(len(codes), bits) - len(stream)))  # cuts what an incomplete group has too much


def unpack(stream: Tensor, num_codes: int, bits: int) -> Tensor:
    """The codes of a stream, one a byte; ValueError if it has bits behind the last one."""
    num, width = _group(bits)
    num_groups = -(-num_codes // num)
    groups = pad(stream, (0, max(0, num_groups * width - len(stream))))[: num_groups * width].view(-1, width)
    codes = torch.empty(num_groups, num, dtype=torch.uint8, device=stream.device)
    for number in range(num):
        byte, start = divmod(number * bits, 8)
        code = groups[:, byte] >> start
        if start + bits > 8:
            code |= groups[:, byte + 1] << 8 - start
        torch.bitwise_and(code, 2**bits - 1, out=codes[:, number])
    codes = codes.view(-1)
    if stream[num_groups * width :].any() or codes[num_codes:].any():
        raise ValueError("its codes have bits behind the last one")
    return codes[:num_codes]


def _group(bits: int) -> tuple[int, int]:
    """How many codes fill how many whole bytes."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)
