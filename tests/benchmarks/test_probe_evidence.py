"""The study of the probe: equal sparsity in every comparison, runs that go on, a page that follows from them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import probe_study
from benchmarks.__main__ import main
from benchmarks.probe import ProbeFigures, counted, outcome_table, parts, read_figures
from benchmarks.probe_study import (
    MODELS,
    Evaluated,
    ProbedStrategy,
    exactly,
    load_model,
    masks_of,
    pruned_by,
    replaced_veto,
    share_beyond,
    vetoed_by_lot,
)
from prunus import Global, PerLayer, PerRow
from prunus.lab.data.datasets import read_cifar10
from prunus.oneshot import Probe
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.options import Method
from prunus.oneshot.probe.prober import is_allowed
from prunus.oneshot.prune import prune_to
from prunus.oneshot.scoring import Scores
from prunus.ops import bits


@pytest.fixture
def scores_by():
    """WANDA's scores of a small model, by selector."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 14), torch.nn.Tanh(), torch.nn.Linear(14, 7, bias=False))
    calibration = Calibration(model, [(torch.randn(6, 9), torch.randint(0, 7, (6,)))])
    with calibration.open():
        yield lambda select: Scores(calibration, Method("wanda", select, loss=torch.nn.functional.cross_entropy))


def probed(scores, sparsity, probe=None):
    """A level that was taken back."""
    level = prune_to(scores, sparsity, probe)
    level.undo_()
    scores.changed()
    return level


def num_pruned(masks):
    return sum(int((~mask).sum()) for mask in masks.values())


@pytest.mark.parametrize("select", [Global(), PerLayer(), PerRow()], ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.013, 0.31, 0.5, 0.777, 0.99])
def test_the_strategy_alone_is_exactly_as_sparse_as_asked_and_keeps_its_order(scores_by, select, sparsity):
    strategy = scores_by(select)
    masks = exactly(strategy, sparsity, torch.Generator().manual_seed(0))
    assert num_pruned(masks) == round(sparsity * sum(mask.numel() for mask in masks.values()))
    for source in strategy.sources(select, sparsity, {}):
        units = (source.all(), masks[source.name])
        rows = isinstance(select, PerRow)
        for scores, mask in zip(*(units if rows else [[unit.flatten()] for unit in units]), strict=True):
            if mask.any() and not mask.all():
                assert scores[~mask].max() <= scores[mask].min()
            if not isinstance(select, Global):
                assert abs(int((~mask).sum()) - sparsity * len(mask)) <= 1


@pytest.mark.parametrize("select", [Global(), PerLayer(), PerRow()], ids=str)
@pytest.mark.parametrize("tau", [0.0, 0.05, 100.0])
def test_a_veto_with_replacements_takes_what_is_within_tau_first_and_the_lowest_scores_of_it(scores_by, select, tau):
    strategy = scores_by(select)
    result = probed(strategy, 0.5, Probe("target", schedule="joint", pool=0.7))
    sources = strategy.sources(select, 0.5, {})
    masks = replaced_veto(result, sources, tau, select, 0.5)
    assert num_pruned(masks) == num_pruned(masks_of(probed(strategy, 0.5)))
    if isinstance(select, Global):
        where = {s.name: bits.unpack(result.candidates[s.name], s.shape) for s in sources}
        passes = torch.cat([is_allowed(result.ratios[s.name].q, tau) for s in sources])
        scores = torch.cat([s.all()[where[s.name]] for s in sources])
        pruned = torch.cat([~masks[s.name][where[s.name]] for s in sources])
        num = min(int(passes.sum()), num_pruned(masks))
        assert int((pruned & passes).sum()) == num
        assert share_beyond(result, masks, tau) == pytest.approx(1 - num / num_pruned(masks))
        for part in (passes, ~passes):
            if (pruned & part).any() and (~pruned & part).any():
                assert scores[pruned & part].max() <= scores[~pruned & part].min()


def test_a_veto_by_lot_keeps_as_many_candidates_of_each_weight_as_the_probe_and_others_than_it(scores_by):
    level = probed(scores_by(PerRow()), 0.6, Probe(0.05, schedule="sequential"))
    masks, own = vetoed_by_lot(level, torch.Generator().manual_seed(0)), masks_of(level)
    for name, mask in own.items():
        assert int((~masks[name]).sum()) == int((~mask).sum())
        assert masks[name][~bits.unpack(level.candidates[name], mask.shape)].all()
    assert any((masks[name] != mask).any() for name, mask in own.items())


def test_masks_are_taken_back_bit_for_bit(scores_by):
    scores = scores_by(PerRow())
    before = {name: weight.parameter.clone() for name, weight in scores.weights.items()}
    with pruned_by(scores, {name: torch.zeros_like(value).bool() for name, value in before.items()}) as sparsity:
        assert sparsity == 1.0
        assert not any(weight.parameter.any() for weight in scores.weights.values())
    assert all(torch.equal(weight.parameter, before[name]) for name, weight in scores.weights.items())


@pytest.fixture(scope="module")
def data(small_llama) -> Path:
    """The folder of a tiny Llama under the name of stories15M; beside it the figures of two seeds."""
    run(small_llama.parent, "--seeds", 0, 1)
    return small_llama.parent


def run(data, *args, results="results"):
    options = ["--data", data, "--results", data.parent / results, "--small", "--models", "stories15M", *args]
    main([str(arg) for arg in ["evidence", "run", *options]])


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_an_interrupted_run_continues_and_ends_as_an_uninterrupted_one(data, monkeypatch):
    calls, real = [], ProbedStrategy.rows

    def broken(self, step):
        calls.append(step)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(self, step)

    monkeypatch.setattr(ProbedStrategy, "rows", broken)
    with pytest.raises(SystemExit):
        run(data, "--seeds", 1, results="broken")
    (path,) = (data.parent / "broken").glob("*.json")
    whole = rows_of(data.parent / "results" / path.name)
    assert 0 < len(rows_of(path)) < len(whole)
    run(data, "--seeds", 1, results="broken")
    assert len(calls) == 1 + len(json.loads(path.read_text())["done"])
    assert rows_of(path) == whole
    monkeypatch.setattr(probe_study, "ProbedStrategy", None)
    run(data, "--seeds", 1, results="broken")  # all is done: no model is touched


@pytest.mark.slow
def test_every_comparison_is_between_equally_sparse_models_and_the_page_shows_each(data):
    (case,) = read_figures(data.parent / "results")
    text = parts([case])["models"]
    ways = {(way, tau) for _, _, way, tau in case.rows}
    assert ways == {("alone", None), ("target", None), *((w, 1.0) for w in ("exact", *BESIDE))}
    assert len(case.rows) == 2 + 4 * 6 + 2  # dense and random; four strategies; fisher and path
    for (strategy, level, way, tau), by_seed in case.rows.items():
        rows = list(by_seed.values())
        assert len(rows) == 2
        if way == "probed":
            assert all(0 < row.sparsity < level for row in rows)
            for other in BESIDE[1:]:
                others = case.rows[strategy, level, other, tau].values()
                assert [row.sparsity for row in others] == [row.sparsity for row in rows]
        if way in ("exact", "target"):
            alone = case.rows[strategy, level, "alone", None].values()
            assert [row.sparsity for row in rows] == [row.sparsity for row in alone]
        assert case.number(case.mean((strategy, level, way, tau))) in text


BESIDE = ("probed", "alone, as sparse", "by lot")


@pytest.mark.slow
def test_models_that_are_not_equally_sparse_and_unfinished_files_make_no_page(data, tmp_path):
    source = sorted((data.parent / "results").glob("*.json"))[0]
    content = json.loads(source.read_text())
    path = tmp_path / source.name
    next(row for row in content["rows"] if row["way"] == "alone, as sparse")["sparsity"] += 1e-3
    path.write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match="not equally sparse"):
        read_figures(tmp_path)
    content["done"].popitem()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="complete"):
        read_figures(tmp_path)


def test_images_are_normalised_drawn_by_the_seed_and_counted(small_images, tmp_path):
    folder = Path(small_images[-1]).rename(tmp_path / "ResNet-20")
    first, second = (load_model(MODELS[2].small(), tmp_path, seed, torch.device("cpu")) for seed in (0, 1))
    inputs, _ = first.batches[0]
    assert inputs.shape == (4, 3, 32, 32) and not torch.equal(inputs, second.batches[0][0])
    train, test = read_cifar10(folder)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    pixels, unseen = ((torch.from_numpy(part.pixels).float() / 255 - mean) / std for part in (train, test))
    assert all(any(torch.allclose(image, one, atol=1e-4) for one in pixels) for image in inputs)
    right = (first.model(unseen[:4]).argmax(1) == torch.from_numpy(test.labels[:4])).float().mean()
    assert first.evaluate(first.model) == pytest.approx(float(right))


def figures(metric, dense, probed, alone):
    settings = {"case": "toy", "schedule": "block", "levels": [0.5], "taus": [1.0]}
    rows = {("random", 0.0, "alone", None): [dense] * 3}
    names = [*probe_study.STRATEGIES, *probe_study.UNPROBED]
    rows |= {(name, 0.5, "alone", None): alone for name in names}
    for name in probe_study.STRATEGIES:
        for way, tau in (("exact", 1.0), ("target", None), ("probed", 1.0)):
            rows[name, 0.5, way, tau] = probed
        rows[name, 0.5, "alone, as sparse", 1.0] = rows[name, 0.5, "by lot", 1.0] = alone
    rows = {
        key: {seed: Evaluated(*key, 0.5, value) for seed, value in enumerate(values)} for key, values in rows.items()
    }
    return ProbeFigures([{"settings": settings, "metric": metric}] * 3, rows)


@pytest.mark.parametrize(
    "metric, probed, alone, outcome",
    [
        ("perplexity", [9.0, 9.1, 9.2], [10.0, 10.1, 10.0], "better"),
        ("perplexity", [11.0, 11.1, 11.2], [10.0, 10.1, 10.0], "worse"),
        ("perplexity", [11.0, 9.9, 10.2], [10.0, 10.1, 10.0], "unclear"),
        ("perplexity", [9.999, 9.0, 9.999], [10.0, 10.0, 10.0], "unclear"),  # one seed carries it
        ("accuracy", [0.9, 0.91, 0.92], [0.88, 0.88, 0.89], "better"),
        ("accuracy", [0.8, 0.81, 0.82], [0.88, 0.88, 0.89], "worse"),
    ],
)
def test_outcomes_follow_from_the_figures_and_are_counted(metric, probed, alone, outcome):
    case = figures(metric, 8.0 if metric == "perplexity" else 0.92, probed, alone)
    assert {each.outcome for each in case.against("probed")} == {outcome}
    assert {each.outcome for each in case.against("target")} == {outcome}
    assert counted(case.against("probed")) == [str(4 * (outcome == name)) for name in ("better", "worse")] + ["4"]


def test_ruined_models_are_set_apart_and_what_is_no_number_is_not_compared():
    case = figures("perplexity", 8.0, [100.0] * 3, [200.0] * 3)
    assert not any(each.usable for each in case.against("probed"))
    assert "| toy | as it is defined | 0 | 0 | 0 | 4 | 0 | 4 |" in outcome_table([case])
    broken = figures("perplexity", 8.0, [9.0, None, 9.0], [10.0] * 3)
    assert broken.against("probed") == []
    assert math.isinf(broken.mean(("WANDA, row", 0.5, "probed", 1.0)))


@pytest.mark.slow
def test_seeds_that_were_interrupted_are_named_and_one_seed_alone_decides_nothing(data, tmp_path):
    sources = sorted((data.parent / "results").glob("*.json"))
    for source in sources:
        content = json.loads(source.read_text()) | {"note": "The wind was strong."}
        if source is sources[-1]:
            content["done"].popitem()
            content["rows"] = [row for row in content["rows"] if row["strategy"] != "path, global"]
        (tmp_path / source.name).write_text(json.dumps(content))
    (case,) = read_figures(tmp_path)
    text = parts([case])["models"]
    assert "**The runs of seeds 1 were interrupted.**" in text and text.count("The wind was strong.") == 1
    (line,) = [line for line in text.splitlines() if line.startswith("| path, global |")]
    assert "(n = 1)" in line and "±" not in line
    alone = {key: {0: rows[0]} for key, rows in case.rows.items()}
    assert {each.outcome for each in replace(case, rows=alone).against("exact")} == {"unclear"}


def test_missing_data_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evidence", "run", "--data", str(tmp_path), "--results", str(tmp_path / "r")])
    assert stop.value.code == 2
    assert "no folder stories15M" in capsys.readouterr().err
