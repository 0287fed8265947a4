"""Regrowth swaps the weights that its definition says, and keeps every count of the masks exact."""

import math

import pytest
import torch
from covering import each_once
from reference import DRAWS, draw, keep_largest, keep_largest_of_runs, num_dropped, same
from torch import nn
from toys import NAMES, RAMP, Conv1D, adamw, adamw_prune, assert_pruned_are_zero, net, regrowing, sgd, train

from prunus import Constant, Global, NofM, OneShot, PerLayer, PerRow, Ramp, Regrow
from prunus.allocate import allocate
from prunus.lab.run import Run
from prunus.ops import bits
from prunus.ops.lazy import Lazy, stored
from prunus.regrow import regrown_masks
from prunus.score import REGROWTH

SELECTORS = [Global(), PerLayer(), PerLayer("depth"), PerLayer("erk"), PerRow()]


def runs_of(select, score, sparsity, dead):
    """Each group of one selector: its part of the scores as names, and how many it drops in all."""
    if isinstance(select, PerLayer):
        shapes = {name: s.shape for name, s in score.items()}
        asked = allocate(shapes, sparsity, select.allocate, at_least={n: int(d.sum()) for n, d in dead.items()})
        return [([name], max(asked[name], int(dead[name].sum()))) for name in score]
    num = sum(s.numel() for s in score.values())
    return [(list(score), max(round(sparsity * num), sum(int(d.sum()) for d in dead.values())))]


def by_definition(select, score, back, live, sparsity, share):
    """Masks by stable sorts: drop r more in each group, and take back the r largest of those dead before."""
    if isinstance(select, PerRow):
        return {name: by_rows(score[name], back[name], live[name], sparsity, share) for name in score}
    dead, found = {name: ~mask for name, mask in live.items()}, {}
    for names, num_drop in runs_of(select, score, sparsity, dead):
        total = sum(score[name].numel() for name in names)
        r = min(round(share * (total - num_drop)), sum(int(dead[name].sum()) for name in names))
        keep = keep_largest({n: score[n] for n in names}, num_drop + r, {n: live[n] for n in names})
        came = keep_largest({n: back[n] for n in names}, total - r, {n: dead[n] for n in names})
        found |= {name: keep[name] | came[name] for name in names}
    return found


def by_rows(score, back, live, sparsity, share):
    length = score[0].numel() if score.ndim > 1 else score.numel()
    num_drop = round(sparsity * length)
    pruned = (~live).reshape(-1, length).sum(1)
    r = min(round(share * (length - num_drop)), int(pruned.min())) if pruned.max() <= num_drop else 0
    keep = keep_largest_of_runs(score, length, num_drop + r, live)
    return keep | keep_largest_of_runs(back, length, length - r, ~live)


@pytest.mark.parametrize(
    ("kind", "select"),
    each_once([kind for kind in DRAWS if kind not in ("float64", "int64", "few integers")], SELECTORS),
    ids=str,
)
def test_masks_are_those_of_the_definition_for_nasty_scores(kind, select):
    score, back = (draw(kind, (7, 9), (3, 5, 2), (1, 1), (16, 24)) for _ in range(2))
    sources, ranked = ([stored(name, value) for name, value in values.items()] for values in (score, back))
    live = {name: torch.ones(s.shape, dtype=torch.bool) for name, s in score.items()}
    for sparsity, share in ((0.2, 0.4), (0.35, 0.05), (0.6, 0.4), (0.6, 0.95), (0.6, 0.05)):
        packed = {name: bits.pack(mask) for name, mask in live.items()}
        num_live = sum(int(mask.sum()) for mask in live.values())
        found, num = regrown_masks(select, sources, sparsity, (packed, num_live), share, lambda: ranked)
        masks = {name: bits.unpack(found[name], score[name].shape) for name in score}
        assert same(masks, by_definition(select, score, back, live, sparsity, share))
        assert num == sum(int((masks[name] & ~live[name]).sum()) for name in masks)
        if not isinstance(select, PerRow) and select != PerLayer():
            assert num_dropped(masks) == round(sparsity * num_live_total(score))
        live = masks


def num_live_total(score):
    return sum(s.numel() for s in score.values())


@pytest.mark.parametrize("select", SELECTORS, ids=str)
def test_masks_that_are_sparser_than_asked_keep_their_counts(select):
    score, back = draw("normal", (6, 8), (4, 10)), draw("normal", (6, 8), (4, 10))
    live = {name: torch.rand(s.shape) > 0.6 for name, s in score.items()}
    packed, before = {name: bits.pack(mask) for name, mask in live.items()}, num_dropped(live)
    sources, ranked = ([stored(name, value) for name, value in values.items()] for values in (score, back))
    found, num = regrown_masks(select, sources, 0.1, (packed, 88 - before), 0.5, lambda: ranked)
    masks = {name: bits.unpack(found[name], score[name].shape) for name in score}
    assert num_dropped(masks) == before
    assert num or isinstance(select, PerRow)
    assert same(masks, by_definition(select, score, back, live, 0.1, 0.5))


@pytest.mark.parametrize(
    ("make", "by", "select"),
    [(adamw, by, select) for by in REGROWTH for select in SELECTORS]
    + [(adamw_prune, by, select) for by in REGROWTH for select in (Global(), PerRow())]
    + [(sgd, by, select) for by in ("momentum", "gradient") for select in (Global(), PerLayer("erk"))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_event_swaps_exactly_what_the_definition_says(make, by, select):
    model = net()
    optimizer, seen = make(model), {}
    weights = {name: model.get_parameter(name) for name in NAMES}

    def look(*_):  # registered first, so that it sees what an event reads
        state = optimizer.state
        m = {n: state[p].get("exp_avg", state[p].get("momentum_buffer")) for n, p in weights.items()}
        of = {
            "snr": lambda n, p: m[n].abs() / (state[p]["exp_avg_sq"].sqrt() + 1e-8),
            "momentum": lambda n, p: m[n].abs(),
            "gradient": lambda n, p: p.grad.abs(),
        }[by]
        seen["back"] = {n: of(n, p).clone() for n, p in weights.items()}
        seen["score"] = {n: p.detach().abs().clone() for n, p in weights.items()}

    optimizer.register_step_post_hook(look)
    live, swaps = {name: torch.ones_like(p, dtype=torch.bool) for name, p in weights.items()}, []

    def check(event):
        share = 0.3 * 0.5 * (1 + math.cos(math.pi * (event.step - 2) / 16))
        expected = by_definition(select, seen["score"], seen["back"], live, event.sparsity, share)
        assert same(dict(pruner.masks), expected)
        assert event.regrown == sum(int((expected[n] & ~live[n]).sum()) for n in live)
        assert event.newly_pruned == sum(int((live[n] & ~expected[n]).sum()) for n in live)
        swaps.append(event.regrown)
        live.update(expected)

    options = {"score": "magnitude", "select": select, "regrow": Regrow(0.3, by), "on_event": check}
    pruner = regrowing(model, optimizer, **options)
    train(model, optimizer, range(20))
    assert len(swaps) == 4 and swaps[0] == swaps[-1] == 0 and all(swaps[1:-1])
    assert_pruned_are_zero(pruner)


def test_rows_of_transposed_weights_keep_their_counts():
    model = nn.Sequential(nn.Linear(8, 12), Conv1D(20, 12))
    optimizer = adamw(model)
    pruner = regrowing(model, optimizer, select=PerRow(), regrow=Regrow(0.5))
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
        if pruner.step in (6, 10):
            assert pruner.masks["0.weight"].sum(1).eq(8 - round(RAMP(step + 1) * 8)).all()
            assert pruner.masks["1.weight"].sum(0).eq(12 - round(RAMP(step + 1) * 12)).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": OneShot(0.5, at=3)}, r"Ramp.*OneShot"),
        ({"schedule": Constant(0.5)}, r"Ramp.*Constant"),
        ({"schedule": None, "masks": "zeros"}, "Ramp"),
        ({"schedule": Ramp(0.0, 1, 5)}, "above 0"),
        ({"schedule": Constant(0.5), "select": NofM(2, 4)}, "Ramp"),
    ],
    ids=str,
)
def test_what_it_cannot_go_with_is_refused_in_one_line(options, text):
    model = net()
    with pytest.raises(ValueError, match=text) as error:
        regrowing(model, adamw(model), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fraction", "by"), [(0.0, "snr"), (1.0, "snr"), (-0.1, "snr"), (0.1, "noise")])
def test_parameters_out_of_range_are_refused(fraction, by):
    with pytest.raises(ValueError, match=r"fraction|by must"):
        Regrow(fraction, by)


@pytest.mark.parametrize(("momentum", "by"), [(0.9, "snr"), (0.0, "momentum")])
def test_an_optimizer_without_what_is_read_is_refused_after_its_first_step(momentum, by):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    regrowing(model, optimizer, score="magnitude", regrow=Regrow(0.1, by))
    with pytest.raises(ValueError, match=r"exp_avg.*SGD.*gradient"):
        train(model, optimizer, [0])


def test_a_gradient_that_is_gone_at_the_event_is_named():
    model = net()
    pruner = regrowing(model, adamw(model), regrow=Regrow(0.3, "gradient"))
    train(model, pruner.optimizer, range(9))
    model.hidden.weight.grad = None
    with pytest.raises(ValueError, match=r"gradient.*hidden\.weight"):
        pruner.step = 9
        model.out.weight.grad = torch.ones(4, 13)
        pruner.optimizer.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"regrow": 1.0}, "regrow"),
        ({"regrow_by": "gradient"}, "regrow"),
        ({"regrow": 0.1, "score": "none"}, "score"),
        ({"regrow": 0.1, "schedule": "constant"}, "ramp"),
        ({"regrow": 0.1, "sparsity": 0.0}, "above 0"),
        ({"regrow": 0.1, "allocate": "2:4", "schedule": "one_shot"}, "ramp"),
        ({"regrow": 0.1, "allocate": "2:4"}, "2:4"),
        ({"regrow": 0.1, "score": "magnitude", "optimizer": "sgd"}, "second moment"),
    ],
    ids=str,
)
def test_a_run_says_what_regrowth_cannot_go_with(options, text):
    with pytest.raises(ValueError, match=text):
        Run(**options)


def test_kernels_rank_the_pruned_as_the_definitions_do():
    driver = pytest.importorskip("prunus.ops._triton.cut", reason="kernels need triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(13, 41), (5, 5, 7)]
    for row in REGROWTH.values():
        tensors = {"exp_avg": 1e-5, "exp_avg_sq": 1e-4, "grad": 1e-3}
        given = []
        for i, shape in enumerate(shapes):
            values = {n: torch.randn(shape, device=device) * scale for n, scale in tensors.items()}
            values["exp_avg_sq"] = values["exp_avg_sq"].square()
            reads = {n: values[n] for n in row.reads}
            given.append(Lazy(f"layer{i}", torch.zeros(shape, device=device), row.of, reads, formula=row.formula))
        low = driver.readable(given)
        assert low is not None
        live = {s.name: bits.pack(torch.rand(s.shape, device=device) < 0.4) for s in given}
        num_live = sum(int(bits.count(mask)) for mask in live.values())
        found = driver.launch_cut(low, [num_live - 100], [num_live], live, tile=1024).wait()
        scores = {s.name: s.all().cpu() for s in given}
        within = {name: bits.unpack(mask.cpu(), scores[name].shape) for name, mask in live.items()}
        expected = keep_largest(scores, sum(s.numel for s in given) - 100, within)
        assert sum(int(bits.count(mask)) for mask in found.values()) == 100
        if device == "cpu":
            assert same({name: bits.unpack(found[name], scores[name].shape).cpu() for name in scores}, expected)
