"""Cuts within rows and groups by kernels are those of the definitions."""

import math

import pytest
import torch

from prunus.ops import bits
from prunus.ops.source import Lazy, stored
from prunus.score import SCORES
from prunus.select import NofM, by_rows, smallest

triton = pytest.importorskip("triton", reason="kernels need triton")

from prunus.ops._triton.within import drop_in_groups, drop_in_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("pruned", [False, True])
def test_rows_are_cut_as_their_definition_says(kind, sparsity, pruned):
    sources = given(kind)
    live = half_live(sources) if pruned else {}

    def drop(_: Lazy, rows: torch.Tensor) -> torch.Tensor:
        return smallest(rows, round(sparsity * rows.shape[1]))

    num_drop = [round(sparsity * source.num_inputs) for source in sources]
    masks = drop_in_rows(sources, num_drop, live)
    assert len(masks) == sum(drop > 0 for drop in num_drop)
    assert_equal(masks, {source.name: by_rows(source, live, drop) for source in sources})


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("n_of_m", [(2, 4), (1, 4), (4, 8), (1, 2), (8, 8), (3, 8)], ids=str)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_are_cut_as_their_definition_says(kind, n_of_m, pruned, dtype):
    select = NofM(*n_of_m)
    sources = [source for source in given(kind, dtype) if source.num_inputs % select.m == 0]
    live = half_live(sources) if pruned else {}
    masks = drop_in_groups(sources, select.m - select.n, select.m, live, tile=1024)
    assert len(masks) == len(sources)
    assert_equal(masks, {source.name: by_rows(source, live, select.drop) for source in sources})


@pytest.mark.parametrize("name", ["bitter7", "wanda"])
def test_scores_are_computed_on_the_fly(name):
    weight, other = torch.randn(6, 48, device=DEVICE), torch.rand(6, 48, device=DEVICE)
    reads = {"exp_avg_sq": other} if name == "bitter7" else {"input_norm": other[0]}
    source = Lazy("a", weight, SCORES[name].of, {"weight": weight} | reads, formula=name)
    wanted = by_rows(source, {}, lambda _, rows: smallest(rows, 24))
    assert int(bits.count(drop_in_rows([source], [24], {})["a"])) == 6 * 24
    if DEVICE == "cpu":  # a compiler may fuse operations, which moves a score by an ulp
        assert_equal(drop_in_rows([source], [24], {}), {"a": wanted})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused_by_name_unless_dead(value):
    sources = given("normal")
    sources[3].weight.view(-1)[5] = value
    with pytest.raises(ValueError, match="t3"):
        drop_in_rows(sources, [1] * len(sources), {})
    with pytest.raises(ValueError, match="t3"):
        drop_in_groups(sources, 1, 2, {})
    dead = torch.ones(sources[3].numel, dtype=torch.bool, device=DEVICE)
    dead[5] = False
    drop_in_rows(sources, [1] * len(sources), {"t3": bits.pack(dead)})
    drop_in_groups(sources, 1, 2, {"t3": bits.pack(dead)})


def test_rows_that_kernels_cannot_read_are_left_to_the_definition():
    ragged = stored("ragged", torch.rand(3, 5, device=DEVICE))  # a row begins within a byte
    across = Lazy("across", torch.rand(8, 8, device=DEVICE), torch.abs, {}, outputs=(1,))
    assert drop_in_rows([ragged, across], [2, 2], {}) == {}
    assert drop_in_groups([across], 2, 4, {}) == {}
    assert drop_in_groups([stored("a", torch.rand(3, 6, device=DEVICE))], 1, 3, {}) == {}
