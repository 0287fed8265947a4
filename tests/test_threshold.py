"""The cut is exact by every route: all candidates, a sampled bracket, or a radix descent."""

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from reference import DRAWS, draw, flat, keep_largest, same, some_dead

from prunus import threshold as module
from prunus.ops import bits, candidates
from prunus.ops.lazy import Lazy, alike, stored

SHAPES = [(1,), (13, 7), (3, 5, 2), (16, 12), (4, 3, 3, 3), (150,)]
FEW_TIES = ["normal", "positive", "negative", "float64", "int64", "wide range"]


def masks_of(scores, num_drop, within=None):
    sources = alike([stored(name, score) for name, score in scores.items()])
    live = {name: bits.pack(mask) for name, mask in (within or {}).items()}
    packed = module.cut(sources, num_drop, live)
    return {name: bits.unpack(packed[name], score.shape) for name, score in scores.items()}


COUNTS = {  # of so many, so many go
    "none": lambda total: 0,
    "one": lambda total: 1,
    "a third": lambda total: total // 3,
    "half": lambda total: total // 2,
    "most": lambda total: total * 9 // 10,
    "all but one": lambda total: total - 1,
    "all": lambda total: total,
}


def bracket_above(sources, *_):
    """A bracket that every score lies below."""
    top = max(source.weight.double().nan_to_num(0, 0, 0).max().item() for source in sources)
    return top * 2 + 1, top * 2 + 2, 10**9


def bracket_below(sources, *_):
    """A bracket that every score lies above."""
    least = min(source.weight.double().nan_to_num(0, 0, 0).min().item() for source in sources)
    return least * 2 - 2, least * 2 - 1, 10**9


def bracket_too_small(sources, *_):
    """A bracket that holds everything, with room for nothing."""
    is_float = sources[0].compared.is_floating_point
    return (*((-float("inf"), float("inf")) if is_float else (-(2**63), 2**63 - 1)), 0)


ROUTES = {
    "all candidates": lambda patch: None,
    "sampled": lambda patch: patch.setattr(candidates, "SAMPLE", 256),
    "tiny sample": lambda patch: patch.setattr(candidates, "SAMPLE", 3),
    "bracket above": lambda patch: patch.setattr(module, "bracket", bracket_above),
    "bracket below": lambda patch: patch.setattr(module, "bracket", bracket_below),
    "bracket overflows": lambda patch: patch.setattr(module, "bracket", bracket_too_small),
}


@pytest.fixture
def descents(monkeypatch):
    """Grows by one with every radix descent."""
    calls, original = [], module.order_statistic
    monkeypatch.setattr(module, "order_statistic", lambda *args: (calls.append(1), original(*args))[1])
    return calls


@pytest.fixture
def route(request, monkeypatch, small_chunks):
    ROUTES[request.param](monkeypatch)
    return request.param


@pytest.mark.parametrize(("route", "kind", "count"), covering(ROUTES, DRAWS, COUNTS, one_of=2), indirect=["route"])
def test_every_route_equals_a_stable_sort_which_counts_the_dead_and_ranks_the_living(route, kind, count):
    scores = draw(kind, *SHAPES)
    num_drop = COUNTS[count](len(flat(scores)))
    for within in ({}, some_dead(scores)):
        assert same(masks_of(scores, num_drop, within), keep_largest(scores, num_drop, within))


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize(
    ("route", "bad", "where"), covering(ROUTES, BAD, range(len(SHAPES))), indirect=["route"], ids=str
)
def test_every_route_names_the_tensor_with_a_score_that_is_not_finite(route, bad, where):
    scores = {f"layer{i}": torch.rand(shape) + 0.5 for i, shape in enumerate(SHAPES)}
    scores[f"layer{where}"].view(-1)[-1] = bad
    sources, total = [stored(name, score) for name, score in scores.items()], len(flat(scores))
    for num_drop in (1, total // 2, total - 1):
        with pytest.raises(ValueError, match=rf"layer{where}\b"):
            module.cut(sources, num_drop, {})


@pytest.mark.parametrize(("route", "bad"), covering(ROUTES, BAD), indirect=["route"], ids=str)
def test_every_route_lets_the_dead_be_what_they_are(route, bad):
    scores = draw("positive", *SHAPES)
    within = some_dead(scores)
    expected = keep_largest(scores, 270, within)
    for name, mask in within.items():
        scores[name] = torch.where(mask, scores[name], bad)
    assert same(masks_of(scores, 270, within), expected)


@pytest.mark.parametrize("kind", FEW_TIES)
def test_a_bracket_from_a_sample_holds_where_scores_differ(kind, monkeypatch, small_chunks, descents):
    monkeypatch.setattr(candidates, "SAMPLE", 256)
    scores = draw(kind, (120, 50), (33, 7), (900,))
    for share in (0.05, 0.3, 0.5, 0.9):
        num_drop = round(share * len(flat(scores)))
        assert same(masks_of(scores, num_drop), keep_largest(scores, num_drop))
    assert not descents


@pytest.mark.parametrize("value", [-9.0, 0.0, 9.0, float("nan")], ids=str)
def test_a_bracket_from_a_sample_holds_where_most_are_dead(value, monkeypatch, descents):
    monkeypatch.setattr(candidates, "SAMPLE", 256)
    scores = draw("normal", (120, 50), (900,))
    within = {name: torch.rand(score.shape) > 0.7 for name, score in scores.items()}
    expected = {share: keep_largest(scores, round(share * 6900), within) for share in (0.75, 0.85, 0.95)}
    for name, mask in within.items():
        scores[name][~mask] = value
    assert all(same(masks_of(scores, round(share * 6900), within), masks) for share, masks in expected.items())
    assert not descents


def test_ties_in_bulk_overfill_the_bracket_and_are_cut_by_counting(monkeypatch, descents):
    monkeypatch.setattr(candidates, "SAMPLE", 1024)
    scores = {"a": torch.randn(300, 200).relu(), "b": torch.randn(140_000).relu()}
    assert same(masks_of(scores, 60_000), keep_largest(scores, 60_000))
    assert descents


def test_the_sample_is_a_sample_and_brackets_the_cut(monkeypatch):
    monkeypatch.setattr(candidates, "SAMPLE", 512)
    sources = [stored("a", torch.randn(100, 50)), stored("b", torch.randn(15_000))]
    lo, hi, limit = module.bracket(sources, 10_000, 20_000, {})
    ordered = flat({source.name: source.weight for source in sources})
    ordered.sort()
    num_inside = int(((ordered >= lo) & (ordered <= hi)).sum())
    assert lo <= ordered[9_999] <= hi and num_inside < min(limit, 10_000)


@pytest.mark.parametrize("sparsity", [0.02, 0.5, 0.97])
def test_more_scores_than_one_sample_are_cut_in_one_read(sparsity, descents):
    scores = {"a": torch.randn(1100, 500), "b": torch.randn(9), "c": torch.randn(300, 130, 3)}
    num_drop = round(sparsity * len(flat(scores)))
    assert len(flat(scores)) > candidates.SAMPLE
    assert same(masks_of(scores, num_drop), keep_largest(scores, num_drop))
    assert not descents


@pytest.mark.parametrize("kind", ["bfloat16", "half zero", "all zero", "few integers"])
def test_more_scores_than_one_sample_with_ties_are_cut_exactly(kind):
    scores = draw(kind, (1100, 700), (9,), (300, 70, 3))
    within = some_dead(scores)
    num_drop = round(0.45 * len(flat(scores)))
    assert same(masks_of(scores, num_drop), keep_largest(scores, num_drop))
    assert same(masks_of(scores, num_drop, within), keep_largest(scores, num_drop, within))


@pytest.mark.parametrize("kind", DRAWS)
def test_the_descent_finds_the_order_statistic_and_its_rank_among_equals(kind, small_chunks):
    scores = draw(kind, (37, 11), (5,))
    sources = alike([stored(name, score) for name, score in scores.items()])
    ordered = sorted(flat(scores).tolist())
    for num_drop in (1, 2, len(ordered) // 2, len(ordered)):
        threshold, num_equal = module.order_statistic(sources, num_drop, {})
        assert threshold == ordered[num_drop - 1]
        assert num_equal == num_drop - ordered.index(threshold)


def test_the_descent_reaches_the_ends_of_the_integers():
    scores = torch.tensor([2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 0])
    for num_drop in range(6):
        assert same(masks_of({"a": scores}, num_drop), keep_largest({"a": scores}, num_drop))
    assert module.order_statistic([stored("a", scores)], 2, {}) == (-(2**63), 2)
    assert module.order_statistic([stored("a", scores)], 5, {}) == (2**63 - 1, 2)


@given(data=st.data())
def test_any_scores_any_mask_any_count_any_route(data):
    value = st.sampled_from([-2.0, -0.0, 0.0, 1e-45, 1.0, 1.0 + 2**-23, 3e38]) | st.floats(
        allow_nan=False, allow_infinity=False, width=32
    )
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    scores = {str(i): torch.tensor(data.draw(st.lists(value, min_size=n, max_size=n))) for i, n in enumerate(sizes)}
    within = {
        name: torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(score), max_size=len(score))))
        for name, score in scores.items()
    }
    num_drop = data.draw(st.integers(0, sum(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "SAMPLE", data.draw(st.sampled_from([1, 2, 8, 1 << 18])))
        patch.setattr(Lazy.chunks, "__defaults__", (data.draw(st.sampled_from([8, 16, 64])),))
        assert same(masks_of(scores, num_drop, within), keep_largest(scores, num_drop, within))


def test_a_live_score_that_is_not_finite_is_refused_though_the_sum_of_all_overflows():
    scores = torch.full((100,), 3e38)
    module.cut([stored("a", scores)], 50, {})
    scores[7] = float("nan")
    with pytest.raises(ValueError, match="b has 1 that are not, the first nan"):
        module.cut([stored("b", scores)], 50, {})
