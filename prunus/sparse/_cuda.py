"""Products of sparse matrices with up to 16 vectors on NVIDIA GPUs, by the kernels of ``kernels.cu``."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.grid import GROUP
from . import _nvrtc
from .coded_gaps import CodedGaps
from .coded_tiles import CodedTiles
from .gaps import Gaps
from .tiles import COLUMNS, ROWS, TileForm

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TILE_FROM = (9, 0)  # compute capability from which the copies of a tile are made by the device itself
TILE_WARPS = 8
CODED_WARPS, CODED_STAGES, CODED_GROUP = 8, 3, 2  # stages of a group of tiles, as the kernel says
CODED_GAP_WARPS = 16  # of a block
CODED_GAP_AHEAD = 4  # words that each lane of a warp loads ahead
CODED_GAP_MOST = 4  # vectors at once
GAP_WARPS = 32
DENSE_WARPS = 8
Product = Callable[[Tensor, Any, Tensor | None], Tensor]  # of x, the form it was prepared for, and a bias


@cache
def can_tile(device: torch.device) -> bool:
    return device.type == "cuda" and _nvrtc.is_there() and torch.cuda.get_device_capability(device) >= TILE_FROM


def tile_product(tiles: TileForm, num: int, device: int) -> Product:
    """``x W^T + bias`` for ``num`` vectors x (..., in), up to 16; it has the tiles' addresses, which must live."""
    num_rows, width = tiles.shape
    vectors, missing, blocks = 8 if num <= 8 else 16, -width % COLUMNS, -(-num_rows // ROWS)
    kind, sums = f"{TYPES[tiles.dtype]}, {vectors}", ROWS * vectors * 4
    if isinstance(tiles, CodedTiles):
        warps, staged = CODED_WARPS, CODED_STAGES * CODED_GROUP * tiles.stage
        kernel = _nvrtc.kernel(f"coded_product<{kind}, {warps}, {CODED_STAGES}, {CODED_GROUP}>", device)
        shared = 512 + warps * (staged + sums)
        blocks = min(blocks, kernel.resident(warps * 32, shared))
    else:
        warps = TILE_WARPS
        kernel = _nvrtc.kernel(f"tile_product<{kind}, {warps}>", device)
        shared = 512 + warps * max(2 * tiles.stage, sums)
    sizes = (num_rows, width + missing, tiles.across, num, tiles.stage)
    args = (tiles.data.data_ptr(), tiles.starts.data_ptr(), 0, 0, 0, *sizes)
    launch = _nvrtc.Launch(kernel, blocks, warps * 32, shared, args, slice(2, 5))

    def run(x: Tensor, tiles: TileForm, bias: Tensor | None) -> Tensor:
        *batch, _ = x.shape
        y = x.new_empty(*batch, num_rows)
        x = (pad(x, (0, missing)) if missing else x).contiguous()
        if x.data_ptr() % 16:  # it is read 16 bytes at a time
            x = x.clone()
        launch(x.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
        return y

    return run


def tile_dense(tiles: TileForm) -> Tensor:
    num_rows, width = tiles.shape
    out = torch.empty(tiles.shape, dtype=tiles.dtype, device=tiles.data.device)
    num_tiles = len(tiles.starts) - 1
    if out.numel():
        name, warps, shared = "tile_dense", 8, 0
        if isinstance(tiles, CodedTiles):
            name = f"coded_dense<{TYPES[tiles.dtype]}>"
        if isinstance(tiles, CodedGaps):
            name, warps = f"coded_gap_dense<{TYPES[tiles.dtype]}, 4>", 4
            shared = warps * ROWS * (tiles.TILE_COLUMNS + 8) * out.element_size()  # a tile, its rows in other banks
        kernel = _nvrtc.kernel(name, out.get_device())
        at = (tiles.data.data_ptr(), tiles.starts.data_ptr(), out.data_ptr())
        kernel(-(-num_tiles // warps), warps * 32, shared, (*at, num_rows, width, tiles.across, num_tiles))
    return out


def gap_dense(gaps: Gaps) -> Tensor | None:
    """The matrix with its zeros; None if a row does not fit into shared memory."""
    num_rows, width = gaps.shape
    out = torch.empty(gaps.shape, dtype=gaps.dtype, device=gaps.values.device)
    shared = -(-width * out.element_size() // 16) * 16
    if shared > _nvrtc.most_shared(out.get_device()):
        return None
    if out.numel():
        kernel = _nvrtc.kernel(f"gap_dense<{TYPES[gaps.dtype]}, {DENSE_WARPS}>", out.get_device())
        parts = [part.data_ptr() for part in (gaps.values, gaps.codes, gaps.heads, gaps.rows, out)]
        grid = min(num_rows, kernel.resident(DENSE_WARPS * 32, shared))
        kernel(grid, DENSE_WARPS * 32, shared, (*parts, num_rows, width))
    return out


def gap_product(gaps: Gaps, num: int, device: int) -> Product:
    """``x W^T + bias`` for x of shape (..., in) with ``num`` vectors of the type of the values, as ``tile_product``."""
    num_rows, width = gaps.shape
    parts = [part.data_ptr() for part in (gaps.values, gaps.codes, gaps.heads, gaps.rows)]

    def launch_of(taken: int) -> _nvrtc.Launch:
        kernel = _nvrtc.kernel(f"gap_product<{TYPES[gaps.dtype]}, {taken}, {GAP_WARPS}>", device)
        shared = width * taken * gaps.dtype.itemsize
        grid = min(kernel.resident(GAP_WARPS * 32, shared), -(-num_rows // GAP_WARPS))
        args = (*parts, 0, 0, 0, num_rows, width)
        return _nvrtc.Launch(kernel, grid, GAP_WARPS * 32, shared, args, slice(4, 7))

    return _in_turn(launch_of, gaps, num, 2, most_at_once(gaps, device))


def coded_gap_product(form: CodedGaps, num: int, device: int) -> Product:
    """``gap_product`` of codes; one vector is float32 in shared memory where it fits, which saves converting it."""
    num_rows, width = form.shape
    warps = CODED_GAP_WARPS

    def launch_of(taken: int) -> _nvrtc.Launch:
        size = form.dtype.itemsize
        if taken == 1 and _columns_bytes(form, 4) < _nvrtc.most_shared(device) // 2:
            size = 4
        kind = f"{TYPES[form.dtype]}, {size}, {taken}, {warps}, {CODED_GAP_AHEAD}"
        kernel = _nvrtc.kernel(f"coded_gap_product<{kind}>", device)
        shared = 2 * warps * ROWS * taken * 4 + _columns_bytes(form, taken * size)
        grid = min(kernel.resident(warps * 32, shared), -(-num_rows // ROWS))
        args = (form.data.data_ptr(), form.starts.data_ptr(), 0, 0, 0, num_rows, width, form.across)
        return _nvrtc.Launch(kernel, grid, warps * 32, shared, args, slice(2, 5))

    return _in_turn(launch_of, form, num, 1, most_coded_at_once(form, device))


def _in_turn(
    launch_of: Callable[[int], _nvrtc.Launch], form: Gaps | CodedGaps, num: int, least: int, most: int
) -> Product:
    """The product with ``num`` vectors by launches that take a power of two of them each."""
    (num_rows, width), size, total, launches = form.shape, form.dtype.itemsize, 0, []
    while total < num:
        taken = max(least, 1 << (min(most, num - total) - 1).bit_length())
        launches.append((launch_of(taken), total * width * size, total * num_rows * size))
        total += taken

    def run(x: Tensor, form: Any, bias: Tensor | None) -> Tensor:
        *batch, _ = x.shape
        if total == num:
            x, y = x.contiguous(), x.new_empty(*batch, num_rows)
        else:
            x, y = pad(x.reshape(num, width), (0, 0, 0, total - num)), x.new_empty(total, num_rows)
        if x.data_ptr() % 16:  # one whose width allows it is read 16 bytes at a time
            x = x.clone()
        at, add, out = x.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
        for launch, x_offset, y_offset in launches:
            launch(at + x_offset, add, out + y_offset)
        return y if total == num else y[:num].view(*batch, num_rows)

    return run


def most_at_once(gaps: Gaps, device: int) -> int:
    """Vectors that one product in gap form takes: they are in shared memory, and a number's step in a byte."""
    size = gaps.dtype.itemsize
    fitting = min(16 // size, _nvrtc.most_shared(device) // max(1, gaps.shape[1] * size))
    return 1 << fitting.bit_length() - 1 if fitting else 0


def most_coded_at_once(form: CodedGaps, device: int) -> int:
    sums = 2 * CODED_GAP_WARPS * ROWS * 4
    room, size = _nvrtc.most_shared(device), form.dtype.itemsize
    return max(
        (num for num in (1, 2, CODED_GAP_MOST) if num * sums + _columns_bytes(form, num * size) <= room), default=0
    )


def _columns_bytes(form: CodedGaps, size: int) -> int:
    """Shared memory for columns of ``size`` bytes: groups lie 64 bytes apart, and one more is behind the last."""
    return 2 * form.across * (GROUP * size + 64) + GROUP * size
