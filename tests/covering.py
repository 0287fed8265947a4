"""Few cases of many: every value, or every pair of them, is in the quick tests, every combination in the slow ones."""

from collections.abc import Iterable
from itertools import combinations, product

import pytest


def covering(*axes: Iterable, one_of: int = 1) -> list:
    """The product of ``axes``, of which what is not needed to bring any two values together is marked slow.

    Of those that are slow one of so many is taken.
    """
    values = [list(axis) for axis in axes]
    quick = set(_pairwise([len(axis) for axis in values]))
    found = []
    for row in product(*map(range, map(len, values))):
        case = [axis[i] for axis, i in zip(values, row, strict=True)]
        if row in quick:
            found.append(pytest.param(*case))
        elif sum(row) % one_of == 0:
            found.append(pytest.param(*case, marks=pytest.mark.slow))
    return found


def quickly(names: Iterable, *quick: object) -> list:
    """``names``, of which all but those in ``quick`` are marked slow: they are like others."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def each_once(*axes: Iterable, times: int = 1, one_of: int = 1) -> list:
    """The product of ``axes``: a few cases in which every value comes once, or more ``times``, are quick.

    All others are slow, or one of so many.
    """
    values = [list(axis) for axis in axes]
    quick = {tuple(n % len(axis) for axis in values) for n in range(times * max(map(len, values)))}
    return [
        pytest.param(*case, marks=() if row in quick else pytest.mark.slow)
        for row, case in zip(product(*(range(len(axis)) for axis in values)), product(*values), strict=True)
        if row in quick or sum(row) % one_of == 0
    ]


def _pairwise(sizes: list[int]) -> list[tuple[int, ...]]:
    """Rows of indices in which any index of one axis meets any of another: a Latin square, and what it leaves out."""
    first, second, *rest = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    rows = []
    for i, j in product(range(sizes[first]), range(sizes[second])):
        row = {first: i, second: j} | {axis: (i + n * j) % sizes[axis] for n, axis in enumerate(rest, 1)}
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    for a, b in combinations(range(len(sizes)), 2):
        met = {(row[a], row[b]) for row in rows}
        for i, j in product(range(sizes[a]), range(sizes[b])):
            if (i, j) not in met:
                rows.append(
                    tuple(i if axis == a else j if axis == b else (i + j) % sizes[axis] for axis in range(len(sizes)))
                )
    return rows
