"""Cuts within rows and groups by kernels are those of the definitions."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from prunus.ops import bits
from prunus.ops.lazy import Lazy, stored
from prunus.rows import by_rows, smallest, smallest_of_groups, whole_rows
from prunus.score import SCORES

triton = pytest.importorskip("triton", reason="kernels need triton")

from test_kernels import (  # noqa: E402
    DEVICE,
    assert_near,
    matrix,
    scores_by_definition,
    scores_by_kernel,
    sorted_scores,
    units_of,
)

from prunus.ops._triton.cut import launch_cut, readable  # noqa: E402
from prunus.ops._triton.rows import LONGEST, drop_in_groups, drop_in_rows  # noqa: E402

SHAPES = [(5, 40), (3, 8), (7, 4, 2, 3), (2, 1000), (64,)]
VALUES = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "ties": lambda shape, g: torch.randint(0, 3, shape, generator=g).float(),
    "zeros": lambda shape, g: torch.zeros(shape),
    "signed zeros": lambda shape, g: torch.zeros(shape) * (torch.randint(0, 2, shape, generator=g) * 2 - 1),
    "huge range": lambda shape, g: torch.randn(shape, generator=g) * 10.0 ** torch.randint(-38, 38, shape, generator=g),
    "signed": lambda shape, g: torch.randint(-2, 3, shape, generator=g) * torch.rand(shape, generator=g),
}


def given(kind: str, dtype: torch.dtype = torch.float32) -> list[Lazy]:
    generator = torch.Generator().manual_seed(len(kind))
    tensors = [VALUES[kind](shape, generator).to(DEVICE, dtype) for shape in SHAPES]
    return [stored(f"t{i}", tensor) for i, tensor in enumerate(tensors)]


def half_live(sources: list[Lazy]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    picked = {source.name: torch.rand(source.shape, generator=generator) < 0.5 for source in sources[1:]}
    return {name: bits.pack(mask.to(DEVICE)) for name, mask in picked.items()}


def assert_equal(masks: dict, wanted: dict) -> None:
    assert all(torch.equal(mask.cpu(), wanted[name].cpu()) for name, mask in masks.items())


def rows_by_definition(source: Lazy, num_drop: int, live: dict) -> torch.Tensor:
    return by_rows(source, whole_rows(source, live), lambda rows: smallest(rows, num_drop))


ROWS = [*product(VALUES, (0.1, 0.5, 0.9), (False, True))]
FEW_ROWS = [("normal", 0.5, False), ("ties", 0.5, True), ("huge range", 0.9, False), ("signed", 0.1, True)]


@pytest.mark.parametrize(("kind", "sparsity", "pruned"), matrix(ROWS, FEW_ROWS))
def test_rows_are_cut_as_their_definition_says(kind, sparsity, pruned):
    sources = given(kind)
    live = half_live(sources) if pruned else {}
    num_drop = [round(sparsity * source.num_inputs) for source in sources]
    masks = drop_in_rows(sources, num_drop, live)
    assert len(masks) == sum(drop > 0 for drop in num_drop)
    wanted = zip(sources, num_drop, strict=True)
    assert_equal(masks, {source.name: rows_by_definition(source, drop, live) for source, drop in wanted})


N_OF_M = [(2, 4), (1, 4), (4, 8), (1, 2), (8, 8), (3, 8)]
GROUPS = [*product(VALUES, N_OF_M, (False, True), (torch.float32, torch.bfloat16))]
FEW_GROUPS = [("ties", (2, 4), True, torch.float32), ("signed", (3, 8), False, torch.bfloat16)]


@pytest.mark.parametrize(("kind", "n_of_m", "pruned", "dtype"), matrix(GROUPS, FEW_GROUPS), ids=str)
def test_groups_are_cut_as_their_definition_says(kind, n_of_m, pruned, dtype):
    n, m = n_of_m
    sources = [source for source in given(kind, dtype) if source.num_inputs % m == 0]
    live = half_live(sources) if pruned else {}
    masks = drop_in_groups(sources, m - n, m, live, tile=1024)
    assert len(masks) == len(sources)
    decide = [smallest_of_groups(source, m - n, m, False) for source in sources]
    wanted = zip(sources, decide, strict=True)
    assert_equal(masks, {source.name: by_rows(source, whole_rows(source, live), each) for source, each in wanted})


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["bitter7", "wanda"])
def test_scores_are_computed_on_the_fly(name):
    weight, other = torch.randn(6, 48, device=DEVICE), torch.rand(6, 48, device=DEVICE)
    reads = {"exp_avg_sq": other} if name == "bitter7" else {"input_norm": other[0]}
    source = Lazy("a", weight, SCORES[name].of, {"weight": weight} | reads, formula=SCORES[name].formula)
    found = bits.unpack(drop_in_rows([source], [24], {})["a"], (6, 48)).cpu()
    wanted = bits.unpack(rows_by_definition(stored("a", sorted_scores([source])["a"]), 24, {}), (6, 48)).cpu()
    if DEVICE == "cpu":
        assert torch.equal(found, wanted)
    scores, units = scores_by_definition([source])["a"], units_of([source])["a"]
    for row, other, score, unit in zip(found, wanted, scores, units, strict=True):
        assert_near({"a": row}, {"a": other}, {"a": score}, score[~other], {"a": unit})


CLOSE = [*product((2, 40, 1 << 12), (torch.float32, torch.bfloat16))]  # roundings apart, of moments in this dtype


@pytest.mark.rounding
@pytest.mark.parametrize(("steps", "moment"), matrix(CLOSE, [(40, torch.float32)]), ids=str)
def test_scores_that_fast_roots_cannot_tell_apart_are_cut_by_correct_ones(steps, moment):
    generator = torch.Generator().manual_seed(steps)
    shape = matrix([(64, 256)], [(2, 64)])[0]  # most groups and rows have scores so close that an ulp or two decides
    weight = 1 + torch.randint(steps, shape, generator=generator) * 2.0**-23
    second = 1e-9 * (1 + torch.randint(steps, shape, generator=generator) * 2.0**-23)
    reads = {"weight": weight.to(DEVICE), "exp_avg_sq": second.to(DEVICE, moment)}
    score = SCORES["bitter7"]
    source = Lazy("a", reads["weight"], score.of, reads, formula=score.formula)
    exact = stored("a", scores_by_kernel([source])["a"])
    live = {"a": bits.pack(torch.rand(shape, generator=generator) < 0.7)}
    for given in ({}, live):
        on_device = {name: mask.to(DEVICE) for name, mask in given.items()}
        assert_equal(drop_in_rows([source], [32], on_device), {"a": rows_by_definition(exact, 32, given)})
        for num_drop, group in matrix([(2, 4), (1, 4), (3, 8)], [(2, 4)]):
            wanted = by_rows(exact, whole_rows(exact, given), smallest_of_groups(exact, num_drop, group, False))
            assert_equal(drop_in_groups([source], num_drop, group, on_device), {"a": wanted})


@pytest.mark.parametrize("name", ["bitter7", "bitter0"])  # a root as a factor, and below a fraction
def test_scores_of_which_fast_roots_are_infinite_are_finite(name):
    generator, score = torch.Generator().manual_seed(0), SCORES[name]
    second = torch.rand(2, 2, 64, generator=generator)
    second *= torch.where(torch.rand(2, 2, 64, generator=generator) < 0.2, 1e33, 1.0)
    first = torch.rand(2, 2, 64, generator=generator) * second.sqrt()
    reads = [{"weight": torch.ones(2, 64), "exp_avg": m, "exp_avg_sq": v} for m, v in zip(first, second, strict=True)]
    reads = [{key: each[key].to(DEVICE) for key in ("weight", *score.reads)} for each in reads]
    given = [
        Lazy(f"{i}", each["weight"], score.of, {key: each[key] for key in score.reads}, formula=score.formula)
        for i, each in enumerate(reads)
    ]
    exact = [stored(name, scores) for name, scores in scores_by_kernel(given).items()]

    def cut(*numbers: list[int]) -> dict:
        return launch_cut(readable(given), *numbers, {}, tile=1024).wait()

    assert_equal(drop_in_rows(given, [32, 32], {}), {each.name: rows_by_definition(each, 32, {}) for each in exact})
    decide = [(each, smallest_of_groups(each, 2, 4, False)) for each in exact]
    wanted = {each.name: by_rows(each, whole_rows(each, {}), one) for each, one in decide}
    assert_equal(drop_in_groups(given, 2, 4, {}, tile=1024), wanted)
    for found, numbers in ((cut([128], [256]), 256), (cut([64, 64], [128, 128]), 128)):
        assert sum(int(bits.count(mask)) for mask in found.values()) == 128
        parts = [exact] if numbers == 256 else [[each] for each in exact]
        for part in parts:
            scores = torch.cat([each.weight.flatten().cpu() for each in part])
            keep = torch.cat([bits.unpack(found[each.name].cpu(), each.shape).flatten() for each in part])
            assert scores[keep].min() >= scores[~keep].max()
    reads[1]["exp_avg_sq"][1, 5] = math.nan
    for call in (
        partial(cut, [128], [256]),
        partial(cut, [64, 64], [128, 128]),
        partial(drop_in_rows, given, [8, 8], {}),
    ):
        with pytest.raises(ValueError, match="scores must be finite, but 1 has"):
            call()


def test_rows_of_several_lengths_take_a_launch_for_each_block_size_and_the_longest_may_hold_one_value_alone():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in [(3, 64), (2, 72), (5, 40), (4, 128), (2, 64)]]
    given = [stored(f"t{i}", tensor.to(DEVICE)) for i, tensor in enumerate([*tensors, torch.zeros(1, LONGEST)])]
    masks = drop_in_rows(given, [source.num_inputs // 3 for source in given], {})
    wanted = {source.name: rows_by_definition(source, source.num_inputs // 3, {}) for source in given}
    assert len(masks) == len(wanted)
    assert_equal(masks, wanted)


GPU_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()  # the bits that CUDA computes


@pytest.mark.parametrize("value", matrix([math.nan, GPU_NAN, math.inf, -math.inf], [math.nan, GPU_NAN, -math.inf]))
def test_scores_that_are_not_finite_are_refused_by_name_unless_dead(value):
    sources = given("normal")
    sources[3].weight.view(-1)[5] = value
    if math.isnan(value):
        sources[3].weight.view(-1).view(torch.int32)[5] = 0x7FFFFFFF if value is GPU_NAN else 0x7FC00000
    with pytest.raises(ValueError, match="t3"):
        drop_in_rows(sources, [1] * len(sources), {})
    with pytest.raises(ValueError, match="t3"):
        drop_in_groups(sources, 1, 2, {}, tile=1024)
    dead = torch.ones(sources[3].numel, dtype=torch.bool, device=DEVICE)
    dead[5] = False
    drop_in_rows(sources, [1] * len(sources), {"t3": bits.pack(dead)})
    drop_in_groups(sources, 1, 2, {"t3": bits.pack(dead)}, tile=1024)


def test_rows_that_kernels_cannot_read_are_left_to_the_definition():
    ragged = stored("ragged", torch.rand(3, 5, device=DEVICE))  # a row begins within a byte
    across = Lazy("across", torch.rand(8, 8, device=DEVICE), torch.abs, {}, outputs=(1,))
    assert drop_in_rows([ragged, across], [2, 2], {}) == {}
    assert drop_in_groups([across], 2, 4, {}) == {}
    assert drop_in_groups([stored("a", torch.rand(3, 6, device=DEVICE))], 1, 3, {}) == {}
