"""Where the kernels of a cut leave numbers for one another.

``counts``, int32: histograms of the sample's leading digits, two of its next digits, one of the
bracket's buckets, and a counter for each program of the pass. ``state``, int64: the numbers below.
"""

import triton.language as tl

BINS = tl.constexpr(1 << 13)  # of the sample's leading digit
COPIES = tl.constexpr(8)  # of that histogram: atomics on one counter wait for each other
FINE = tl.constexpr(1 << 12)  # of its next digit
COARSE_SHIFT, FINE_SHIFT = tl.constexpr(19), tl.constexpr(7)
BUCKETS = tl.constexpr(1 << 14)  # of the bracket
FINE_AT = tl.constexpr(8 << 13)
BUCKETS_AT = tl.constexpr((8 << 13) + (2 << 12))
COUNTERS_AT = tl.constexpr((8 << 13) + (2 << 12) + (1 << 14))

LIST = tl.constexpr(1024)  # elements that are ranked by comparing all with all
MARGIN = tl.constexpr(32)  # keys by which the pass sees the bracket wider: more than its roots can be off
DIGIT, DIGITS = tl.constexpr(6), tl.constexpr(1 << 6)  # of a descent; a block's histogram costs by its bins

# numbers in ``state``
LO, HI, BASE, SHIFT, SURE_FROM, SURE_TO, BUCKET, NEED, NUM_LISTED, NUM_ABOVE, FOUND, NOT_FINITE, CROWDED, SPAN = (
    tl.constexpr(i) for i in range(14)
)
COARSE = tl.constexpr(16)  # for each side of the bracket: leading digit, rank in it, samples before it
NUM_SAMPLED = tl.constexpr(22)
STATE = 24
