"""Sortable integers stand in the order of their scores, and their digits are counted right."""

import pytest
import torch

from prunus.ops.lazy import from_sortable, sortable
from prunus.threshold import DIGIT, digit_counts

LIMITS = {
    torch.float32: [-float("inf"), -3e38, -1.0, -1e-45, 0.0, 1e-45, 1e-30, 1.0, 3e38, float("inf")],
    torch.float64: [-float("inf"), -1e308, -1.0, -5e-324, 0.0, 5e-324, 1.0, 1 + 2**-52, 1e308, float("inf")],
    torch.int64: [-(2**63), -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1],
}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_keys_rise_strictly_with_the_scores(dtype):
    keys = sortable(torch.tensor(LIMITS[dtype], dtype=dtype)).tolist()
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_key_leads_back_to_its_score(dtype):
    for score in LIMITS[dtype]:
        key = sortable(torch.tensor([score], dtype=dtype)).item()
        assert from_sortable(key, dtype) == torch.tensor(score, dtype=dtype).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_negative_zero_has_the_key_of_zero(dtype):
    assert sortable(torch.tensor([-0.0, 0.0], dtype=dtype)).tolist() == [0, 0]


def test_keys_leave_the_scores_alone():
    scores = torch.tensor([-0.0, -2.0, 3.0])
    sortable(scores)
    assert scores.tolist() == [-0.0, -2.0, 3.0] and torch.signbit(scores[0])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_digits_are_counted_under_every_prefix(dtype):
    scores = torch.cat([torch.tensor(LIMITS[dtype], dtype=dtype), torch.randint(-3, 4, (200,)).to(dtype)])
    keys = sortable(scores)
    top = 8 * dtype.itemsize - DIGIT
    for shift in range(top, -1, -DIGIT):
        for key in keys.unique().tolist():
            prefix = None if shift == top else key >> (shift + DIGIT)
            counts = digit_counts(keys, prefix, shift)
            alike = [k for k in keys.tolist() if prefix is None or k >> (shift + DIGIT) == prefix]
            digit = (key >> shift) + (1 << DIGIT - 1) if prefix is None else key >> shift & (1 << DIGIT) - 1
            assert int(counts.sum()) == len(alike)
            assert int(counts[digit]) == sum(k >> shift == key >> shift for k in alike)
