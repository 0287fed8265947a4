"""Products of a matrix in gap form with a few vectors, and the matrix with its zeros.

One warp computes one row, so that a tensor of 32 elements is one for each lane. A lane takes a unit of eight
entries: its codes are spread to bytes, whose sums by ``dp4a`` are columns; where its unit begins, a sum over the
lanes says, of two tiles at once in the two halves of a word. Memory bounds it: what an entry costs is a handful of
instructions and a read of ``x``, which stays in the L1 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gaps import LANES, TILE, UNIT, Gaps

L, U, T = tl.constexpr(LANES), tl.constexpr(UNIT), tl.constexpr(TILE)
ONES = tl.constexpr(0x01010101)


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
    """A unit's eight codes as bytes: the first four, the other four."""
    return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F


@triton.jit
def sum_of(codes, ASM: tl.constexpr):
    first, other = spread(codes)
    return dot4(other, ONES, dot4(first, ONES, codes * 0, ASM), ASM)


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
def values_of(words, KIND: tl.constexpr):
    """The eight values of each lane's unit from the words that hold them."""
    if KIND.is_fp32():
        even, odd = tl.split(tl.reshape(words, (L, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return floats_of(a, KIND) + floats_of(b, KIND) + floats_of(c, KIND) + floats_of(d, KIND)
    else:
        a, b = tl.split(tl.reshape(words, (L, 2)))
        return floats_of(a, KIND) + floats_of(b, KIND)


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
        found = floats_of(tl.load(at.to(tl.pointer_type(tl.int64))), KIND)
        for i in tl.static_range(1, BYTES // 8):
            found += floats_of(tl.load((at + 8 * i).to(tl.pointer_type(tl.int64))), KIND)
        return found


@triton.jit
def added(sums, value, numbers, BATCH: tl.constexpr):
    out = ()
    for b in tl.static_range(BATCH):
        out += (sums[b] + value * numbers[b],)
    return out


@triton.jit
def unit_product(sums, x, codes, values, offset, SCALE: tl.constexpr, BATCH: tl.constexpr, ASM: tl.constexpr):
    """Sums plus eight entries a lane; ``offset`` in ``x`` is where its first entry is if that one's gap is 0."""
    first, other = spread(codes)
    middle = dot4(first, SCALE * ONES, offset, ASM)
    for i in tl.static_range(4):
        at = dot4(first, (SCALE * ONES) >> (24 - 8 * i), offset, ASM)  # the bytes up to i
        sums = added(sums, values[i], taken(x + i * BATCH, at, BATCH), BATCH)
    for i in tl.static_range(4):
        at = dot4(other, (SCALE * ONES) >> (24 - 8 * i), middle, ASM)
        sums = added(sums, values[4 + i], taken(x + (4 + i) * BATCH, at, BATCH), BATCH)
    return sums


@triton.jit
def tail_columns(codes, heads, unit, tile, left, ASM: tl.constexpr):
    """Codes of a tile that may end early, and the column before each lane's unit."""
    lane = tl.arange(0, L)
    word = tl.load(codes.to(tl.pointer_type(tl.int32)) + unit + lane, mask=lane * U < left, other=0)
    start = (tl.load(heads + tile).to(tl.int32) & 0xFFFF) + sum_before(sum_of(word, ASM), ASM) + lane * U - 1
    return word, start


@triton.jit
def code_at(word, i: tl.constexpr):
    return (word >> ((i % 4) * 8 + (i // 4) * 4)) & 15


@triton.jit
def product_kernel(
    x, values, codes, heads, rows, bias, y,
    BATCH: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``y = W x + bias``; x is (in, BATCH), y is (BATCH, out)."""
    KIND: tl.constexpr = values.dtype.element_ty
    SCALE: tl.constexpr = BATCH * x.dtype.element_ty.primitive_bitwidth // 8
    WORDS: tl.constexpr = U * KIND.primitive_bitwidth // 64  # of a unit's values
    lane, wide = tl.arange(0, L), tl.arange(0, L * WORDS)
    row = tl.program_id(0)
    unit, tile, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    code_at_ = codes.to(tl.pointer_type(tl.int32)) + unit + lane
    value_at = values.to(tl.pointer_type(tl.int64)) + unit * WORDS + wide
    head_at = heads.to(tl.pointer_type(tl.int32)) + tile // 2 + lane * 0
    sums = ()
    for _ in tl.static_range(BATCH):
        sums += (tl.zeros((L,), tl.float32),)
    pairs = count // (2 * T)
    for _ in tl.range(0, pairs, loop_unroll_factor=UNROLL):
        c0, c1 = tl.load(code_at_, eviction_policy="evict_first"), tl.load(code_at_ + L, eviction_policy="evict_first")
        v0 = tl.load(value_at, eviction_policy="evict_first")
        v1 = tl.load(value_at + L * WORDS, eviction_policy="evict_first")
        start = tl.load(head_at) + sum_before(sum_of(c0, ASM) | (sum_of(c1, ASM) << 16), ASM)
        at0 = (start & 0xFFFF) * SCALE + lane * (U * SCALE)
        at1 = ((start >> 16) & 0xFFFF) * SCALE + lane * (U * SCALE)
        sums = unit_product(sums, x, c0, values_of(v0, KIND), at0, SCALE, BATCH, ASM)
        sums = unit_product(sums, x, c1, values_of(v1, KIND), at1, SCALE, BATCH, ASM)
        code_at_ += 2 * L
        value_at += 2 * L * WORDS
        head_at += 1
    for k in range(2 * pairs, tl.cdiv(count, T)):
        left = count - k * T
        word, column = tail_columns(codes, heads, unit + k * L, tile + k, left, ASM)
        for i in tl.static_range(U):
            column += code_at(word, i) + 1
            valid = lane * U + i < left
            value = tl.load(values + (unit + k * L + lane) * U + i, mask=valid, other=0.0).to(tl.float32)
            numbers = ()
            for b in tl.static_range(BATCH):
                numbers += (tl.load(x + column * BATCH + b, mask=valid, other=0.0).to(tl.float32),)
            sums = added(sums, value, numbers, BATCH)
    for b in tl.static_range(BATCH):
        total = tl.sum(sums[b])
        if BIASED:
            total += tl.load(bias + row).to(tl.float32)
        tl.store(y + b * tl.num_programs(0) + row, total.to(y.dtype.element_ty))


@triton.jit
def dense_kernel(values, codes, heads, rows, out, width, ASM: tl.constexpr):
    """Write the entries of one row where they belong, among zeros that are there already."""
    lane, row = tl.arange(0, L), tl.program_id(0)
    unit, tile, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    out += row.to(tl.int64) * width
    for k in range(tl.cdiv(count, T)):
        left = count - k * T
        word, column = tail_columns(codes, heads, unit + k * L, tile + k, left, ASM)
        for i in tl.static_range(U):
            column += code_at(word, i) + 1
            valid = lane * U + i < left
            value = tl.load(values + (unit + k * L + lane) * U + i, mask=valid)
            tl.store(out + column, value, mask=valid)


def product(x: Tensor, gaps: Gaps, bias: Tensor | None, unroll: int = 1) -> Tensor:
    """``x W^T + bias`` for a contiguous x of 1, 2, 4 or 8 rows."""
    batch, num_rows = len(x), gaps.shape[0]
    y = torch.empty(batch, num_rows, dtype=x.dtype, device=x.device)
    if num_rows:
        columns = x if batch == 1 else x.t().contiguous()
        product_kernel[(num_rows,)](
            columns, gaps.values, gaps.codes, gaps.heads, gaps.rows, x if bias is None else bias, y,
            BATCH=batch, BIASED=bias is not None, ASM=_is_nvidia(x), UNROLL=unroll, num_warps=1,
        )  # fmt: skip
    return y


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
