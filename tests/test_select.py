"""Every selector drops exactly what it promises, and keeps nothing smaller than what it drops."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from reference import DRAWS, draw, is_subset, keep_largest, keep_largest_of_runs, num_dropped, same, some_dead

from prunus import Global, NofM, PerLayer, PerRow, select, threshold
from prunus.allocate import allocate
from prunus.lab.run import Run
from prunus.ops import bits
from prunus.ops.lazy import Lazy, stored
from prunus.score import bitter7
from prunus.select import Quota, Selector, Shape

SHAPES = {
    "one element": [(1,)],
    "ragged": [(7,), (1, 1), (13, 5), (3, 5, 2)],
    "convolutions": [(4, 3, 3, 3), (8, 4, 1), (33, 17)],
}
SPARSITIES = [0.0, 0.1, 0.5, 0.625, 0.9, 0.99]
SELECTORS = {
    "global": Global(),
    "uniform": PerLayer(),
    "depth": PerLayer("depth"),
    "erk": PerLayer("erk"),
    "mapping": PerLayer({"*": 0.4}),
    "row": PerRow(),
}


ALLOCATIONS = ["depth", "erk", {"layer0": 0.3, "layer*": 0.6}]
at_each_sparsity = pytest.mark.parametrize(
    ("shapes", "kind", "sparsity"), covering(SHAPES, DRAWS, SPARSITIES, one_of=3)
)


def drawn(shapes, kind):
    return draw(kind, *SHAPES[shapes])


def num_weights(scores):
    return sum(score.numel() for score in scores.values())


def row_length(score):
    return score[0].numel() if score.ndim > 1 else score.numel()


@pytest.mark.parametrize(
    ("shapes", "kind", "sparsity", "how"), covering(SHAPES, DRAWS, SPARSITIES[:-1], ALLOCATIONS, one_of=4), ids=str
)
def test_layers_drop_what_is_allocated_to_them_and_the_total_in_all(shapes, kind, sparsity, how):
    scores = drawn(shapes, kind)
    masks = PerLayer(how)(scores, sparsity)
    expected = allocate({name: score.shape for name, score in scores.items()}, sparsity, how)
    assert num_dropped(masks) == round(sparsity * num_weights(scores))
    for name, score in scores.items():
        assert torch.equal(masks[name], keep_largest({"": score}, expected[name])[""])


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (4, 4), (1, 12), (1, 1)])
def test_n_of_m_keeps_the_n_largest_of_every_m(kind, n, m, small_chunks):
    scores = draw(kind, (5, 24), (3, 12, 3, 3), (48,), (2, 4, 6))
    masks = NofM(n, m)(scores)
    for name, score in scores.items():
        assert masks[name].view(-1, m).sum(1).eq(n).all()
        assert torch.equal(masks[name], keep_largest_of_runs(score, m, m - n))
        live = torch.rand(score.shape) < 0.6
        assert torch.equal(
            NofM(n, m)({name: score}, within={name: live})[name], keep_largest_of_runs(score, m, m - n, live)
        )


@pytest.mark.parametrize(("shapes", "kind", "name"), covering(SHAPES, DRAWS, SELECTORS))
def test_events_that_build_on_one_another_keep_subsets_and_exact_counts(shapes, kind, name):
    scores, within = drawn(shapes, kind), None
    for sparsity in SPARSITIES[:-1]:
        masks = SELECTORS[name](scores, sparsity, within)
        assert within is None or is_subset(masks, within)
        if name in ("uniform", "row"):
            assert same(masks, SELECTORS[name](scores, sparsity))
        else:
            assert num_dropped(masks) == round(sparsity * num_weights(scores))
        within = masks


@at_each_sparsity
def test_all_layers_and_rows_drop_their_rounded_share_the_dead_first_and_then_the_smallest(
    shapes, kind, sparsity, small_chunks
):
    scores = drawn(shapes, kind)
    total = round(sparsity * num_weights(scores))
    assert num_dropped(Global()(scores, sparsity)) == total
    for within in ({}, some_dead(scores)):
        assert same(Global()(scores, sparsity, within), keep_largest(scores, total, within))
        by_layer, by_row = PerLayer()(scores, sparsity, within), PerRow()(scores, sparsity, within)
        for name, score in scores.items():
            share, length, live = round(sparsity * score.numel()), row_length(score), within.get(name)
            own = {} if live is None else {"": live}
            assert torch.equal(by_layer[name], keep_largest({"": score}, share, own)[""])
            assert torch.equal(by_row[name], keep_largest_of_runs(score, length, round(sparsity * length), live))


@pytest.mark.parametrize("how", ["depth", "erk", {"*": 0.4}], ids=str)
def test_layers_lose_the_total_in_all_whatever_each_has_lost_before(how):
    scores = draw("normal", (20, 30), (40, 25), (7, 5))
    within = {"layer0": torch.rand(20, 30) < 0.1, "layer2": torch.zeros(7, 5, dtype=torch.bool)}
    masks = PerLayer(how)(scores, 0.5, within)
    assert num_dropped(masks) == round(0.5 * num_weights(scores))
    assert is_subset({name: masks[name] for name in within}, within)


def test_a_mask_within_may_leave_tensors_out():
    scores = draw("normal", (6, 4), (5, 5))
    within = {"layer1": torch.rand(5, 5) < 0.5}
    assert same(Global()(scores, 0.6, within), keep_largest(scores, round(0.6 * 49), within))


def test_a_row_of_the_smallest_integers_does_not_take_a_dead_ones_place():
    scores = {"a": torch.tensor([[-(2**63), 5, 6, 7]])}
    within = {"a": torch.tensor([[True, False, True, True]])}
    assert torch.equal(PerRow()(scores, 0.25, within)["a"], within["a"])


@pytest.mark.parametrize("counted", [False, True], ids=["sorted", "counted"])
def test_tensors_of_different_dtypes_share_one_threshold(counted, monkeypatch):
    if counted:
        monkeypatch.setattr(threshold, "bracket", lambda *_: (-math.inf, math.inf, 0))
    scores = {
        "a": torch.randn(9, 5).bfloat16(),
        "b": torch.randn(30, dtype=torch.float64),
        "c": torch.randint(-2, 3, (25,)),
        "d": torch.randn(11),
    }
    for sparsity in SPARSITIES:
        total = round(sparsity * num_weights(scores))
        assert same(Global()(scores, sparsity), keep_largest(scores, total))


@pytest.mark.parametrize("selector", [*SELECTORS.values(), NofM(1, 2)], ids=str)
def test_no_scores_give_no_masks(selector):
    assert selector({}, 0.5) == {}


@pytest.mark.parametrize("selector", [Global(), PerLayer(), PerLayer("depth"), PerLayer("erk"), PerRow()], ids=str)
def test_tensors_without_elements_and_without_dimensions_are_served(selector):
    scores = {"empty": torch.empty(3, 0), "row": torch.randn(6, 4), "scalar": torch.tensor(0.5)}
    masks = selector(scores, 0.5)
    assert {name: mask.shape for name, mask in masks.items()} == {name: s.shape for name, s in scores.items()}
    assert num_dropped(masks) == 12


@pytest.mark.parametrize("selector", [*SELECTORS.values(), NofM(1, 2)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_score_that_is_not_finite_is_refused_by_name_only_where_it_is_live(selector, bad, dtype):
    scores = {"first": torch.rand(4, 6).to(dtype), "second": torch.rand(6, 6).to(dtype)}
    within = {"second": torch.rand(6, 6) < 0.9}
    within["second"][3, 2] = False
    clean = selector(scores, 0.5, within)
    scores["second"][3, 2] = bad
    with pytest.raises(ValueError, match=r"\bsecond\b") as error:
        selector(scores, 0.5)
    assert "first has" not in str(error.value) and "\n" not in str(error.value)
    assert same(selector(scores, 0.5, within), clean)


@pytest.mark.parametrize("selector", [*SELECTORS.values(), NofM(1, 2)], ids=str)
def test_lazy_scores_give_the_masks_of_stored_ones(selector, small_chunks):
    shapes = {"a": (8, 12), "b": (6, 4, 3, 3), "c": (5, 2, 6)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    weights["b"] = weights["b"].to(memory_format=torch.channels_last)
    moments = {name: torch.rand(shape) for name, shape in shapes.items()}
    lazy = {
        name: Lazy(name, weights[name], bitter7, {"weight": weights[name], "exp_avg_sq": moments[name]})
        for name in shapes
    }
    stored = {name: bitter7(weights[name], moments[name]).contiguous() for name in shapes}
    within = some_dead(stored)
    assert same(selector(lazy, 0.5), selector(stored, 0.5))
    assert same(selector(lazy, 0.5, within), selector(stored, 0.5, within))


def test_scores_and_masks_given_are_not_changed():
    scores, before = draw("normal", (6, 8)), draw("normal", (6, 8))
    scores["layer0"].copy_(before["layer0"])
    within = {"layer0": torch.rand(6, 8) < 0.9}
    dead = within["layer0"].clone()
    for selector in (*SELECTORS.values(), NofM(1, 2)):
        selector(scores, 0.5, within)
    assert same(scores, before) and torch.equal(within["layer0"], dead)


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    st.floats(0, 0.99),
)
def test_any_ties_at_any_sparsity_are_counted_exactly(values, sparsity):
    scores = {str(i): torch.tensor(list(map(float, row))) for i, row in enumerate(values)}
    total = round(sparsity * num_weights(scores))
    assert same(Global()(scores, sparsity), keep_largest(scores, total))
    for how in ("depth", "erk"):
        assert num_dropped(PerLayer(how)(scores, sparsity)) == total


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: Global()(s, 1.0), "sparsity"),
        (lambda s: Global()(s, -0.1), "sparsity"),
        (lambda s: PerRow()(s, float("nan")), "sparsity"),
        (lambda s: NofM(0, 4), "0:4"),
        (lambda s: NofM(5, 4), "5:4"),
        (lambda s: NofM(2, 4)(s), "layer0"),
        (lambda s: NofM(1, 3)(s, 0.5), "1:3"),
        (lambda s: PerLayer({"nothing": 0.5})(s, 0.5), "nothing"),
        (lambda s: Global()(s, 0.5, {"layer9": torch.ones(2)}), "layer9"),
        (lambda s: Global()(s, 0.5, {"layer0": torch.ones(6, 5)}), "layer0"),
        (lambda s: Global()(s, 0.5, {"layer0": torch.ones(7, dtype=torch.bool)}), "layer0"),
        (lambda s: Global()(s, 0.5, {"layer0": torch.ones(5, 6, dtype=torch.bool)}), "layer0"),
        (lambda s: Global()({"a": torch.ones(3, dtype=torch.complex64)}, 0.5), "a"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_names_it(call, text):
    with pytest.raises(ValueError, match=text) as error:
        call(draw("normal", (6, 5), (3, 3)))
    assert "\n" not in str(error.value)


def shapes_of(scores):
    return [Shape(name, tuple(score.shape), (0,) if score.ndim > 1 else ()) for name, score in scores.items()]


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("name", SELECTORS)
def test_the_quota_is_what_the_masks_drop(name, sparsity):
    scores = draw("many ties", (7,), (13, 5), (3, 5, 2), (40, 24))
    quotas = SELECTORS[name].quota(shapes_of(scores), sparsity)
    assert sum(quota.num * quota.num_drop for quota in quotas) == num_dropped(SELECTORS[name](scores, sparsity))
    assert sum(quota.num * quota.size for quota in quotas) == num_weights(scores)


@pytest.mark.parametrize("name", [*SELECTORS, "2:4"])
def test_masks_of_a_sparsity_fall_short_of_a_higher_one_alone(name):
    selector = SELECTORS.get(name, NofM(2, 4))
    sources = [stored(name, score) for name, score in draw("normal", (12, 8), (40, 24)).items()]
    masks = selector.packed(sources, 0.5, {})
    num_kept = sum(int(bits.count(mask)) for mask in masks.values())
    assert selector.prunes_more(sources, 0.5, {}, sum(source.numel for source in sources))
    assert not selector.prunes_more(sources, 0.5, masks, num_kept)
    if name != "2:4":
        assert not selector.prunes_more(sources, 0.4, masks, num_kept)
        assert selector.prunes_more(sources, 0.75, masks, num_kept)


def test_a_group_with_too_few_pruned_falls_short_though_others_have_more():
    sources = [stored("a", torch.arange(32.0).view(2, 16))]
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[0, :13], keep[1, :7] = False, False  # 20 of 32, but 7 in the second row
    live = {"a": bits.pack(keep)}
    assert PerRow().prunes_more(sources, 0.5, live, 12) and NofM(2, 4).prunes_more(sources, 0.5, live, 12)
    assert not Global().prunes_more(sources, 0.5, live, 12) and not PerLayer().prunes_more(sources, 0.5, live, 12)


class Pairs(Selector):
    """One threshold for every two weights: all that a selector of one's own needs."""

    group = "layer"

    def quota(self, shapes, sparsity, num_pruned=None):
        pairs = [shapes[i : i + 2] for i in range(0, len(shapes), 2)]
        sizes = [sum(shape.numel for shape in pair) for pair in pairs]
        names = [tuple(shape.name for shape in pair) for pair in pairs]
        return [Quota(pair, size, round(sparsity * size)) for pair, size in zip(names, sizes, strict=True)]


def test_a_selector_of_ones_own_says_how_many_go():
    scores = draw("normal", (13, 5), (7, 9), (40, 24))
    first, last = list(scores)[:2], list(scores)[2:]
    masks = Pairs()(scores, 0.4)
    for names in (first, last):
        pair = {name: scores[name] for name in names}
        wanted = keep_largest(pair, round(0.4 * num_weights(pair)))
        assert same({name: masks[name] for name in names}, wanted)
    later = Pairs()(scores, 0.7, masks)
    assert is_subset(later, masks) and num_dropped(later) == round(0.7 * 128) + round(0.7 * 960)


def test_the_command_line_offers_every_selector_of_the_table():
    assert get_args(get_type_hints(Run)["allocate"]) == tuple(select.SELECTORS)
    assert all(each.quota([Shape("a", (4, 8))], 0.5) for each in select.SELECTORS.values())
