"""The gap form holds a matrix bit for bit, near its promised size, and refuses what does not fit together."""

from dataclasses import replace

import pytest
import torch

from prunus.ops import bits
from prunus.sparse import gaps
from prunus.sparse.gaps import BLOCK, LONGEST, UNIT, Gaps, gaps_of, gaps_of_dense, slots_of

WORDS = {2: torch.int16, 4: torch.int32}
SHAPES = [(1, 1), (3, 7), (16, 301), (9, 5000), (20, 2 * BLOCK), (2, 65536), (0, 5), (5, 0)]
MASKS = {
    "none kept": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "all kept": lambda shape: torch.ones(shape, dtype=torch.bool),
    "half": lambda shape: torch.rand(shape) < 0.5,
    "one in five": lambda shape: torch.rand(shape) < 0.2,
    "one in a hundred": lambda shape: torch.rand(shape) < 0.01,
    "last column": lambda shape: torch.arange(shape[1]).expand(shape) == shape[1] - 1,
    "long gaps": lambda shape: torch.arange(shape[1]).expand(shape) % LONGEST == 0,
    "just too long": lambda shape: torch.arange(shape[1]).expand(shape) % (LONGEST + 1) == 0,
    "rows unlike": lambda shape: torch.rand(shape) < torch.rand(shape[0], 1) ** 4,
}


def same(first, second):
    """Equal in every bit."""
    kind = WORDS[first.element_size()]
    return first.shape == second.shape and torch.equal(first.view(kind), second.view(kind))


def matrix(shape, mask, dtype):
    keep = MASKS[mask](shape)
    return keep, torch.where(keep, torch.randn(shape).to(dtype), torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_comes_back_bit_for_bit(shape, mask, dtype):
    keep, weight = matrix(shape, mask, dtype)
    form = gaps_of(bits.pack(keep), weight[keep], shape)

    assert same(form.dense(), weight)
    form.check()
    assert form.nbytes == sum(t.nbytes for t in (form.values, form.codes, form.heads, form.rows))


@pytest.mark.parametrize("mask", MASKS)
def test_chunks_make_no_difference(mask, monkeypatch):
    keep, weight = matrix((37, 133), mask, torch.float32)
    whole = gaps_of(bits.pack(keep), weight[keep], weight.shape)
    monkeypatch.setattr(gaps, "CHUNK", 1)
    parts = gaps_of(bits.pack(keep), weight[keep], weight.shape)

    assert all(torch.equal(getattr(whole, name), getattr(parts, name)) for name in ("values", "codes", "heads", "rows"))
    assert same(parts.dense(), weight)


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
def test_kept_values_of_any_kind_stay(value):
    weight = torch.zeros(3, 200)
    keep = torch.rand(3, 200) < 0.3
    weight[keep] = value

    assert same(gaps_of(bits.pack(keep), weight[keep], weight.shape).dense(), weight)


def test_a_row_is_a_list_of_entries_in_order_of_their_columns():
    _, weight = matrix((6, 9000), "one in five", torch.float32)
    slots = slots_of(gaps_of_dense(weight), 0, 6)
    row = slots.row[:, None, None, None].expand_as(slots.column)[slots.is_entry]
    column, value = slots.column[slots.is_entry], slots.value[slots.is_entry]

    steps = (column[1:] - column[:-1])[row[1:] == row[:-1]]
    assert steps.min() == 1 and steps.max() == LONGEST
    assert torch.equal(value, weight[row, column])
    assert (slots.column < 9000).all()  # where there is no entry too: products read there


@pytest.mark.parametrize(("sparsity", "most"), [(0.5, 0.632), (0.6, 0.505), (0.7, 0.385), (0.8, 0.265), (0.9, 0.166)])
def test_it_takes_the_promised_part_of_the_dense_bytes(sparsity, most):
    weight = torch.randn(64, 8192, dtype=torch.bfloat16) * (torch.rand(64, 8192) >= sparsity)
    assert gaps_of_dense(weight).nbytes <= most * weight.nbytes


def test_a_transposed_weight_is_taken_as_it_looks():
    weight = torch.randn(40, 30) * (torch.rand(40, 30) < 0.5)
    assert same(gaps_of_dense(weight.t()).dense(), weight.t().contiguous() + 0.0)


def test_what_does_not_fit_is_refused():
    keep = torch.rand(4, 10) < 0.5
    packed, values = bits.pack(keep), torch.ones(int(keep.sum()))
    cases = [(values[1:], (4, 10), "but there are"), (torch.ones(len(values) + 1), (4, 10), "but there are")]
    cases += [(values, (40, 10), "bytes of mask bits"), (values, (1, 65537), "at most 65536 columns")]
    for some, shape, match in cases:
        with pytest.raises(ValueError, match=match):
            gaps_of(packed, some, shape)


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


BROKEN = {
    "a column too far": lambda form: replace(form, heads=changed(form.heads, -2, 299)),  # of the last row's first run
    "wrong table": lambda form: replace(form, rows=changed(form.rows, (1, 0), 1 + int(form.rows[1, 0]))),
    "negative count": lambda form: replace(form, rows=changed(form.rows, (0, 2), -1)),
    "more rows": lambda form: replace(form, shape=(5, 300)),
    "narrower": lambda form: replace(form, shape=(4, 30)),
    "table of floats": lambda form: replace(form, rows=form.rows.float()),
}
BROKEN |= {
    f"short {name}": lambda form, name=name: replace(form, **{name: getattr(form, name)[:-UNIT]}) for name in Gaps.PARTS
}


@pytest.mark.parametrize("what", BROKEN)
def test_forms_that_would_read_astray_are_refused(what):
    _, weight = matrix((4, 300), "half", torch.float32)
    with pytest.raises(ValueError, match="save it again"):
        BROKEN[what](gaps_of_dense(weight)).check()
