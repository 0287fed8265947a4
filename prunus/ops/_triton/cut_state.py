"""Where the kernels of a cut leave numbers for one another.

A cut finds one threshold for all tensors, or one for each of them: tensors that share a threshold are a
group. Each group has a block of ``state``, int64, which holds the numbers below, and a block of ``counts``,
int32, which holds histograms: of the sample's next digits, of the bracket's buckets, of the sample's leading
digits.
"""

import triton
import triton.language as tl

BINS = tl.constexpr(1 << 13)  # of the sample's leading digit
FINE = tl.constexpr(1 << 12)  # of its next digit, counted for both ends of the bracket
BUCKETS = tl.constexpr(1 << 14)  # of the bracket
COARSE_SHIFT, FINE_SHIFT = tl.constexpr(19), tl.constexpr(7)
BUCKETS_AT = tl.constexpr(2 << 12)
BINS_AT = tl.constexpr((2 << 12) + (1 << 14))

LIST = tl.constexpr(1024)  # elements that are ranked by comparing all with all
MARGIN = tl.constexpr(32)  # keys by which the pass sees the bracket wider: more than its roots can be off
DIGIT, DIGITS = tl.constexpr(6), tl.constexpr(1 << 6)  # of a descent; a block's histogram costs by its bins

DIGIT_OWN, DIGITS_OWN = tl.constexpr(12), tl.constexpr(1 << 12)  # of the descent in the cut's own bucket

# numbers in ``state``
LO, HI, BASE, SHIFT, SURE_FROM, SURE_TO, BUCKET, NEED, NUM_LISTED, NUM_ABOVE, FOUND, NOT_FINITE, CROWDED, SPAN = (
    tl.constexpr(i) for i in range(14)
)
COARSE = tl.constexpr(16)  # for each side of the bracket: leading digit, rank in it, samples before it
NUM_SAMPLED = tl.constexpr(22)
STATE = tl.constexpr(24)


def num_copies(num_groups: int) -> int:
    """Copies of the histogram of leading digits: atomics on one counter wait for each other."""
    return 8 if num_groups == 1 else 1


def num_counts(num_groups: int) -> int:
    """Integers in the ``counts`` of a group."""
    return BINS_AT.value + num_copies(num_groups) * BINS.value


@triton.jit
def group_of(tensor, EACH: tl.constexpr):
    """The group of a tensor: its own where ``EACH`` has one, else the only one."""
    group = 0
    if EACH:
        group = tensor
    return group


@triton.jit
def counts_of(counts, group, COPIES: tl.constexpr):
    """Where the counts of a group begin."""
    return counts + group * (BINS_AT + COPIES * BINS)


@triton.jit
def goal_of(goals, group, num_live, num_drop, room, EACH: tl.constexpr):
    """Live elements of a group, how many of them are dropped, and how many the lists may take up."""
    if EACH:
        goal = goals + group * 3
        num_live, num_drop, room = tl.load(goal), tl.load(goal + 1), tl.load(goal + 2)
    return num_live, num_drop, room


@triton.jit
def slot_of(bin, NUM: tl.constexpr):
    """Where a bin is counted: neighbours stand 32 bytes apart, since atomics on one sector wait for each other."""
    return (bin % (NUM // 8)) * 8 + bin // (NUM // 8)


@triton.jit
def added(counts, slot, NUM: tl.constexpr, COPIES: tl.constexpr):
    """Counts at ``slot`` of a histogram that was made in copies."""
    total = tl.load(counts + slot)
    for copy in tl.static_range(1, COPIES):
        total += tl.load(counts + copy * NUM + slot)
    return total


@triton.jit
def total_of(counts, NUM: tl.constexpr, COPIES: tl.constexpr):
    return tl.sum(added(counts, tl.arange(0, NUM), NUM, COPIES))


@triton.jit
def rank_in(counts, NUM: tl.constexpr, COPIES: tl.constexpr, rank):
    """Bin of the element of 0-based ``rank`` in a histogram by ``slot_of``, and how many stand before it."""
    line, column = tl.arange(0, NUM // 128), tl.arange(0, 128)
    grid = added(counts, slot_of(line[:, None] * 128 + column[None, :], NUM), NUM, COPIES)
    lines = tl.cumsum(tl.sum(grid, axis=1))
    at = tl.minimum(tl.sum((lines <= rank).to(tl.int32)), NUM // 128 - 1)
    before = tl.max(tl.where((lines <= rank) & (line < at), lines, 0))
    up_to = tl.cumsum(added(counts, slot_of(at * 128 + column, NUM), NUM, COPIES)) + before
    before = tl.maximum(before, tl.max(tl.where(up_to <= rank, up_to, 0)))
    return at * 128 + tl.sum((up_to <= rank).to(tl.int32)), before
