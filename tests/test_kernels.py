"""Kernels compute what their definitions say: in Triton's interpreter here, compiled where there is a GPU."""

import math

import pytest
import torch
from reference import keep_largest

from prunus import cut
from prunus.ops import bits
from prunus.ops.source import Lazy, stored
from prunus.score import SCORES

triton = pytest.importorskip("triton", reason="kernels need triton")

from prunus.ops._triton import driver  # noqa: E402
from prunus.ops._triton.zero import zero_  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 1024  # small, so that little data makes many tiles
SHAPES = [(37, 41), (8, 128), (3,), (5, 5, 7)]
OPTIONS = [
    *((name, {}) for name in SCORES if name not in ("bitter1", "bitter2", "bitter4")),
    *((name, {"eps": 1e-8}) for name in ("bitter0", "bitter3", "bitter5", "bitter6", "bitter7", "bitter8", "bitter9")),
    *(("fisher", {"q": q}) for q in (0, 0.25, 0.5)),
]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sample, so that the bracket is narrower than the data."""
    monkeypatch.setattr(driver, "num_samples", lambda num_live: 512)


def sources(name: str, shapes=SHAPES, weight=torch.float32, moment=torch.float32, **options) -> list[Lazy]:
    generator = torch.Generator().manual_seed(len(name))
    score, found = SCORES[name], []
    for i, shape in enumerate(shapes):
        normal = torch.randn(shape, generator=generator)
        grad = torch.randn(shape, generator=generator) * 1e-4
        tensors = {
            "weight": (normal * 0.02).to(DEVICE, weight),
            "exp_avg": (torch.randn(shape, generator=generator) * 1e-5).to(DEVICE, moment),
            "exp_avg_sq": grad.square().to(DEVICE, moment),
            "movement": grad.to(DEVICE),
            "input_norm": torch.rand(shape[-1:], generator=generator).to(DEVICE),
        }
        found.append(
            Lazy(
                f"layer{i}",
                tensors["weight"],
                score.of,
                {read: tensors[read] for read in score.reads if read in tensors},
                constants=options | ({"step": 7.0} if "step" in score.reads else {}),
                takes_position="position" in score.reads,
                formula=score.formula,
            )
        )
    return found


def by_kernel(given: list[Lazy], num_drop: int, live: dict | None = None) -> dict:
    low = driver.lowered(given)
    assert low is not None
    num_live = sum(cut.num_kept_each(given, live or {}).values())
    num_dead = sum(source.numel for source in given) - num_live
    return driver.launch_cut(low, num_drop - num_dead, num_live, live or {}, tile=TILE).wait()


def by_definition(given: list[Lazy], num_drop: int, live: dict | None = None) -> dict:
    scores = {source.name: next(source.pieces(source.numel))[1].view(source.shape).cpu() for source in given}
    within = {name: bits.unpack(mask.cpu(), scores[name].shape) for name, mask in (live or {}).items()}
    return keep_largest(scores, num_drop, within)


def assert_agrees(masks: dict, wanted: dict, given: list[Lazy]) -> None:
    """Equal, but for scores that the compiler's fused arithmetic may put into another order by an ulp."""
    for source in given:
        mask = bits.unpack(masks[source.name], source.shape).cpu()
        if DEVICE == "cpu":
            assert torch.equal(mask, wanted[source.name]), source.name
    assert sum(int(bits.count(mask)) for mask in masks.values()) == sum(int(mask.sum()) for mask in wanted.values())


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_score_is_cut_as_its_definition_says(name, options):
    given = sources(name, **options)
    num_drop = round(0.6 * sum(source.numel for source in given))
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["magnitude", "bitter7", "bitter5"])
def test_half_precision_ties_in_bulk_and_is_cut_exactly(name, types):
    given = sources(name, [(64, 100), (33, 7)], *types)
    for num_drop in (1, 3200, 6000):
        assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


@pytest.mark.parametrize("sparsity", [0.01, 0.3, 0.97])
def test_a_second_cut_stays_within_the_first(sparsity):
    given = sources("bitter7")
    total = sum(source.numel for source in given)
    first = by_kernel(given, round(0.005 * total))
    second = by_kernel(given, round(sparsity * total), first)
    assert all(bool((second[name] & ~first[name] == 0).all()) for name in first)
    assert_agrees(second, by_definition(given, round(sparsity * total), first), given)


def by_definition_packed(given: list[Lazy], num_drop: int) -> dict:
    return {name: bits.pack(mask).to(DEVICE) for name, mask in by_definition(given, num_drop).items()}


def test_signed_scores_do_not_revive_the_dead():
    given = sources("bitter5")
    total = sum(source.numel for source in given)
    first = by_definition_packed(given, round(0.4 * total))
    second = by_kernel(given, round(0.7 * total), first)
    assert_agrees(second, by_definition(given, round(0.7 * total), first), given)


@pytest.fixture
def descents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of keys that descents were asked for."""
    asked, original = [], driver.by_descent

    def by_descent(task, lo, hi):
        asked.append((lo, hi))
        return original(task, lo, hi)

    monkeypatch.setattr(driver, "by_descent", by_descent)
    return asked


@pytest.mark.parametrize("num_drop", [2000, 2999, 4000])
def test_ties_in_a_narrow_bracket_need_no_descent(num_drop, descents, monkeypatch):
    monkeypatch.setattr(driver, "LEAST_OWN", 1 << 14)
    given = magnitudes(torch.zeros(6000), 60, 100)
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)
    assert not descents


def magnitudes(values: torch.Tensor, *shape: int) -> list[Lazy]:
    scores = values.to(DEVICE).view(shape)
    return [Lazy("a", scores, SCORES["magnitude"].of, {"weight": scores}, formula="magnitude")]


@pytest.mark.parametrize("values", [[0.0], [1.0, 2.0, 3.0], [0.0, 1.0], [1e-39, 1e-38, 3e38]], ids=str)
@pytest.mark.parametrize("num_drop", [1, 2999, 3000, 5999])
def test_bulk_ties_are_cut_by_position(values, num_drop):
    given = magnitudes(torch.tensor(values).repeat(6000 // len(values)), 60, 100)
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


def test_ties_that_the_lists_do_not_hold_are_descended_into_without_a_pass(descents, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", 0.5)
    given = magnitudes(torch.zeros(1 << 16), 256, 256)
    assert_agrees(by_kernel(given, 20001), by_definition(given, 20001), given)
    assert len(descents) == 1 and descents[0][1] - descents[0][0] < 1 << 11


def test_more_ties_than_are_compared_with_each_other_are_ranked_by_digits(descents, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", 60.0)  # so that the lists have room for all
    monkeypatch.setattr(driver, "LEAST_OWN", 1 << 14)
    values = torch.cat([torch.rand(3000), torch.full((2500,), 0.5), torch.rand(3000) * 1e-3 + 0.5])
    given = magnitudes(values[torch.randperm(8500, generator=torch.Generator().manual_seed(0))], 85, 100)
    below = int((values < 0.5).sum())
    for num_drop in (below + 1, below + 1200, below + 2499):
        assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)
    assert not descents


def test_an_own_bucket_without_room_is_descended_into(descents, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", 60.0)
    monkeypatch.setattr(driver, "LEAST_OWN", 512)
    given = magnitudes(torch.cat([torch.rand(3000), torch.full((2500,), 0.5)]), 55, 100)
    assert_agrees(by_kernel(given, 3000), by_definition(given, 3000), given)
    assert len(descents) == 1 and descents[0][1] - descents[0][0] < 1 << 20


@pytest.mark.parametrize("name", ["magnitude", "bitter5", "random"])
@pytest.mark.parametrize("sparsity", [0.001, 0.5, 0.999])
def test_a_bracket_that_missed_is_followed_by_a_whole_descent(name, sparsity, descents, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", -40.0)
    given = sources(name)
    num_drop = max(1, round(sparsity * sum(source.numel for source in given)))
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)
    assert descents[-1] == (driver.LOWEST, driver.HIGHEST)


def test_a_descent_in_a_range_that_lacks_the_cut_widens(descents):
    given = sources("magnitude")
    low = driver.lowered(given)
    pending = driver.launch_cut(low, 1000, sum(source.numel for source in given), {}, tile=TILE)
    assert_agrees(driver.by_descent(pending.cut, 5, 70).wait(), by_definition(given, 1000), given)
    assert len(descents) == 2


def test_a_descent_stays_within_live_masks(monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", -40.0)
    given = sources("bitter5", SHAPES, torch.bfloat16, torch.bfloat16)
    total = sum(source.numel for source in given)
    first = by_definition_packed(given, round(0.4 * total))
    assert_agrees(by_kernel(given, round(0.7 * total), first), by_definition(given, round(0.7 * total), first), given)


def test_cuts_of_many_weights_wait_once_and_agree_with_cuts_of_each():
    given = sources("bitter7")
    num_drop = [source.numel // 2 for source in given]
    pending = [
        driver.launch_cut(driver.lowered([source]), drop, source.numel, {}, tile=TILE)
        for source, drop in zip(given, num_drop, strict=True)
    ]
    for source, drop, masks in zip(given, num_drop, driver.wait_all(pending), strict=True):
        assert_agrees(masks, by_definition([source], drop), [source])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bitter7", "magnitude"])
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_every_route_on_a_gpu_keeps_the_right_number_and_the_largest(name, types):
    given = sources(name, [(3000, 1001), (512, 512)], *types)
    num_drop = round(0.5 * sum(source.numel for source in given))
    masks, wanted = cut.cut(given, num_drop, {}), by_definition(given, num_drop)
    assert sum(int(bits.count(mask)) for mask in masks.values()) == sum(int(mask.sum()) for mask in wanted.values())
    assert all(torch.equal(bits.unpack(masks[s.name], s.shape).cpu(), wanted[s.name]) for s in given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_refused_by_name(value):
    given = sources("magnitude")
    given[1].weight.view(-1)[5] = value
    with pytest.raises(ValueError, match="layer1"):
        by_kernel(given, 100)
    dead = torch.ones(given[1].numel, dtype=torch.bool, device=DEVICE)
    dead[5] = False
    by_kernel(given, 100, {"layer1": bits.pack(dead)})


def test_moments_of_the_smallest_numbers_are_not_taken_for_zero():
    weight = torch.rand(40, 64, device=DEVICE) + 0.5
    tiny = torch.rand(40, 64, device=DEVICE) * 1e-39  # subnormal
    given = [Lazy("a", weight, SCORES["bitter7"].of, {"weight": weight, "exp_avg_sq": tiny}, formula="bitter7")]
    assert_agrees(by_kernel(given, 1280), by_definition(given, 1280), given)


def test_what_kernels_cannot_read_is_left_to_the_definition():
    weight = torch.rand(4, 6, device=DEVICE)
    assert driver.lowered([stored("a", weight.double())]) is None
    assert driver.lowered([Lazy("a", weight, torch.abs, {"weight": weight})]) is None
    assert driver.lowered([Lazy("a", weight.T, torch.abs, {"weight": weight.T}, formula="magnitude")]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [1, 7, 8, 1024, 1025, 3001])
def test_zeroing_is_its_definition(dtype, numel):
    tensor = torch.randn(numel).to(DEVICE, dtype)
    tensor[::3] = math.nan
    keep = (torch.arange(numel) % 5 > 1).to(DEVICE)
    wanted = tensor.clone()
    bits.zero_reference_(wanted, bits.pack(keep))
    zero_(tensor, bits.pack(keep))
    assert torch.equal(tensor.nan_to_num(9.0), wanted.nan_to_num(9.0))
