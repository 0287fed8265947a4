"""Products of sparse matrices with up to 16 vectors on NVIDIA GPUs, by the kernels of ``kernels.cu``."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _nvrtc
from .gaps import Gaps
from .tiles import COLUMNS, ROWS, Tiles

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST = 16  # vectors
TILE_FROM = (9, 0)  # compute capability from which the copies of a tile are made by the device itself
TILE_WARPS = 8
GAP_WARPS = 32


def can_tile(device: torch.device) -> bool:
    """Whether the device multiplies tiles."""
    return device.type == "cuda" and _nvrtc.is_there() and torch.cuda.get_device_capability(device) >= TILE_FROM


def tile_product(x: Tensor, tiles: Tiles, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for x of up to 16 rows, of the type of the tiles."""
    num_rows, width = tiles.shape
    if width % COLUMNS or not x.is_contiguous():
        x = pad(x, (0, -width % COLUMNS)).contiguous()
    y = torch.empty(len(x), num_rows, dtype=x.dtype, device=x.device)
    vectors = 8 if len(x) <= 8 else 16
    kernel = _nvrtc.kernel(f"tile_product<{TYPES[x.dtype]}, {vectors}, {TILE_WARPS}>", _index(x))
    shared = 512 + TILE_WARPS * max(2 * tiles.stage, ROWS * vectors * 4)
    args = (tiles.data, tiles.starts, x, bias, y, num_rows, x.shape[1], tiles.across, len(x), tiles.stage)
    kernel(-(-num_rows // ROWS), TILE_WARPS * 32, shared, args)
    return y


def tile_dense(tiles: Tiles) -> Tensor:
    """The matrix with its zeros."""
    num_rows, width = tiles.shape
    out = torch.empty(tiles.shape, dtype=tiles.dtype, device=tiles.data.device)
    num_tiles = len(tiles.starts) - 1
    if out.numel():
        kernel = _nvrtc.kernel("tile_dense", _index(out))
        kernel(-(-num_tiles // 8), 256, 0, (tiles.data, tiles.starts, out, num_rows, width, tiles.across, num_tiles))
    return out


def gap_product(x: Tensor, gaps: Gaps, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for x of any number of rows, of the type of the values."""
    num_rows, width = gaps.shape
    y = torch.empty(len(x), num_rows, dtype=x.dtype, device=x.device)
    most = most_at_once(x)
    for first in range(0, len(x), most):
        part, out = x[first : first + most], y[first : first + most]
        num = max(2, 1 << (len(part) - 1).bit_length())
        if num != len(part):
            part = pad(part, (0, 0, 0, num - len(part)))
            out = torch.empty(num, num_rows, dtype=x.dtype, device=x.device)
        kernel = _nvrtc.kernel(f"gap_product<{TYPES[x.dtype]}, {num}, {GAP_WARPS}>", _index(x))
        shared = width * num * x.element_size()
        grid = min(kernel.resident(GAP_WARPS * 32, shared), -(-num_rows // GAP_WARPS))
        args = (gaps.values, gaps.codes, gaps.heads, gaps.rows, part.contiguous(), bias, out, num_rows, width)
        kernel(grid, GAP_WARPS * 32, shared, args)
        if len(out) > len(x) - first:
            y[first:] = out[: len(x) - first]
    return y


def most_at_once(x: Tensor) -> int:
    """Vectors of x that one product in gap form takes: they are in shared memory, and a number's step in a byte."""
    fitting = min(16 // x.element_size(), _shared(_index(x)) // max(1, x.shape[-1] * x.element_size()))
    return 1 << fitting.bit_length() - 1 if fitting else 0


@cache
def _shared(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _index(x: Tensor) -> int:
    return x.device.index if x.device.index is not None else torch.cuda.current_device()
