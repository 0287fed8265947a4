"""Products of a matrix in gap form with a few vectors, and the matrix with its zeros.

One warp computes one row, so that a tensor of 32 elements is one for each lane. A lane's codes are spread to bytes,
whose sums by ``dp4a`` are columns; where its entries begin, a sum over the lanes says, of both runs at once in the two
halves of a word. An entry costs a handful of instructions and a read of ``x``, which stays in the L1 cache: such reads
are cheap as long as the lanes' columns are close together. Blocks are loaded before the ones ahead of them are used.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops._triton.launch import launch_as
from .gaps import BLOCK, LANES, RUN, RUNS, UNIT, Gaps

L, U, B = tl.constexpr(LANES), tl.constexpr(UNIT), tl.constexpr(BLOCK)
ONES = tl.constexpr(0x01010101)
AHEAD = tl.constexpr(2)  # blocks that are taken at a time, while as many are on their way
assert (RUN, RUNS) == (4, 2)  # four bytes are a word, and two sums


@triton.jit
def dot4(bytes4, FACTORS: tl.constexpr, start, ASM: tl.constexpr):
    """``start`` plus the sum of four bytes times the bytes of FACTORS."""
    if ASM:
        factors = tl.full(bytes4.shape, FACTORS, tl.int32)
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [bytes4, factors, start], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            start += ((bytes4 >> (8 * i)) & 0xFF) * ((FACTORS >> (8 * i)) & 0xFF)
        return start


@triton.jit
def sum_before(n, ASM: tl.constexpr):
    """For each lane the sum over the lanes before it."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t, s;
            mov.b32 s, $1;
            shfl.sync.up.b32 t|p, s, 1, 0, -1;  @p add.u32 s, s, t;
            shfl.sync.up.b32 t|p, s, 2, 0, -1;  @p add.u32 s, s, t;
            shfl.sync.up.b32 t|p, s, 4, 0, -1;  @p add.u32 s, s, t;
            shfl.sync.up.b32 t|p, s, 8, 0, -1;  @p add.u32 s, s, t;
            shfl.sync.up.b32 t|p, s, 16, 0, -1; @p add.u32 s, s, t;
            sub.u32 $0, s, $1;
            }""",
            "=r,r",
            [n],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.cumsum(n, 0) - n


@triton.jit
def spread(codes):
    """A unit's codes as bytes: those of the first run, those of the second."""
    return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F


@triton.jit
def starts_of(codes, heads, ASM: tl.constexpr):
    """Columns that the first and the second run of each lane start from; ``heads`` has those of the warp."""
    first, second = spread(codes)
    sums = dot4(first, ONES, codes * 0, ASM) | (dot4(second, ONES, codes * 0, ASM) << 16)
    starts = sum_before(sums, ASM) + heads
    return starts & 0xFFFF, (starts >> 16) & 0xFFFF


@triton.jit
def floats_of(word, KIND: tl.constexpr):
    """Numbers of type KIND in words of 32 or 64 bits, lowest first."""
    if word.dtype == tl.int64:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        return floats_of(low, KIND) + floats_of(high, KIND)
    elif KIND.is_fp32():
        return (word.to(tl.float32, bitcast=True),)
    elif KIND.is_bf16():
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = (word & 0xFFFF).to(tl.int16), (word >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def block_at(values, codes, heads, unit, end, block, last):
    """Codes, heads and values, as words of 64 bits, of a block; zeros beyond the row's last unit and block."""
    KIND: tl.constexpr = values.dtype.element_ty
    WORDS: tl.constexpr = U * KIND.primitive_bitwidth // 64  # of a unit's values; two of them are one read
    lane, wide = tl.arange(0, L), tl.arange(0, 2 * L)
    code_at, head_at = codes.to(tl.pointer_type(tl.int32)) + unit + lane, heads.to(tl.pointer_type(tl.int32)) + block
    code = tl.load(code_at, mask=unit + lane < end, other=0, eviction_policy="evict_first")
    head = tl.load(head_at + lane * 0, mask=block + lane * 0 < last, other=0, eviction_policy="evict_first")
    place = wide
    if WORDS > 2:
        place = wide // 2 * WORDS + wide % 2
    value_at = values.to(tl.pointer_type(tl.int64)) + unit * WORDS + place
    words = ()
    for i in tl.static_range(0, WORDS, 2):
        words += (tl.load(value_at + i, mask=unit * 2 + wide < end * 2, other=0, eviction_policy="evict_first"),)
    return code, head, words


@triton.jit
def values_of(words, KIND: tl.constexpr):
    """The eight values of each lane's unit from the words that hold them."""
    values = ()
    for i in tl.static_range(0, KIND.primitive_bitwidth // 16):
        a, b = tl.split(tl.reshape(words[i], (words[i].shape[0] // 2, 2)))
        values += floats_of(a, KIND) + floats_of(b, KIND)
    return values


@triton.jit
def taken(x, offset, BATCH: tl.constexpr):
    """The numbers of ``x``, which is (in, BATCH), at a byte offset: one for each vector."""
    KIND: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = BATCH * KIND.primitive_bitwidth // 8
    at = x.to(tl.pointer_type(tl.int8)) + offset.to(tl.uint32, bitcast=True)
    if BATCH == 1:
        return (tl.load(at.to(tl.pointer_type(KIND))).to(tl.float32),)
    elif BYTES == 4:
        return floats_of(tl.load(at.to(tl.pointer_type(tl.int32))), KIND)
    else:
        numbers = floats_of(tl.load(at.to(tl.pointer_type(tl.int64))), KIND)
        for i in tl.static_range(1, BYTES // 8):
            numbers += floats_of(tl.load((at + 8 * i).to(tl.pointer_type(tl.int64))), KIND)
        return numbers


@triton.jit
def added(sums, value, numbers, BATCH: tl.constexpr):
    out = ()
    for b in tl.static_range(BATCH):
        out += (sums[b] + value * numbers[b],)
    return out


@triton.jit
def run_product(sums, x, bytes4, values, FROM: tl.constexpr, offset, BATCH: tl.constexpr, ASM: tl.constexpr):
    """Sums plus four entries a lane, whose values are those from FROM on; ``offset`` is in bytes of ``x``."""
    SCALE: tl.constexpr = BATCH * x.dtype.element_ty.primitive_bitwidth // 8
    for i in tl.static_range(4):
        at = dot4(bytes4, (SCALE * ONES) >> (24 - 8 * i), offset, ASM)  # the bytes up to i
        sums = added(sums, values[FROM + i], taken(x, at, BATCH), BATCH)
    return sums


@triton.jit
def block_product(sums, x, block, KIND: tl.constexpr, BATCH: tl.constexpr, ASM: tl.constexpr):
    """Sums plus the entries of a block."""
    SCALE: tl.constexpr = BATCH * x.dtype.element_ty.primitive_bitwidth // 8
    first, second = spread(block[0])
    start, other = starts_of(block[0], block[1], ASM)
    values = values_of(block[2], KIND)
    sums = run_product(sums, x, first, values, 0, start * SCALE, BATCH, ASM)
    return run_product(sums, x, second, values, 4, other * SCALE, BATCH, ASM)


@triton.jit
def product_kernel(
    x, values, codes, heads, rows, bias, y, BATCH: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """``y = W x + bias``; x is (in, BATCH), y is (BATCH, out)."""
    KIND: tl.constexpr = values.dtype.element_ty
    row = tl.program_id(0)
    unit, block = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    end, last = tl.load(rows + row * 3 + 3), tl.load(rows + row * 3 + 4)
    sums = ()
    for _ in tl.static_range(BATCH):
        sums += (tl.zeros((L,), tl.float32),)
    coming = ()
    for i in tl.static_range(AHEAD):
        coming += (block_at(values, codes, heads, unit + L * i, end, block + i, last),)
    for at in tl.range(block, last, AHEAD):
        here = coming
        unit += L * AHEAD
        coming = ()
        for i in tl.static_range(AHEAD):
            coming += (block_at(values, codes, heads, unit + L * i, end, at + AHEAD + i, last),)
        for i in tl.static_range(AHEAD):
            sums = block_product(sums, x, here[i], KIND, BATCH, ASM)
    for b in tl.static_range(BATCH):
        total = tl.sum(sums[b])
        if BIASED:
            total += tl.load(bias + row).to(tl.float32)
        tl.store(y + b * tl.num_programs(0) + row, total.to(y.dtype.element_ty))


@triton.jit
def dense_kernel(values, codes, heads, rows, out, width, ASM: tl.constexpr):
    """Write the entries of one row where they belong, among zeros that are there already."""
    lane, row = tl.arange(0, L), tl.program_id(0)
    unit, block, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    out += row.to(tl.int64) * width
    for k in range(tl.cdiv(count, B)):
        left = count - k * B
        lanes = tl.minimum(tl.cdiv(left, U), L)
        at = unit + k * L + lane
        word = tl.load(codes.to(tl.pointer_type(tl.int32)) + at, mask=lane < lanes, other=0)
        column, other = starts_of(word, tl.load(heads.to(tl.pointer_type(tl.int32)) + block + k), ASM)
        for run in tl.static_range(2):
            for i in tl.static_range(4):
                column += (word >> (8 * i + 4 * run)) & 15
                valid = (lane < lanes) & (4 * run * lanes + 4 * lane + i < left)
                tl.store(out + column, tl.load(values + at * U + 4 * run + i, mask=valid), mask=valid)
            column = other


def product(x: Tensor, gaps: Gaps, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for a few vectors, x of shape (..., in)."""
    *shape, width = x.shape
    rows, num_rows = x.reshape(-1, width), gaps.shape[0]
    num = len(rows)
    batch = 1 << (num - 1).bit_length()
    y = torch.empty(batch, num_rows, dtype=x.dtype, device=x.device)
    if y.numel():
        columns = rows if batch == 1 else torch.nn.functional.pad(rows, (0, 0, 0, batch - num)).t()
        _launch(columns.contiguous(), gaps, bias, y, batch)
    return y[:num].view(*shape, num_rows)


def product_of_one(x: Tensor, gaps: Gaps, bias: Tensor | None) -> Tensor:
    """``product`` for one vector, of shape (..., in), at less cost for the host than torch's own product has.

    All that does not change from call to call is found at the first one, and kept beside the form: the compiled
    kernel, and where its arguments are.
    """
    *batch, _ = x.shape
    y = x.new_empty(*batch, gaps.shape[0])
    if not x.is_contiguous():
        x = x.contiguous()
    at = x.data_ptr()
    ready = gaps.launches.get((x.dtype, at % 16))
    if ready is None or ready[0] != torch.cuda.current_device() or bias is not ready[1]:
        known = _launch(x, gaps, bias, y, 1)
        if known is not None and y.data_ptr() % 16 == 0:
            compiled, tail, index = known
            parts = (gaps.values, gaps.codes, gaps.heads, gaps.rows, x if bias is None else bias)
            addresses = [part.data_ptr() for part in parts]
            run = compiled[(gaps.shape[0], 1, 1)]
            gaps.launches[x.dtype, at % 16] = index, bias, run, addresses, tail
        return y
    _, _, run, addresses, tail = ready
    run(at, *addresses, y.data_ptr(), *tail)
    return y


def _launch(columns: Tensor, gaps: Gaps, bias: Tensor | None, y: Tensor, batch: int) -> Any:
    """The kernel's compiled form, with which it can be launched again; None in the interpreter."""
    parts = (columns, gaps.values, gaps.codes, gaps.heads, gaps.rows, columns if bias is None else bias, y)
    how = {"BATCH": batch, "BIASED": bias is not None, "ASM": _is_nvidia(columns), "num_warps": 1}
    aligned = [part.data_ptr() % 16 == 0 for part in parts]
    kind = (columns.device, columns.dtype, gaps.values.dtype, None if bias is None else bias.dtype, batch, *aligned)
    return launch_as(kind, product_kernel, (gaps.shape[0],), parts, how)


def dense(gaps: Gaps) -> Tensor:
    """The matrix with its zeros."""
    out = torch.zeros(gaps.shape, dtype=gaps.values.dtype, device=gaps.values.device)
    if out.numel():
        dense_kernel[(gaps.shape[0],)](
            gaps.values, gaps.codes, gaps.heads, gaps.rows, out, gaps.shape[1], ASM=_is_nvidia(out), num_warps=1
        )
    return out


def _is_nvidia(tensor: Tensor) -> bool:
    """Whether instructions of NVIDIA's are there; the interpreter and other makers' devices do without."""
    return tensor.is_cuda and torch.version.hip is None
