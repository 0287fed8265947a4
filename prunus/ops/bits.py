"""One bit a weight: masks packed eight to a byte, and tensors zeroed by them.

Bit ``i % 8`` of byte ``i // 8`` says whether element ``i`` of the flattened tensor is kept;
the unused bits of the last byte are zero. On the CPU numpy's (un)packing is used: it is vectorised.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # elements worked on at a time: temporaries of a megabyte stay in the cache
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words_of(tensor: Tensor) -> Tensor:
    """The flattened elements as integers of their width, bit for bit; a copy only if it is not contiguous."""
    return tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])


def sum_of_bits(tensor: Tensor) -> int:
    """The exact sum of the elements as integers of their width."""
    words = words_of(tensor)
    return int(words.numpy().sum(dtype=np.int64) if words.is_cpu else words.sum(dtype=torch.int64))


def num_bytes(numel: int) -> int:
    """Bytes that hold one bit for each of ``numel`` elements."""
    return -(-numel // 8)


def full(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Packed mask that keeps all of ``numel`` elements."""
    bits = torch.full((num_bytes(numel),), 255, dtype=torch.uint8, device=device)
    if numel % 8:
        bits[-1] = (1 << numel % 8) - 1
    return bits


def pack_reference(keep: Tensor) -> Tensor:
    """``sum_i keep_i 2^i`` over each run of eight elements of the flattened ``keep``."""
    flat = keep.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=keep.device)).sum(1, dtype=torch.uint8)


def pack(keep: Tensor) -> Tensor:
    """``pack_reference``: a boolean tensor as uint8, eight elements to a byte."""
    if keep.is_cpu:
        return torch.from_numpy(np.packbits(keep.reshape(-1).numpy(), bitorder="little"))
    return pack_reference(keep)


def unpack_reference(bits: Tensor, numel: int) -> Tensor:
    """``bits[i // 8] >> (i % 8) & 1`` as booleans, for i < numel."""
    digits = bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (digits & 1).view(-1)[:numel].bool()


def unpack(bits: Tensor, shape: Sequence[int]) -> Tensor:
    numel = math.prod(shape)
    if bits.is_cpu:
        flat = torch.from_numpy(np.unpackbits(bits.numpy(), count=numel, bitorder="little")).view(torch.bool)
    else:
        flat = unpack_reference(bits, numel)
    return flat.view(tuple(shape))


def at(bits: Tensor, positions: Tensor) -> Tensor:
    """Whether the elements at ``positions`` are kept."""
    return (bits[positions >> 3] >> (positions & 7).to(torch.uint8) & 1).bool()


def add_(bits: Tensor, positions: Tensor) -> None:
    """Set the bits at ``positions``, which must be distinct and not set yet."""
    values = torch.ones((), dtype=torch.uint8, device=bits.device) << (positions & 7).to(torch.uint8)
    bits.index_add_(0, positions >> 3, values)


def count_reference(bits: Tensor) -> Tensor:
    """Number of set bits along the last dimension, on the device of ``bits``."""
    pairs = bits - (bits >> 1 & 0x55)
    nibbles = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return (nibbles + (nibbles >> 4) & 0x0F).sum(-1, dtype=torch.int64)


def count(bits: Tensor) -> Tensor:
    """``count_reference``; numpy from 2.0 on has an instruction for it."""
    if not bits.is_cpu or not hasattr(np, "bitwise_count"):
        return count_reference(bits)
    words = bits.numpy()
    if words.ndim and words.shape[-1] % 8 == 0 and words.flags.c_contiguous:
        words = words.view(np.uint64)
    return torch.as_tensor(np.bitwise_count(words).sum(-1, dtype=np.int64))


def count_each(masks: Sequence[Tensor], numels: Sequence[int]) -> list[int]:
    """Set bits of packed masks of so many elements; on one GPU they are counted together."""
    if masks and all(mask.is_cuda and mask.device == masks[0].device for mask in masks):
        from ._triton.packed import count_each as kernel

        return kernel(masks, numels)
    return [int(count(mask)) for mask in masks]


def zero_reference_(tensor: Tensor, bits: Tensor) -> None:
    """Set to +0.0 the elements of ``tensor`` whose bit is not set, NaN and infinity too."""
    tensor.masked_fill_(~unpack(bits, tensor.shape), 0)


def zero_(tensor: Tensor, bits: Tensor) -> None:
    """``zero_reference_``; a CPU multiplies words by 0 or 1, which is exact and faster than a masked fill."""
    if tensor.is_cuda and tensor.is_contiguous():
        from ._triton.packed import zero_ as kernel

        kernel(words_of(tensor), bits)
    elif tensor.is_cpu and tensor.is_contiguous():
        words, packed = words_of(tensor), bits.numpy()
        scratch = torch.empty(min(CHUNK, len(words)), dtype=words.dtype)
        for start in range(0, len(words), CHUNK):
            chunk = words[start : start + CHUNK]
            ones = np.unpackbits(packed[start // 8 : (start + CHUNK) // 8], count=len(chunk), bitorder="little")
            chunk.mul_(scratch[: len(chunk)].copy_(torch.from_numpy(ones)))
    else:
        zero_reference_(tensor, bits)


def zero_each_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """``zero_`` of every tensor by its bits; tensors of one width on one GPU in one launch."""
    alike: dict[tuple[torch.device, int], list[tuple[Tensor, Tensor]]] = {}
    for tensor, bits in pairs:
        if tensor.is_cuda and tensor.is_contiguous() and tensor.numel():
            alike.setdefault((tensor.device, tensor.element_size()), []).append((tensor, bits))
        else:
            zero_(tensor, bits)
    for group in alike.values():
        from ._triton.packed import zero_each_ as kernel

        kernel(group)


def check_count(num_kept: int, num_values: int) -> None:
    if num_kept != num_values:
        raise ValueError(f"the mask keeps {num_kept} elements, but there are {num_values} values")
