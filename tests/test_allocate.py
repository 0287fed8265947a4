"""Allocations are exact to the weight, keep what is pruned already, and follow their rule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunus.allocate import CAP, MOST, NEAR, allocate, clipped

GPT2 = {
    f"h.{i}.{name}": shape
    for i in range(12)
    for name, shape in {
        "attn.c_attn": (768, 2304),
        "attn.c_proj": (768, 768),
        "mlp.c_fc": (768, 3072),
        "mlp.c_proj": (3072, 768),
    }.items()
}
MODELS = {
    "one weight": {"a": (1,)},
    "one layer": {"a": (7, 3)},
    "tiny layers": {f"l{i}": (1, 2) for i in range(5)},
    "ragged": {"a": (3,), "b": (64, 48), "c": (4, 3, 3, 3), "d": (1, 1), "e": (1000, 3)},
    "gpt2": GPT2,
}
HOWS = ["depth", "erk", {"*": 0.5}, {"a": 0.2, "*": 0.9}, {"*": 1.0}]
SPARSITIES = [0.0, 0.01, 0.3, 0.5, 0.7, 0.9, 0.94, 0.97, 0.999]


def sizes_of(shapes):
    return {name: math.prod(shape) for name, shape in shapes.items()}


def matching(how, shapes):
    """The mapping without patterns for layers that this model does not have."""
    return how if isinstance(how, str) else {p: s for p, s in how.items() if p == "*" or p in shapes}


@pytest.fixture(params=MODELS)
def shapes(request):
    return MODELS[request.param]


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_total_is_exact_and_no_layer_loses_more_than_it_has(shapes, how, sparsity):
    counts, sizes = allocate(shapes, sparsity, matching(how, shapes)), sizes_of(shapes)
    assert list(counts) == list(shapes)
    assert sum(counts.values()) == round(sparsity * sum(sizes.values()))
    assert all(isinstance(count, int) and 0 <= count <= sizes[name] for name, count in counts.items())


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_uniform_is_the_rounded_share_of_each_layer(shapes, sparsity):
    assert allocate(shapes, sparsity) == {name: round(sparsity * size) for name, size in sizes_of(shapes).items()}


@pytest.mark.parametrize("how", ["depth", "erk", {"*": 0.5}], ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.5, 0.9])
def test_what_is_pruned_already_stays_pruned_and_counts(how, sparsity):
    shapes = MODELS["ragged"]
    floor = {"b": 2000, "d": 1, "e": 10}
    counts = allocate(shapes, sparsity, how, at_least=floor)
    assert all(counts[name] >= count for name, count in floor.items())
    assert sum(counts.values()) == max(round(sparsity * sum(sizes_of(shapes).values())), sum(floor.values()))


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_depth_rises_in_a_straight_line_from_seven_to_thirteen(sparsity):
    shapes = {f"l{i}": (1000, 1000) for i in range(7)}
    counts = allocate(shapes, sparsity, "depth")
    scales = [0.7 + 0.6 * i / 6 for i in range(7)]
    assert list(counts.values()) == pytest.approx([sparsity * 1e6 * scale for scale in scales], abs=1)


def test_depth_on_gpt2_is_renormalised_to_the_target():
    counts, sizes = allocate(GPT2, 0.5, "depth"), sizes_of(GPT2)
    scales = {name: 0.7 + 0.6 * i / 47 for i, name in enumerate(GPT2)}
    plain = sum(0.5 * scales[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert sum(counts.values()) == round(0.5 * sum(sizes.values()))
    for name, size in sizes.items():
        assert counts[name] == pytest.approx(0.5 * scales[name] * size * 0.5 / plain, abs=1)


@pytest.mark.parametrize("sparsity", [0.7, 0.75, 0.8, 0.9, 0.94])
def test_depth_empties_no_layer_beyond_the_cap_below_it(sparsity):
    counts, sizes = allocate(GPT2, sparsity, "depth"), sizes_of(GPT2)
    assert sum(counts.values()) == round(sparsity * sum(sizes.values()))
    assert max(counts[name] - CAP * size for name, size in sizes.items()) < 1
    assert sorted(counts[n] / sizes[n] for n in GPT2) == pytest.approx([counts[n] / sizes[n] for n in GPT2], abs=1e-5)


def test_erk_keeps_densities_in_proportion_to_the_sum_of_dimensions():
    shapes = {"wide": (400, 300), "tall": (900, 200), "conv": (64, 64, 3, 3)}
    counts, sizes = allocate(shapes, 0.9, "erk"), sizes_of(shapes)
    stay = {name: sizes[name] - counts[name] for name in shapes}
    factors = [stay[name] / sum(shapes[name]) for name in shapes]
    assert factors == pytest.approx([factors[0]] * 3, rel=1e-2)


def test_erk_leaves_small_layers_dense_rather_than_overfull():
    counts = allocate({"small": (10, 10), "large": (1000, 1000)}, 0.5, "erk")
    assert counts["small"] == 0 and sum(counts.values()) == round(0.5 * 1_000_100)


def test_a_mapping_is_scaled_to_the_target_and_leaves_the_unnamed_dense():
    shapes = {"a.0": (100, 10), "a.1": (100, 10), "b.0": (100, 10), "c.0": (100, 10)}
    counts = allocate(shapes, 0.3, {"a.*": 0.4, "b.*": 0.2})
    assert counts == {"a.0": 480, "a.1": 480, "b.0": 240, "c.0": 0}
    assert allocate({"a": (10, 10), "b": (10, 10)}, 0.25, {"a": 0.5, "*": 0.0}) == {"a": 50, "b": 0}  # the first counts


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"typo*": 0.5}, "typo"),
        ({"*": 0.5, "typo*": 0.5}, "typo"),
        ({"*": 1.5}, "1.5"),
        ({"*": -0.1}, "-0.1"),
        ("everywhere", "everywhere"),
        ({"a": 0.5}, "5000"),
    ],
    ids=str,
)
def test_what_cannot_be_allocated_is_one_line_that_names_it(how, text):
    with pytest.raises(ValueError, match=text) as error:
        allocate({"a": (10, 10), "b": (100, 99)}, 0.5, how)
    assert "\n" not in str(error.value)


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=8),
    st.lists(st.floats(0, 0.999), min_size=2, max_size=4),
    st.sampled_from(["depth", "erk", {"*": 0.5}]),
)
def test_any_shapes_at_any_sequence_of_sparsities(dims, sparsities, how):
    shapes = {str(i): shape for i, shape in enumerate(dims)}
    total, counts = sum(sizes_of(shapes).values()), {}
    for sparsity in sorted(sparsities):
        before, counts = counts, allocate(shapes, sparsity, how, at_least=counts)
        assert sum(counts.values()) == round(sparsity * total)
        assert all(counts[name] >= count for name, count in before.items())


@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_clipped_counts_are_exact_and_near_the_target(shapes, sparsity):
    sizes = sizes_of(shapes)
    wish = {name: round(size * ((i * 0.37 + 0.1) % 1)) for i, (name, size) in enumerate(sizes.items())}
    found = clipped(list(wish.values()), list(sizes.values()), sparsity, [0] * len(sizes))
    counts = dict(zip(sizes, found, strict=True))
    assert sum(counts.values()) == round(sparsity * sum(sizes.values()))
    shifts = []
    for name, size in sizes.items():
        lowest, highest = max(0.0, sparsity - NEAR) * size, min(MOST, sparsity + NEAR) * size
        assert math.floor(lowest) <= counts[name] <= math.ceil(highest)
        if lowest + 1 < counts[name] < highest - 1:
            shifts.append(((counts[name] - wish[name]) / size, 1.01 / size))
    for shift, slack in shifts:
        assert abs(shift - shifts[0][0]) <= slack + shifts[0][1]


def test_clipped_counts_keep_what_is_pruned_and_name_what_cannot_be_reached():
    assert clipped([0, 600], [1000, 1000], 0.3, [0, 900]) == [150, 900]
    with pytest.raises(ValueError, match=r"0\.99 cannot be reached .* than 0\.98"):
        clipped([900, 900], [1000, 1000], 0.99, [0, 0])
    with pytest.raises(ValueError, match=r"is for prune\(\)"):
        allocate({"a": (4, 4)}, 0.5, "fisher")
