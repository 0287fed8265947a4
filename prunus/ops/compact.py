"""Kept values without the zeros between them, and back.

What is zero is decided by the bits of an element, not by its value: only the pattern of +0.0 is left
out, so that -0.0 and every NaN come back as they were. Elements are moved as integers of their width.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import bits
from .bits import words_of
from .machine import in_threads

CHUNK = 1 << 17  # elements a thread works on at a time, a multiple of 8: what it makes of them stays in its cache

Array = np.ndarray[Any, Any]


def nonzero_reference(tensor: Tensor) -> Tensor:
    """Packed bits of ``pattern != 0`` over the flattened tensor."""
    return bits.pack_reference(words_of(tensor) != 0)


def compact_reference(tensor: Tensor, packed: Tensor) -> Tensor:
    """``tensor.flatten()[mask]``"""
    return words_of(tensor)[bits.unpack_reference(packed, tensor.numel())].view(tensor.dtype)


def expand_reference(values: Tensor, packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of ``shape`` with ``values`` written, in order, where the mask is set."""
    flat = torch.zeros(math.prod(shape), dtype=values.dtype, device=values.device)
    words_of(flat)[bits.unpack_reference(packed, len(flat))] = words_of(values)
    return flat.view(tuple(shape))


def nonzero(tensor: Tensor) -> Tensor:
    """``nonzero_reference``, chunk by chunk."""
    words = words_of(tensor)
    if words.is_cuda:
        from ._triton.compact import nonzero as kernel

        return kernel(words)
    if not words.is_cpu:
        return nonzero_reference(tensor)
    packed = torch.empty(bits.num_bytes(len(words)), dtype=torch.uint8)
    source, target = words.numpy(), packed.numpy()

    def work(span: slice) -> None:
        for chunk in chunks(span):
            target[_bytes(chunk)] = np.packbits(source[chunk] != 0, bitorder="little")

    in_threads(work, spans(len(words)))
    return packed


def compact(tensor: Tensor, packed: Tensor) -> Tensor:
    """``compact_reference``: the kept values in flattened order."""
    words = words_of(tensor)
    if words.is_cuda:
        from ._triton.compact import compact as kernel

        return kernel(words, packed).view(tensor.dtype)
    if not words.is_cpu:
        return compact_reference(tensor, packed)
    parts, num_kept = _starts(packed, len(words))
    values = torch.empty(num_kept, dtype=words.dtype)
    source, target, mask = words.numpy(), values.numpy(), packed.numpy()

    def work(part: tuple[slice, int]) -> None:
        span, start = part
        for chunk in chunks(span):
            at = _positions(mask, chunk)
            np.take(source[chunk], at, out=target[start : start + len(at)], mode="clip")
            start += len(at)

    in_threads(work, parts)
    return values.view(tensor.dtype)


def expand(values: Tensor, packed: Tensor, shape: Sequence[int]) -> Tensor:
    """``expand_reference``; a mask that does not fit the values is a ValueError."""
    numel, words = math.prod(shape), words_of(values)
    if words.is_cuda:
        from ._triton.compact import expand as kernel

        return kernel(words, packed, numel).view(values.dtype).view(tuple(shape))
    parts, num_kept = _starts(packed, numel)
    bits.check_count(num_kept, len(words))
    if not words.is_cpu:
        return expand_reference(values, packed, shape)
    flat = torch.empty(numel, dtype=words.dtype)
    source, target, mask = words.numpy(), flat.numpy(), packed.numpy()

    def work(part: tuple[slice, int]) -> None:
        span, start = part
        for chunk in chunks(span):
            at, here = _positions(mask, chunk), target[chunk]
            here[:] = 0
            here[at] = source[start : start + len(at)]
            start += len(at)

    in_threads(work, parts)
    return flat.view(values.dtype).view(tuple(shape))


def spans(numel: int) -> list[slice]:
    """One stretch a thread, each of whole chunks but the last."""
    length = CHUNK * max(1, -(-numel // (CHUNK * torch.get_num_threads())))
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


def chunks(span: slice) -> list[slice]:
    return [slice(start, min(start + CHUNK, span.stop)) for start in range(span.start, span.stop, CHUNK)]


def _bytes(chunk: slice) -> slice:
    """The packed bytes of a chunk, which begins at a multiple of eight."""
    return slice(chunk.start // 8, bits.num_bytes(chunk.stop))


def _starts(packed: Tensor, numel: int) -> tuple[list[tuple[slice, int]], int]:
    """Each thread's stretch with how many elements are kept before it, and how many are kept in all."""
    parts, total = [], 0
    for span in spans(numel):
        parts.append((span, total))
        total += int(bits.count(packed[_bytes(span)]))
    return parts, total


def _positions(mask: Array, chunk: slice) -> Array:
    """Where the kept elements of a chunk stand in it: faster to use, several times, than the booleans."""
    kept = np.unpackbits(mask[_bytes(chunk)], count=chunk.stop - chunk.start, bitorder="little")
    return np.flatnonzero(kept.view(np.bool_))
