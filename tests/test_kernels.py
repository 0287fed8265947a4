"""Kernels compute what their definitions say: in Triton's interpreter here, compiled where there is a GPU."""

import math
from dataclasses import replace

import pytest
import torch
from covering import quickly
from reference import keep_largest

from prunus.ops import bits
from prunus.ops.lazy import Lazy, stored
from prunus.score import REGROWTH, SCORES
from prunus.threshold import cut, cut_each, num_kept_each

triton = pytest.importorskip("triton", reason="kernels need triton")

from prunus.ops._triton import address_table, candidates  # noqa: E402
from prunus.ops._triton import cut as driver  # noqa: E402
from prunus.ops._triton.packed import count_each, zero_, zero_each_  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 1024  # small, so that little data makes many tiles
SHAPES = [(37, 41), (8, 128), (3,), (5, 5, 7)]
OPTIONS = [
    *((name, {}) for name in SCORES if name not in ("bitter1", "bitter2", "bitter4")),
    *((name, {"eps": 1e-8}) for name in ("bitter0", "bitter3", "bitter5", "bitter6", "bitter7", "bitter8", "bitter9")),
    *(("fisher", {"q": q}) for q in (0, 0.25, 0.5)),
]
HALF = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
ULPS = 8  # by which another root, or fused arithmetic, may move a score


def matrix(every: list, few: list) -> list:
    """Every case where kernels are compiled; in the interpreter, which takes seconds for each, one a branch."""
    return every if DEVICE == "cuda" else few


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
        reads = {read: tensors[read] for read in score.reads if read in tensors}
        how = {"takes_position": "position" in score.reads, "formula": score.formula}
        constants = options | ({"step": 7.0} if "step" in score.reads else {})
        found.append(Lazy(f"layer{i}", tensors["weight"], score.of, reads, constants, **how))
    return found


def by_kernel(given: list[Lazy], num_drop: int, live: dict | None = None) -> dict:
    low = driver.readable(given)
    assert low is not None
    num_live = sum(num_kept_each(given, live or {}).values())
    num_dead = sum(source.numel for source in given) - num_live
    return driver.launch_cut(low, [num_drop - num_dead], [num_live], live or {}, tile=TILE).wait()


def scores_by_definition(given: list[Lazy]) -> dict:
    return {source.name: next(source.chunks(source.numel))[1].view(source.shape).cpu() for source in given}


def units_of(given: list[Lazy]) -> dict:
    """One unit in the last place of what a score is computed from: more than that of the score where terms cancel."""
    positive = [
        replace(source, reads={n: t.abs() if n in ("weight", "exp_avg") else t for n, t in source.reads.items()})
        for source in given
    ]
    return {name: scores.abs() * 2.0**-23 for name, scores in scores_by_definition(positive).items()}


def scores_by_kernel(given: list[Lazy]) -> dict:
    low = driver.readable(given)
    assert low is not None
    tiles = [-(-source.numel // TILE) * TILE for source in given]
    firsts = [sum(tiles[:i]) for i in range(len(tiles))]
    order = torch.cat([torch.arange(s.numel) + first for s, first in zip(given, firsts, strict=True)]).to(DEVICE)
    found = candidates._scores(low, low.table({}, driver.offsets_of(given), TILE), TILE, order).cpu()
    parts = found.split([source.numel for source in given])
    return {source.name: part.view(source.shape) for source, part in zip(given, parts, strict=True)}


def sorted_scores(given: list[Lazy]) -> dict:
    """What masks are compared with: in the interpreter the kernels' own scores, since a root may round differently."""
    is_rounded = any(source.of is not SCORES["magnitude"].of for source in given)
    return scores_by_kernel(given) if DEVICE == "cpu" and is_rounded else scores_by_definition(given)


def by_definition(given: list[Lazy], num_drop: int, live: dict | None = None) -> dict:
    scores = sorted_scores(given)
    within = {name: bits.unpack(mask.cpu(), scores[name].shape) for name, mask in (live or {}).items()}
    return keep_largest(scores, num_drop, within)


def assert_agrees(masks: dict, wanted: dict, given: list[Lazy], live: dict | None = None) -> None:
    """Equal, but where compiled: there scores within a few units in the last place of the threshold may differ."""
    scores = scores_by_definition(given)
    found = {source.name: bits.unpack(masks[source.name], source.shape).cpu() for source in given}
    if DEVICE == "cpu":
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    alive = {n: bits.unpack(m.cpu(), scores[n].shape) for n, m in (live or {}).items()}
    dropped = [scores[n][~wanted[n] & alive.get(n, torch.tensor(True))] for n in found]
    assert_near(found, wanted, scores, torch.cat(dropped), units_of(given))


def assert_near(found: dict, wanted: dict, scores: dict, dropped: torch.Tensor, units: dict) -> None:
    """As many are kept, and those that differ have scores next to the largest that is dropped."""
    assert sum(int(mask.sum()) for mask in found.values()) == sum(int(mask.sum()) for mask in wanted.values())
    for name in found:
        where = found[name] != wanted[name]
        if where.any():
            assert ((scores[name][where] - dropped.max()).abs() <= ULPS * units[name][where]).all()


@pytest.mark.rounding
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_formula_is_its_definition(name, options):
    """Every row of SCORES has a formula, so that none is slow without anybody noticing."""
    given = sources(name, [(37, 41), (5, 5, 7)], **options)
    found, wanted, units = scores_by_kernel(given), scores_by_definition(given), units_of(given)
    assert all(((found[layer] - wanted[layer]).abs() <= ULPS * units[layer]).all() for layer in wanted)


@pytest.mark.gpu
def test_roots_are_rounded_correctly():
    words = torch.randint(0, 0x7F800000, (1 << 22,), dtype=torch.int32, device=DEVICE)
    v = torch.cat([words.view(torch.float32), torch.tensor([0.0, 1e-45, 1.0, 3e38], device=DEVICE)])
    reads = {"weight": torch.ones_like(v), "exp_avg_sq": v}
    row = SCORES["fisher"]
    given = [Lazy("a", reads["weight"], row.of, reads, {"step": math.inf, "q": 0.5}, formula=row.formula)]
    low = driver.readable(given)
    order = torch.arange(len(v), device=DEVICE)
    found = candidates._scores(low, low.table({}, driver.offsets_of(given), TILE), TILE, order)
    assert torch.equal(found, v.sqrt())


def test_every_score_has_a_formula():
    for name, row in (SCORES | REGROWTH).items():
        assert row.formula is not None, f"kernels cannot compute {name}"


@pytest.mark.rounding
@pytest.mark.parametrize(("name", "options"), matrix(OPTIONS, [("bitter7", {}), ("random", {})]), ids=str)
def test_every_score_is_cut_as_its_definition_says(name, options):
    given = sources(name, **options)
    num_drop = round(0.6 * sum(source.numel for source in given))
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


@pytest.mark.parametrize("types", matrix(HALF, HALF[1:]), ids=str)
@pytest.mark.parametrize("name", matrix(["magnitude", "bitter7", "bitter5"], ["bitter5"]))
def test_half_precision_ties_in_bulk_and_is_cut_exactly(name, types):
    given = sources(name, [(64, 100), (33, 7)], *types)
    for num_drop in matrix([1, 3200, 6000], [3200]):
        assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


def by_definition_packed(given: list[Lazy], num_drop: int) -> dict:
    return {name: bits.pack(mask).to(DEVICE) for name, mask in by_definition(given, num_drop).items()}


SECOND = [("bitter7", 0.005, sparsity) for sparsity in (0.3, 0.01, 0.97)]


@pytest.mark.parametrize("is_missed", [False, True], ids=["by one pass", "by descent"])
@pytest.mark.parametrize(("name", "first", "second"), [*matrix(SECOND, SECOND[:1]), ("bitter5", 0.4, 0.7)])
def test_a_second_cut_stays_within_the_first_and_revives_nothing(name, first, second, is_missed, monkeypatch):
    if is_missed:
        monkeypatch.setattr(driver, "SIGMAS", -40.0)
    given = sources(name, SHAPES, *(HALF[1] if name == "bitter5" else ()))  # signed scores, which tie
    total = sum(source.numel for source in given)
    live = by_definition_packed(given, round(first * total))
    masks = by_kernel(given, round(second * total), live)
    assert all(bool((masks[name] & ~live[name] == 0).all()) for name in live)
    assert_agrees(masks, by_definition(given, round(second * total), live), given, live)


@pytest.fixture
def descents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of keys that descents were asked for."""
    asked, original = [], driver.by_descent

    def by_descent(task, lo, hi):
        asked.append((lo, hi))
        return original(task, lo, hi)

    monkeypatch.setattr(driver, "by_descent", by_descent)
    return asked


def magnitudes(values: torch.Tensor) -> list[Lazy]:
    scores = values.to(DEVICE).view(-1, 100)
    return [Lazy("a", scores, SCORES["magnitude"].of, {"weight": scores}, formula=SCORES["magnitude"].formula)]


TIES = [[0.0], [1.0, 2.0, 3.0], [0.0, 1.0], [1e-39, 1e-38, 3e38]]


@pytest.mark.parametrize("values", matrix(TIES, TIES[1:2]), ids=str)
@pytest.mark.parametrize("num_drop", matrix([1, 2999, 3000, 5999], [2999]))
def test_bulk_ties_are_cut_by_position(values, num_drop):
    given = magnitudes(torch.tensor(values).repeat(6000 // len(values)))
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)


DRAWS = torch.Generator().manual_seed(0)
MIXED = torch.cat([torch.rand(3000, generator=DRAWS), torch.full((2500,), 0.5)])
ABOVE = torch.rand(3000, generator=DRAWS) * 1e-3 + 0.5
SHUFFLED = torch.cat([MIXED, ABOVE])[torch.randperm(8500, generator=DRAWS)]
CROWDS = {  # half width of the bracket, room for the cut's own bucket, scores, how many go, width of a descent
    "ties in a narrow bracket": (4.0, 1 << 14, torch.zeros(6000), 2999, None),
    "more ties than are compared with each other": (60.0, 1 << 14, SHUFFLED, int((SHUFFLED < 0.5).sum()) + 1200, None),
    "ties that the lists do not hold": (0.5, 1 << 12, torch.zeros(65000), 20001, 1 << 11),
    "an own bucket without room": (60.0, 512, MIXED, 3000, 1 << 20),
}


@pytest.mark.parametrize("crowd", quickly(CROWDS, "an own bucket without room"))
def test_crowds_are_ranked_or_descended_into_without_another_pass(crowd, descents, monkeypatch):
    sigmas, room, values, num_drop, width = CROWDS[crowd]
    monkeypatch.setattr(driver, "SIGMAS", sigmas)
    monkeypatch.setattr(driver, "LEAST_OWN", room)
    given = magnitudes(values)
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)
    assert len(descents) == (width is not None) and all(hi - lo < width for lo, hi in descents)


@pytest.mark.parametrize("name", matrix(["magnitude", "bitter5", "random"], ["bitter5"]))
@pytest.mark.parametrize("sparsity", matrix([0.001, 0.5, 0.999], [0.5]))
def test_a_bracket_that_missed_is_followed_by_a_whole_descent(name, sparsity, descents, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", -40.0)
    given = sources(name)
    num_drop = max(1, round(sparsity * sum(source.numel for source in given)))
    assert_agrees(by_kernel(given, num_drop), by_definition(given, num_drop), given)
    assert descents[-1] == (driver.LOWEST, driver.HIGHEST)


def test_a_descent_in_a_range_that_lacks_the_cut_widens(descents):
    given = sources("magnitude")
    low = driver.readable(given)
    pending = driver.launch_cut(low, [1000], [sum(source.numel for source in given)], {}, tile=TILE)
    assert_agrees(driver.by_descent(pending.cut, 5, 70).wait(), by_definition(given, 1000), given)
    assert len(descents) == 2


def test_bits_of_many_masks_are_counted_by_one_launch():
    keeps = [torch.rand(numel) < 0.4 for numel in (1, 1024, 3001, 8, 0, 77)]
    masks = [bits.pack(keep).to(DEVICE) for keep in keeps]
    found = count_each(masks, [len(keep) for keep in keeps], tile=TILE)
    assert found == [int(keep.sum()) for keep in keeps]


EACH = {
    "all by one pass": (4.5, 1 << 12),
    "brackets that missed": (-40.0, 1 << 12),
    "own buckets without room": (60.0, 2),
}


@pytest.mark.parametrize("sigmas, least", EACH.values(), ids=EACH)
def test_one_launch_cuts_each_of_many_weights(sigmas, least, monkeypatch):
    monkeypatch.setattr(driver, "SIGMAS", sigmas)
    monkeypatch.setattr(driver, "LEAST_OWN", least)
    given = sources("bitter7")
    given[1].weight.fill_(0.5)
    given[1].reads["exp_avg_sq"].fill_(1.0)  # all equal
    live = {"layer0": by_definition_packed(given[:1], 300)["layer0"]}
    num_live = [1217, *(source.numel for source in given[1:])]
    num_drop = [max(1, number // 2) for number in num_live]
    low = driver.readable(given)
    masks = driver.launch_cut(low, num_drop, num_live, live, tile=TILE).wait()
    for source, drop, number in zip(given, num_drop, num_live, strict=True):
        within = {name: mask for name, mask in live.items() if name == source.name}
        wanted = by_definition([source], drop + source.numel - number, within)
        assert_agrees({source.name: masks[source.name]}, wanted, [source], within)


@pytest.mark.parametrize(
    "shapes", [[(2048, 2048)] * 12, [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12, [(9, 7), (4096, 4096)]]
)
def test_every_list_of_the_pass_has_room_for_what_its_program_reads(monkeypatch, shapes):
    """One list that is too short sends every weight to a descent of its own."""
    monkeypatch.undo()  # samples as they are drawn
    monkeypatch.setattr(address_table, "num_multiprocessors", lambda device: 132)
    weights = [torch.empty(shape) for shape in shapes]
    row = SCORES["magnitude"]
    low = driver.readable(
        [Lazy(f"{i}", weight, row.of, {"weight": weight}, formula=row.formula) for i, weight in enumerate(weights)]
    )
    num_live, offsets = [weight.numel() for weight in weights], driver.offsets_of(low.sources)
    table = low.table({}, offsets, address_table.TILE)
    cut = driver.Cut(low, [n // 2 for n in num_live], num_live, table, torch.empty(0), offsets, address_table.TILE)
    sizes, programs = driver.sizes_of(cut), table.num_programs
    tiles = [-(-n // cut.tile) for n in num_live]
    inside = [driver._num_inside(n, 0.5, max(1.0, sizes.lanes * n / cut.tile)) for n in num_live]
    by_tile = [num / of for num, of in zip(inside, tiles, strict=True) for _ in range(of)]
    fullest = max(sum(by_tile[program::programs]) for program in range(programs))
    assert sizes.capacity >= min(fullest + 6 * fullest**0.5, -(-len(by_tile) // programs) * cut.tile // 8)
    assert all(room >= num for room, num in zip(sizes.rooms, inside, strict=True))
    assert sizes.capacity <= 2 * fullest + 256  # and not much more


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bitter7", "magnitude"])
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_every_route_on_a_gpu_keeps_the_right_number_and_the_largest(name, types):
    given = sources(name, [(3000, 1001), (512, 512), (7, 3), (64, 40)], *types)
    num_drop = round(0.5 * sum(source.numel for source in given))
    assert_agrees(cut(given, num_drop, {}), by_definition(given, num_drop), given)
    each = {source.name: source.numel // 3 for source in given}
    masks = cut_each(given, each, {}, {source.name: source.numel for source in given})
    for source in given:
        assert_agrees({source.name: masks[source.name]}, by_definition([source], each[source.name]), [source])


@pytest.mark.parametrize("value", matrix([math.nan, math.inf], [math.nan]))
def test_a_score_that_is_not_finite_is_refused_by_name(value):
    given = sources("magnitude")
    given[1].weight.view(-1)[5] = value
    with pytest.raises(ValueError, match="layer1"):
        by_kernel(given, 100)
    numels = [source.numel for source in given]
    with pytest.raises(ValueError, match="layer1"):  # of each, too
        driver.launch_cut(driver.readable(given), [1] * len(given), numels, {}, tile=TILE).wait()
    dead = torch.ones(given[1].numel, dtype=torch.bool, device=DEVICE)
    dead[5] = False
    by_kernel(given, 100, {"layer1": bits.pack(dead)})


def test_moments_of_the_smallest_numbers_are_not_taken_for_zero():
    weight = torch.rand(40, 64, device=DEVICE) + 0.5
    tiny = torch.rand(40, 64, device=DEVICE) * 1e-39  # subnormal
    row, reads = SCORES["bitter7"], {"weight": weight, "exp_avg_sq": tiny}
    given = [Lazy("a", weight, row.of, reads, formula=row.formula)]
    assert_agrees(by_kernel(given, 1280), by_definition(given, 1280), given)


def test_what_kernels_cannot_read_is_left_to_the_definition():
    weight = torch.rand(4, 6, device=DEVICE)
    assert driver.readable([stored("a", weight.double())]) is None
    assert driver.readable([Lazy("a", weight, torch.abs, {"weight": weight})]) is None
    row = SCORES["magnitude"]
    assert driver.readable([Lazy("a", weight.T, row.of, {"weight": weight.T}, formula=row.formula)]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", matrix([1, 7, 8, 2048, 2049, 6001], [7, 2049]))
def test_zeroing_is_its_definition(dtype, numel):
    tensor = torch.randn(numel).to(DEVICE, dtype)
    tensor[::3] = math.nan
    keep = (torch.arange(numel) % 5 > 1).to(DEVICE)
    wanted = tensor.clone()
    bits.zero_reference_(wanted, bits.pack(keep))
    zero_(bits.words_of(tensor), bits.pack(keep))
    assert torch.equal(tensor.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("tile", [TILE, 4 * TILE])
def test_zeroing_many_tensors_at_once_is_zeroing_each(tile, dtype):
    tensors = [torch.randn(numel).mul(9).to(DEVICE, dtype) for numel in (1, 1023, 1024, 2 * TILE, 2500, 9)]
    tensors.append(tensors[4].clone()[8:])  # its address is not a multiple of 16 in every type
    masks = [bits.pack((torch.arange(t.numel()) * 7 % 5 > 1).to(DEVICE)) for t in tensors]
    wanted = [tensor.clone() for tensor in tensors]
    for tensor, mask in zip(wanted, masks, strict=True):
        bits.zero_reference_(tensor, mask)
    zero_each_([*zip(tensors, masks, strict=True)], tile)
    assert all(map(torch.equal, tensors, wanted))
