"""Scores on the device: one formula a name, each tested against its definition, and bits of blocks of elements.

A formula works on registers: ``w``, ``m`` and ``v`` hold what the score reads, ``a`` and ``b`` are two
constants. A score's row says what it fills them with. ``random`` finds its noise in ``w``.
"""

import os

import triton
import triton.language as tl

from .address_table import COLUMNS, EXTRA, FIRST, LIVE, NUMEL, OUT, M, V, W, load, locate, typed


@triton.jit
def read_by(row, numbers):
    """What scores of one tensor need beside its elements: addresses, extra number, constants, factors of m and v."""
    addresses = tl.load(row + W), tl.load(row + M), tl.load(row + V), tl.load(row + EXTRA)
    constants = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    return addresses, constants


@triton.jit
def find_tile(table, constants, num_tensors, tile, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """Tensor of a tile, its row, the tile's first element, elements from there on, live mask, what scores need."""
    tensor = locate(table, num_tensors, tile, DEPTH)
    row = table + tensor * COLUMNS
    first = (tile - tl.load(row + FIRST)) * TILE
    read = read_by(row, constants + tensor * 4)
    return tensor, row, first, tl.load(row + NUMEL) - first, tl.load(row + LIVE), read


@triton.jit
def scores_of(
    read, first, lane, valid, FULL: tl.constexpr, FAST: tl.constexpr, NAME: tl.constexpr,
    WT: tl.constexpr, MT: tl.constexpr, VT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Scores of the elements ``first + lane`` of one tensor; a type of None is a register that is not read."""
    addresses, constants = read
    w, m, v = 0.0, 0.0, 0.0
    if NAME == "random":
        w = uniform(first + lane, addresses[3])
    elif WT is not None:
        w = load(typed(addresses[0], WT, ALIGN) + first + lane, valid, FULL)
    if MT is not None:
        m = load(typed(addresses[1], MT, ALIGN) + first + lane, valid, FULL) * constants[2]
    if NAME == "wanda":
        v = load(addresses[2].to(tl.pointer_type(VT)) + (first + lane) % addresses[3], valid, FULL)
    elif VT is not None:
        v = load(typed(addresses[2], VT, ALIGN) + first + lane, valid, FULL) * constants[3]
    return evaluate(NAME, FAST, w, m, v, constants[0], constants[1])


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # whose fma is not fused


@triton.jit
def root(FAST: tl.constexpr, x):
    if FAST:  # the hardware's root takes subnormal numbers for zero: x is brought out of their range
        scaled = x * 4294967296.0  # infinite from 2^96 on: the root is NaN then, which no quotient hides
        y = tl.fma(scaled, 0.0, tl.sqrt(scaled) * (1.0 / 65536))
    elif INTERPRETED:
        y = tl.sqrt_rn(x)
    else:
        y = rounded_root(x)
    return y


@triton.jit
def rounded_root(x):
    """``sqrt_rn``, without the branch that it takes for numbers at the ends of the range."""
    is_small = x < 1.0
    y = tl.where(is_small, x * 18446744073709551616.0, x)  # 2^64
    inverse = tl.rsqrt(tl.where(y == 0.0, 1.0, y))
    root_of_y = y * inverse
    root_of_y = tl.fma(tl.fma(-root_of_y, root_of_y, y), 0.5 * inverse, root_of_y)
    return tl.where(is_small, root_of_y * (1.0 / 4294967296), root_of_y)


@triton.jit
def fourth_root(FAST: tl.constexpr, x):
    y = root(FAST, root(FAST, x))
    if FAST:
        y = tl.sqrt(tl.sqrt(x * 4294967296.0)) * (1.0 / 256)
    return y


@triton.jit
def evaluate(NAME: tl.constexpr, FAST: tl.constexpr, w, m, v, a, b):
    """The score; ``FAST`` roots are off by an ulp or two, else they are rounded correctly, as torch's are."""
    if NAME == "magnitude":
        s = tl.abs(w)
    elif NAME == "bitter0":
        s = w * w * tl.abs(m / (root(FAST, v) + a))
    elif NAME == "bitter3":
        s = root(FAST, tl.abs(m) + a) * tl.abs(w)
    elif NAME == "bitter5":
        s = sign(w) * (m / (root(FAST, v) + a)) + 0.1 * tl.abs(w)
    elif NAME == "bitter6":
        s = root(FAST, tl.abs(m)) * tl.abs(w) * tl.abs(m / (root(FAST, v) + a))
    elif NAME == "bitter6_eps":
        s = root(FAST, tl.abs(m) + a) * tl.abs(w) * (tl.abs(m) / root(FAST, v + a))
    elif NAME == "bitter7":
        s = fourth_root(FAST, v + a) * tl.abs(w)
    elif NAME == "bitter8":
        s = root(FAST, tl.abs(m / b) + a) * tl.abs(w)
    elif NAME == "bitter9":
        s = root(FAST, tl.abs(m) + b) * tl.abs(w) + 0.1 * sign(w) * (m / (root(FAST, v) + a))
    elif NAME == "fisher":
        s = v / b * (w * w)
    elif NAME == "fisher_quarter":
        s = fourth_root(FAST, v / b) * tl.abs(w)
    elif NAME == "fisher_half":
        s = root(FAST, v / b) * tl.abs(w)
    elif NAME == "wanda":
        s = tl.abs(w) * v
    elif NAME == "snr":
        s = tl.abs(m / (root(FAST, v) + a))
    elif NAME == "momentum":
        s = tl.abs(m)
    else:
        tl.static_assert(NAME == "itself" or NAME == "random", "unknown formula")
        s = w
    return s + 0.0  # -0.0 becomes 0.0


@triton.jit
def sign(w):
    return tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0))


@triton.jit
def sortable(s):
    """Signed integers in the order of the scores."""
    word = s.to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit
def score_at(key):
    """The score whose sortable integer is ``key``; beyond the infinities, the infinity."""
    key = tl.minimum(tl.maximum(key, -0x7F800001), 0x7F800000).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def moved(s, margin):
    """Scores moved by ``margin`` of the numbers that float32 has."""
    return score_at(sortable(s) + margin)


@triton.jit
def uniform(position, start):
    """Noise in [0, 1) by hashing ``position + start``: the definition is ``prunus.score.random``."""
    h = (position + start) * -7046029254386353131
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    h = h ^ ((h >> 31) & ((1 << 33) - 1))
    noise = (((h >> 11) & ((1 << 53) - 1)).to(tl.float64) * (2.0**-53)).to(tl.float32)
    return tl.minimum(noise, 1 - 2.0**-24)


@triton.jit
def is_strange(s):
    """Where a score is NaN or infinite."""
    return (tl.abs(s) < float("inf")) == 0


@triton.jit
def packed(keep, BLOCK: tl.constexpr):
    """Bytes of a block of booleans, the first in the lowest bit."""
    places = tl.reshape(keep.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    return tl.sum(places, axis=1).to(tl.uint8)


@triton.jit
def ones_in(byte):
    """Number of set bits of each byte."""
    pairs = byte - ((byte >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def set_bits(row, masks, at, wanted):
    """Set the bits of elements ``at`` of the tensors in ``row``, atomically in words of 32 bits."""
    word = (masks + tl.load(row + OUT)).to(tl.pointer_type(tl.int32), bitcast=True) + at // 32
    tl.atomic_or(word, (1 << (at % 32)).to(tl.int32), mask=wanted, sem="relaxed")
