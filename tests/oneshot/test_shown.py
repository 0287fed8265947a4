"""Results and searches show themselves in a line, in a notebook and in a chart; long calls say how far they are."""

import sys
import types

import pytest
import torch
from probe_models import mlp
from torch import nn

from prunus import Levels, Limit, SearchOptions, prune, search
from prunus.oneshot import progress as progress_module
from prunus.oneshot.progress import progress_line


@pytest.fixture
def repaired():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return prune(model, [torch.randn(40, 6)], 0.5)


def test_a_result_shows_its_layers(repaired):
    assert "\n" not in repr(repaired) and "50.0000%" in repr(repaired)
    html, chart = repaired._repr_html_(), repaired.plot()
    assert chart.svg in html and html.count("<tr>") == 1 + len(repaired.layers)
    assert chart.svg.count("<rect") == 3 * len(repaired.layers)
    assert all(f"{layer.error:.4f}" in html for layer in repaired.layers)


class Unreached(nn.Module):
    """One layer of six is called, and a weight is of another kind."""

    def __init__(self):
        super().__init__()
        self.own, self.layers = nn.Embedding(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x):
        return self.layers[0](x)


def test_a_result_says_which_weights_were_not_repaired_and_why(repaired):
    assert str(repaired) == repr(repaired)
    result = prune(Unreached(), [torch.randn(40, 6)], 0.5, include="own.weight")
    line, others = str(result).split("\n")
    assert line == repr(result) and "\n" not in repr(result)
    assert others == (
        "not repaired, 6 of 7 weights: own.weight (it is no plain linear layer or convolution); "
        "layers.1.weight, layers.2.weight, layers.3.weight and 2 more (no sample reached it)"
    )
    assert others in result._repr_html_()
    result.undo_()
    assert "not repaired" in str(result)
    assert "not repaired" not in str(prune(Unreached(), [torch.randn(40, 6)], 0.5, "magnitude", repair=None))


def test_a_search_shows_its_trials():
    case, metrics = mlp(), iter([1.0, 1.01, 1.02, 9.0])
    options = SearchOptions(steps=Levels(0.2, 0.2, 0.8), compare=False)
    found = search(
        case.model, case.batches, lambda model: next(metrics), Limit(relative=0.1, better="lower"), options=options
    )
    assert repr(found).startswith("Found(4") and "metric 1.02, dense 1, at most 1.1 allowed, 3 trials" in repr(found)
    assert len(repr(found)) < 120 and found.plot().svg.count("<circle") == 3
    assert found.plot().svg in found._repr_html_() and found._repr_html_().count("<tr>") == 4


class Screen:
    def __init__(self, is_terminal):
        self.text, self.isatty = "", lambda: is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def shown(monkeypatch, progress, *, is_terminal=False, is_notebook=False):
    """What is written to standard error and standard output while three weights are pruned."""
    screens = Screen(is_terminal), Screen(False)
    monkeypatch.setattr(sys, "stderr", screens[0])
    monkeypatch.setattr(sys, "stdout", screens[1])
    monkeypatch.setattr(progress_module, "QUIET", 0.0)
    monkeypatch.setattr(progress_module, "PAUSE", 0.0)
    shell = type("ZMQInteractiveShell", (), {})() if is_notebook else None
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    case = mlp()
    prune(case.model, sparsity=0.5, progress=progress)
    options = SearchOptions(steps=Levels(0.6, 0.2, 0.7), compare=False, progress=progress)
    search(
        case.model,
        case.batches,
        lambda model: 1.0,
        Limit(relative=0.1, better="lower"),
        loss=case.loss,
        options=options,
    )
    return [screen.text for screen in screens]


def test_progress_is_shown_in_a_terminal_and_in_a_notebook_and_nowhere_else(monkeypatch):
    for options, place in [({"is_terminal": True}, 0), ({"is_notebook": True}, 1)]:
        texts = shown(monkeypatch, None, **options)
        assert texts[1 - place] == ""
        assert texts[place].count("\n") == 2 and "\rprune: " in texts[place] and "\rsearch, 60.0%: " in texts[place]
    assert shown(monkeypatch, None) == ["", ""]
    assert shown(monkeypatch, False, is_terminal=True) == ["", ""]
    assert "of 3 weights" in shown(monkeypatch, True)[0] or "weights" in shown(monkeypatch, True)[0]


def test_a_function_gets_what_a_line_would_show(monkeypatch):
    seen = []
    assert shown(monkeypatch, lambda *args: seen.append(args), is_terminal=True) == ["", ""]
    assert seen and all(done <= total and isinstance(name, str) for done, total, name in seen)


def test_a_line_is_as_wide_as_the_terminal_and_shows_control_characters(monkeypatch):
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_module, "QUIET", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    with progress_line(True, "prune") as report:
        report(1, 2, "x\x1b[2J")
        report(2, 2, "y" * 500)
    assert "\x1b" not in screen.text and all(len(line) < 60 for line in screen.text.replace("\r", "\n").split("\n"))


def test_short_calls_show_no_line(monkeypatch):
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    prune(mlp().model, sparsity=0.5)
    assert screen.text == ""


def test_a_number_that_is_no_fraction_is_answered_with_one():
    with pytest.raises(ValueError, match=r"as 0\.5 for a half, got 50"):
        prune(mlp().model, sparsity=50)
