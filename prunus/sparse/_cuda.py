"""Products of sparse matrices with up to 16 vectors on NVIDIA GPUs, by the kernels of ``kernels.cu``."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _nvrtc
from .gaps import Gaps
from .tiles import COLUMNS, ROWS, Tiles

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TILE_FROM = (9, 0)  # compute capability from which the copies of a tile are made by the device itself
TILE_WARPS = 8
GAP_WARPS = 32
DENSE_WARPS = 8


@cache
def can_tile(device: torch.device) -> bool:
    """Whether the device multiplies tiles."""
    return device.type == "cuda" and _nvrtc.is_there() and torch.cuda.get_device_capability(device) >= TILE_FROM


def tile_product(x: Tensor, tiles: Tiles, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for x of shape (..., in) with up to 16 vectors, of the type of the tiles."""
    num_rows, width = tiles.shape
    y = x.new_empty((*x.shape[:-1], num_rows))
    num = y.numel() // num_rows
    if width % COLUMNS:
        x = pad(x, (0, -width % COLUMNS))
    x = x.contiguous()
    vectors = 8 if num <= 8 else 16
    ready = tiles.launches.get(vectors)  # what does not change from call to call is kept beside the form
    if ready is None:
        kernel = _nvrtc.kernel(f"tile_product<{TYPES[x.dtype]}, {vectors}, {TILE_WARPS}>", 10, _index(x))
        shared = 512 + TILE_WARPS * max(2 * tiles.stage, ROWS * vectors * 4)
        ready = kernel, shared, tiles.data.data_ptr(), tiles.starts.data_ptr(), tiles.across
        tiles.launches[vectors] = ready
    kernel, shared, data, starts, across = ready
    at, out, add = x.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr()
    args = (data, starts, at, add, out, num_rows, across * COLUMNS, across, num, tiles.stage)
    kernel(-(-num_rows // ROWS), TILE_WARPS * 32, shared, args)
    return y


def tile_dense(tiles: Tiles) -> Tensor:
    """The matrix with its zeros."""
    num_rows, width = tiles.shape
    out = torch.empty(tiles.shape, dtype=tiles.dtype, device=tiles.data.device)
    num_tiles = len(tiles.starts) - 1
    if out.numel():
        kernel = _nvrtc.kernel("tile_dense", 7, _index(out))
        at = (tiles.data.data_ptr(), tiles.starts.data_ptr(), out.data_ptr())
        kernel(-(-num_tiles // 8), 256, 0, (*at, num_rows, width, tiles.across, num_tiles))
    return out


def gap_dense(gaps: Gaps) -> Tensor | None:
    """The matrix with its zeros; None if a row does not fit into shared memory."""
    num_rows, width = gaps.shape
    out = torch.empty(gaps.shape, dtype=gaps.dtype, device=gaps.values.device)
    shared = -(-width * out.element_size() // 16) * 16
    if shared > _nvrtc.most_shared(_index(out)):
        return None
    if out.numel():
        kernel = _nvrtc.kernel(f"gap_dense<{TYPES[gaps.dtype]}, {DENSE_WARPS}>", 7, _index(out))
        parts = [part.data_ptr() for part in (gaps.values, gaps.codes, gaps.heads, gaps.rows, out)]
        grid = min(num_rows, kernel.resident(DENSE_WARPS * 32, shared))
        kernel(grid, DENSE_WARPS * 32, shared, (*parts, num_rows, width))
    return out


def gap_product(x: Tensor, gaps: Gaps, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for x of shape (..., in), of the type of the values."""
    num_rows, width = gaps.shape
    y = x.new_empty((*x.shape[:-1], num_rows))
    x, rows = x.reshape(-1, width), y.view(-1, num_rows)
    num, most = len(x), most_at_once(x)
    parts = [part.data_ptr() for part in (gaps.values, gaps.codes, gaps.heads, gaps.rows)]
    for first in range(0, num, most):
        part, out = x[first : first + most], rows[first : first + most]
        taken = max(2, 1 << (len(part) - 1).bit_length())
        if taken != len(part):
            part, out = pad(part, (0, 0, 0, taken - len(part))), x.new_empty(taken, num_rows)
        part = part.contiguous()
        kernel = _nvrtc.kernel(f"gap_product<{TYPES[x.dtype]}, {taken}, {GAP_WARPS}>", 9, _index(x))
        shared = width * taken * x.element_size()
        grid = min(kernel.resident(GAP_WARPS * 32, shared), -(-num_rows // GAP_WARPS))
        args = (*parts, part.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), num_rows, width)
        kernel(grid, GAP_WARPS * 32, shared, args)
        if len(out) > num - first:
            rows[first:] = out[: num - first]
    return y


def most_at_once(x: Tensor) -> int:
    """Vectors of x that one product in gap form takes: they are in shared memory, and a number's step in a byte."""
    fitting = min(16 // x.element_size(), _nvrtc.most_shared(_index(x)) // max(1, x.shape[-1] * x.element_size()))
    return 1 << fitting.bit_length() - 1 if fitting else 0


def _index(x: Tensor) -> int:
    return x.device.index if x.device.index is not None else torch.cuda.current_device()
