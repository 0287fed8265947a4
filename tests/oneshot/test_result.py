"""Results count zeros as they are now and say what was done; searches show trials, long calls how far they are."""

import io
import sys
import types

import pytest
import torch
from probe_checks import num_zeros
from probe_models import convolutions, llama, mlp
from probe_odd import TIME, WIDTH, Skips
from torch import nn

from prunus import BlockTuning, Repair, prune, search
from prunus.oneshot import Levels, Limit, Probe
from prunus.oneshot import progress as progress_module
from prunus.oneshot.progress import progress_line
from prunus.plot import svg


@pytest.mark.parametrize("repair", ["auto", None])
def test_sparsity_is_that_of_the_model_when_it_is_read(repair):
    case = mlp(torch.float32)
    result = prune(case.model, case.batches, 0.5, repair=repair)
    pruned, masks = result.num_pruned, {name: mask.clone() for name, mask in result.masks.items()}
    assert pruned == num_zeros(result) == round(0.5 * result.num_weights)
    result.undo_()
    assert result.sparsity == result.num_pruned == 0 and all(layer.sparsity == 0 for layer in result.layers)
    assert repr(result).startswith("Result(0.0000%: 0 of ")
    assert all(torch.equal(result.masks[name], mask) for name, mask in masks.items())
    result.apply_()
    assert result.num_pruned == pruned
    optimizer = torch.optim.SGD(case.model.parameters(), 0.1)
    case.loss(case.model(case.batches[0][0]), case.batches[0][1]).backward()
    optimizer.step()
    assert result.num_pruned == num_zeros(result) < pruned
    case.model.load_state_dict({name: value + 1 for name, value in case.model.state_dict().items()}, assign=True)
    assert result.num_pruned == sum(int((p == 0).sum()) for p in case.model.parameters() if p.ndim > 1) < pruned


@pytest.mark.parametrize("options", [{}, {"score": "wanda", "repair": None}, {"repair": None}], ids=str)
def test_a_result_says_where_its_time_went_and_counts_passes_only_where_there_were_some(options):
    case = mlp(torch.float32)
    result = prune(case.model, case.batches, 0.5, **options)
    text, parts = str(result), result.cost.parts
    assert "weights in 3 layers are zero" in text and " 0 " not in text and "\n" not in repr(result)
    assert ("passes of one sample" in text) == bool(result.cost.forwards)
    assert all(f"{part} {parts[part]:.1f}" in text for part in sorted(parts, key=parts.get)[-3:])
    probed = prune(mlp(torch.float32).model, case.batches, 0.5, probe=Probe(0.5), loss=case.loss)
    assert f"passes of one sample: {probed.cost.passes:,} with gradients" in str(probed)


def tuned(model, batches, **options):
    repair = Repair(tune=BlockTuning(epochs=1, whole_epochs=1, batch=4))
    return str(prune(model, batches, 0.5, repair=repair, **options))


def test_tuning_says_by_which_loss_and_what_was_left_out():
    case, other = llama(torch.float32), llama(torch.float32)
    text = tuned(case.model, case.batches)
    assert "of 3 blocks nearer to the dense ones" in text and "took its KL divergence from" in text
    assert "not tuned" not in text
    text = tuned(other.model, case.batches, exclude="model.layers.0.*")
    assert "Blocks that were not tuned: 1 of 3, as nothing was pruned in them or before." in text
    assert "took its mean square from" in tuned(*convolutions())
    text = tuned(Skips(), [torch.randn(30, TIME, WIDTH)])
    assert "No block was tuned by itself: the model does not run as a chain of blocks." in text
    assert "Tuning the whole model" in text


@pytest.fixture
def repaired():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return prune(model, [torch.randn(40, 6)], 0.5)


def test_a_result_shows_its_layers(repaired):
    assert "\n" not in repr(repaired) and "50.0000%" in repr(repaired)
    html, chart = repaired._repr_html_(), repaired.plot()
    assert svg(chart) in html and html.count("<tr>") == 1 + len(repaired.layers)
    assert sum(len(axes.patches) for axes in chart.axes) == 3 * len(repaired.layers)
    assert all(f"{layer.error:.4f}" in html for layer in repaired.layers)


class Unreached(nn.Module):
    """One layer of six is called, and a weight is of another kind."""

    def __init__(self):
        super().__init__()
        self.own, self.layers = nn.Embedding(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x):
        return self.layers[0](x)


def test_a_result_says_which_weights_were_not_repaired_and_why(repaired):
    assert "not repaired" not in str(repaired)
    result = prune(Unreached(), [torch.randn(40, 6)], 0.5, include="own.weight")
    line, cost, others = str(result).split("\n")
    assert line == repr(result) and cost == str(result.cost) and "\n" not in repr(result)
    assert others == (
        "Pruned but not repaired, 6 of 7 layers: own.weight (it is no plain linear layer or convolution); "
        "layers.1.weight, layers.2.weight, layers.3.weight and 2 more (no sample reached it)."
    )
    assert others in result._repr_html_()
    result.undo_()
    assert "not repaired" in str(result)
    assert "not repaired" not in str(prune(Unreached(), [torch.randn(40, 6)], 0.5, score="magnitude", repair=None))


def test_a_search_shows_its_trials():
    case, metrics = mlp(), iter([1.0, 1.01, 1.02, 9.0])
    limit, steps = Limit(relative=0.1, better="lower"), Levels(0.2, 0.2, 0.8)
    found = search(case.model, case.batches, lambda _: next(metrics), limit, steps=steps, repair=None)
    assert repr(found).startswith("SearchResult(4") and len(repr(found)) < 120
    assert "metric 1.02, dense 1, at most 1.1 allowed, 3 trials" in repr(found)
    assert svg(found.plot()) in found._repr_html_() and found._repr_html_().count("<tr>") == 4


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal

    @property
    def text(self):
        return self.getvalue()


def shown(monkeypatch, progress, *, is_terminal=False, is_notebook=False):
    """What is written to standard error and standard output while three weights are pruned."""
    screens = Screen(is_terminal), Screen(False)
    monkeypatch.setattr(sys, "stderr", screens[0])
    monkeypatch.setattr(sys, "stdout", screens[1])
    monkeypatch.setattr(progress_module, "QUIET", {"bar": 0.0, "lines": 0.0})
    monkeypatch.setattr(progress_module, "PAUSE", 0.0)
    shell = type("ZMQInteractiveShell", (), {})() if is_notebook else None
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    case = mlp()
    prune(case.model, sparsity=0.5, progress=progress)
    limit, steps = Limit(relative=0.1, better="lower"), Levels(0.6, 0.2, 0.7)
    search(case.model, case.batches, lambda _: 1.0, limit, steps=steps, repair=None, progress=progress)
    return [screen.text for screen in screens]


def test_a_bar_is_shown_in_a_terminal_and_in_a_notebook_and_a_function_gets_what_it_would_show(monkeypatch):
    for options, place in [({"is_terminal": True}, 0), ({"is_notebook": True}, 1)]:
        texts = shown(monkeypatch, None, **options)
        assert texts[1 - place] == ""
        assert texts[place].count("\n") == 2 and "\rprune: [" in texts[place]
        assert "\rsearch, 60.0% (dense 1, at most 1.1 allowed): [" in texts[place]
    assert shown(monkeypatch, False, is_terminal=True) == ["", ""]
    seen = []
    assert shown(monkeypatch, lambda *args: seen.append(args), is_terminal=True) == ["", ""]
    assert seen and all(done <= total and isinstance(name, str) for done, total, name in seen)


@pytest.mark.parametrize("progress", [None, True])
def test_a_file_gets_a_line_for_every_tenth_on_standard_error(progress, monkeypatch):
    text, out = shown(monkeypatch, progress)
    assert out == "" and "\r" not in text and text.endswith("\n")
    lines = [line for line in text.splitlines() if line.startswith("prune: ")]
    assert 1 <= len(lines) <= 11 and lines[-1].startswith("prune: 100% after 0:0")
    screen = Screen(False)
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_line(progress, "prune") as report:
        for done in range(1001):
            report(done, 1000, "repair of x")
    lines = screen.text.splitlines()
    assert [line.split(" after")[0] for line in lines] == [f"prune: {10 * i}%" for i in range(11)]
    assert all(line.endswith(" left, repair of x") for line in lines[1:-1])


def test_a_line_is_as_wide_as_the_terminal_and_shows_control_characters_and_short_calls_show_nothing(monkeypatch):
    for is_terminal in (True, False):
        screen = Screen(is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        prune(mlp().model, sparsity=0.5)
        assert screen.text == ""
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    monkeypatch.setattr(progress_module, "QUIET", {"bar": 0.0, "lines": 0.0})
    monkeypatch.setenv("COLUMNS", "60")
    with progress_line(True, "prune") as report:
        report(1, 2, "x\x1b[2J")
        report(2, 2, "y" * 500)
    assert "\x1b" not in screen.text and all(len(line) < 60 for line in screen.text.replace("\r", "\n").split("\n"))


def phases(case, **options):
    """What a function is told: it never goes back, and ends with all that there is."""
    seen = []
    prune(case.model, case.batches, 0.5, progress=lambda *what: seen.append(what), **options)
    done = [num for num, _, _ in seen]
    assert done == sorted(done) and len({total for _, total, _ in seen}) == 1 and seen[-1][0] == seen[-1][1]
    return seen


def test_progress_names_every_phase_and_moves_with_every_group_and_block():
    tuned = Repair(tune=BlockTuning(epochs=2, whole_epochs=3))
    seen = phases(llama(torch.float32), repair=tuned)
    texts = [text for _, _, text in seen]
    for k in (1, 2, 3):
        assert f"passes through block {k} of 3" in texts and texts.count(f"tuning of block {k} of 3") == 3
    groups = [text for text in texts if text.startswith("repair of ")]
    assert len(groups) == 3 * 4 and len({num for num, _, _ in seen}) >= 3 * 4 + 3 * 2 + 3
    assert texts.count("tuning of the whole model") == 4 and "order of the layers" in texts
    assert "statistics of batch norms" in texts


JOINT = {"probe": Probe(schedule="joint"), "repair": Repair()}


@pytest.mark.parametrize(
    ("options", "num"), [*[({"score": x, "repair": None}, 8) for x in ("wanda", "fisher", "path")], (JOINT, 16)]
)
def test_progress_moves_with_the_samples_that_a_score_or_a_joint_probe_reads(options, num):
    case = mlp(torch.float32)
    case.batches = [(torch.randn(40, 9), torch.randint(0, 4, (40,)))]
    assert len({done for done, _, _ in phases(case, loss=case.loss, batch_size=4, **options)}) > num
