"""Losses of rows of logits, and their gradient, are those of torch's own functions in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from prunus.ops import divergence as module
from prunus.ops.divergence import RowLosses, divergence, divergence_

pytestmark = pytest.mark.rounding

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DRAW = torch.Generator().manual_seed(0)
INF = torch.inf


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def banned(logits: Tensor, columns: slice) -> Tensor:
    logits[:, columns] = -INF
    return logits


CASES = {  # logits and those that are expected
    "normal": lambda: (2 * normal(7, 11), 2 * normal(7, 11)),
    "equal": lambda: (normal(3, 5).fill_(1.5), normal(3, 5).fill_(1.5)),
    "ties": lambda: (normal(6, 9).round(), normal(6, 9).round()),
    "one row": lambda: (normal(1, 6), normal(1, 6)),
    "one class": lambda: (normal(4, 1), normal(4, 1)),
    "no rows": lambda: (normal(0, 6), normal(0, 6)),
    "far": lambda: (1e4 * normal(5, 8), 1e4 * normal(5, 8)),
    "wide": lambda: (normal(3, 700) * 10, normal(3, 700) * 10),
    "banned by the teacher": lambda: (normal(4, 10), banned(normal(4, 10), slice(2, 9))),
    "banned by both": lambda: (banned(normal(4, 10), slice(2, 5)), banned(normal(4, 10), slice(2, 7))),
    "banned but for one": lambda: (banned(normal(4, 10), slice(1, 10)), banned(normal(4, 10), slice(1, 10))),
    "low": lambda: (normal(4, 10) - 3e4, normal(4, 10) - 3e4),
}


def labels_of(logits: Tensor) -> Tensor:
    """Some rows have none, no label is banned."""
    labels = logits.double().argmax(1)
    labels[::3] = -100
    return labels


def expected_of(
    logits: Tensor, expected: Tensor, labels: Tensor | None, soft: float | Tensor = 1.0, hard: float | Tensor = 0.0
) -> tuple[RowLosses, Tensor]:
    """By torch's own functions in float64, with torch's own gradient."""
    logits, expected = logits.double().clone().requires_grad_(), expected.double()
    terms = F.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True)
    terms = terms.masked_fill(expected.softmax(-1) == 0, 0)
    labels = torch.full_like(logits[:, 0], -100).long() if labels is None else labels
    entropies = (F.cross_entropy(each, labels, reduction="none") for each in (logits, expected))
    losses = RowLosses(terms.sum(-1), *entropies)
    (soft * losses.divergence + hard * losses.cross_entropy).sum().backward()
    return RowLosses(*(each.detach() for each in losses)), logits.grad.nan_to_num(0)  # of -inf in both


def assert_close(computed: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    unit = max(torch.finfo(dtype).eps, 1e-14)
    scale = right.abs().amax().item() if right.numel() and right.isfinite().all() else 1
    torch.testing.assert_close(computed.double(), right, rtol=8 * unit, atol=8 * unit * max(1, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_are_those_of_torch_in_float64(case, dtype):
    logits, expected = (each.to(dtype) for each in CASES[case]())
    labels, wide = labels_of(logits), torch.promote_types(dtype, torch.float32)
    right, gradient = expected_of(logits, expected, labels, 0.7, 0.3)
    computed = divergence(logits, expected, labels), divergence_(logits, expected, labels, soft=0.7, hard=0.3)
    for losses in computed:
        for each, value in zip(losses, right, strict=True):
            assert each.dtype == wide
            assert_close(each, value, wide)
    assert logits.dtype == dtype
    assert_close(logits, gradient, dtype)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(("soft", "hard"), [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
def test_numbers_may_differ_from_row_to_row(soft, hard, labelled):
    logits, expected = CASES["normal"]()
    labels, rows = labels_of(logits) if labelled else None, torch.arange(1.0, 8)
    weights = {"soft": soft * rows, "hard": hard * rows.flip(0)}
    right, gradient = expected_of(logits, expected, labels, **weights)
    losses = divergence_(logits, expected, labels, **weights)
    torch.testing.assert_close(logits, gradient)
    counts = torch.full((7,), soft > 0) | (labels != -100 if labelled and hard else torch.tensor(False))
    torch.testing.assert_close(losses.divergence, right.divergence * counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_does_not_count_is_zero_whatever_it_holds(dtype):
    logits, expected = (each.to(dtype) for each in CASES["normal"]())
    rest = logits[2:].clone(), expected[2:]
    logits[0], expected[1] = torch.nan, INF
    losses = divergence_(logits, expected, soft=torch.tensor([0.0, 0, 1, 1, 1, 1, 1]))
    alone = divergence_(*rest)
    assert not logits[:2].any() and not torch.stack(losses)[:, :2].any()
    assert torch.equal(logits[2:], rest[0]) and torch.equal(losses.divergence[2:], alone.divergence)


def test_a_row_without_a_label_does_not_count_for_cross_entropy_alone():
    logits, expected = CASES["normal"]()
    labels, logits[0] = labels_of(logits), torch.nan
    losses = divergence_(logits, expected, labels, soft=0.0, hard=1.0)
    assert not logits[::3].any() and torch.stack(losses).isfinite().all() and logits.isfinite().all()


def test_nan_in_a_row_that_counts_is_not_hidden():
    for column in range(2):
        pair = [normal(3, 4), normal(3, 4)]
        pair[column][1, 2] = torch.nan
        losses = divergence_(*pair)
        assert losses.divergence.isnan().tolist() == [False, True, False] and pair[0][1].isnan().all()
        assert pair[0][[0, 2]].isfinite().all()


def test_a_class_that_is_expected_and_impossible_has_an_infinite_divergence_and_a_finite_gradient():
    logits, expected = torch.tensor([[0.0, -INF]]), torch.tensor([[0.0, 0.0]])
    assert divergence_(logits, expected).divergence == INF
    assert logits.tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("elements", [1, 11, 25, 1000])
def test_parts_of_rows_change_nothing(elements, monkeypatch):
    logits, expected = CASES["normal"]()
    whole = logits.clone()
    labels = labels_of(logits)
    losses = divergence_(whole, expected, labels, hard=0.5)
    monkeypatch.setattr(module, "ELEMENTS", elements)
    in_parts = divergence_(logits, expected, labels, hard=0.5)
    torch.testing.assert_close(logits, whole)
    torch.testing.assert_close(torch.stack(in_parts), torch.stack(losses))


def test_slices_of_wider_rows_are_overwritten_and_nothing_beside_them():
    wide, expected = normal(5, 16), normal(16, 5).T[:, 3:14]
    before = wide.clone()
    right, gradient = expected_of(wide[:, 2:13], expected, None)
    torch.testing.assert_close(divergence_(wide[:, 2:13], expected).divergence, right.divergence)
    torch.testing.assert_close(wide[:, 2:13], gradient)
    assert torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, 13:], before[:, 13:])


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises((IndexError, RuntimeError)):
        divergence(normal(2, 3), normal(2, 3), torch.tensor([0, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary_loses_no_precision(dtype):
    logits, expected = ((3 * normal(2, 151_936)).to(dtype) for _ in range(2))
    right, gradient = expected_of(logits, expected, torch.tensor([5, 151_935]), 1.0, 1.0)
    losses = divergence_(logits, expected, torch.tensor([5, 151_935]), soft=1.0, hard=1.0)
    torch.testing.assert_close(torch.stack(losses).double(), torch.stack(right), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=max(2e-5, torch.finfo(dtype).eps), atol=1e-9)
