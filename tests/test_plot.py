"""Charts show the numbers, escape what they quote, and are written as SVG or PNG, or refused in one line."""

from xml.etree import ElementTree

import pytest

from prunus import plot
from prunus.export.card import CardFacts, write_card
from prunus.plot import layers_chart, layers_svg, notebook_html, recovery_chart, save, svg, trials_chart
from prunus.recovery import Figures, Point, Recovery

EVIL = '</title><script>$x$ alert("&")</script>'
LAYERS = [
    {"name": "block.0.weight", "sparsity": 0.25, "mask_error": 0.2, "error": 0.1},
    {"name": EVIL, "sparsity": 0.5, "mask_error": None, "error": None, "dense": EVIL},
    {"name": "block.1.weight", "sparsity": 1.0, "mask_error": float("nan"), "error": float("inf")},
]


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_bars_are_as_high_as_the_sparsity_and_the_errors():
    above, below = layers_chart(LAYERS).axes
    assert heights(above) == [0.25, 0.5, 1.0] and heights(below) == [0.2, 0.1]
    assert [bar.get_center()[0] for bar in below.patches] == pytest.approx([0, 0])  # under the sparsity of its layer


def test_the_chart_of_a_shrunk_model_says_which_units_went():
    rows = [row | {"kind": kind} for row, kind in zip(LAYERS, ("neurons", "heads", EVIL), strict=True)]
    above, below = layers_chart(rows).axes
    assert above.get_title("left") == "neurons and head groups removed from each layer"
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["old values", "solved anew"]


@pytest.mark.parametrize("num", [0, 1, 300])
def test_any_number_of_layers_makes_a_chart(num):
    (axes,) = layers_chart([{"name": f"layers.{i}.weight", "sparsity": i / 300} for i in range(num)]).axes
    assert heights(axes) == [i / 300 for i in range(num)] and len(axes.get_xticks()) == num


def test_a_name_is_shown_as_it_is_written_and_escaped():
    html = notebook_html(EVIL, lambda: layers_chart(LAYERS), [EVIL], [[EVIL]])
    assert "<script>" not in html and html.count("&lt;script&gt;") == 3
    layers = [{"name": "<a&$b$>", "sparsity": 0.5}]
    assert "<a&$b$>" in [text.text for text in ElementTree.fromstring(layers_svg(layers)).iter() if text.text]


def test_long_tables_are_folded():
    for num, tag in [(12, "<details open>"), (13, "<details>")]:
        assert tag in notebook_html("", lambda: layers_chart([]), ["x"], [["1"]] * num)


def test_a_search_is_points_over_sparsity_and_a_line_for_the_dense_model():
    (axes,) = trials_chart([(0.1, 4.0, True), (0.3, 5.0, False), (0.5, float("nan"), False)], 3.5).axes
    dense, *points = axes.lines
    assert set(dense.get_ydata()) == {3.5}
    assert [[*zip(*line.get_data(), strict=True)] for line in points] == [[(0.1, 4.0)], [(0.3, 5.0)]]
    assert svg(trials_chart([], 0.0))


NAN = float("nan")


def recovery(metric: str, teacher: Figures | None = None, curve: list[Point] | None = None) -> Recovery:
    """Of a model that is judged by this metric; the second of three points is not finite."""

    def figures(kl: float) -> Figures:
        return Figures(kl, None if metric == "kl" else kl, 1 - kl if metric == "accuracy" else None)

    measured = [(0, figures(0.5)), (512, figures(NAN)), (1024, figures(0.25))]
    known = [Point(tokens // 256, tokens, one.kl, one.loss, one.accuracy) for tokens, one in measured]
    models = figures(0.5), figures(0.25), teacher or figures(0.0)
    return Recovery(*models, 1e-3, EVIL, known if curve is None else curve, 4, 4, 1024, 1.5, 7)


@pytest.mark.parametrize("metric", ["perplexity", "accuracy", "kl"])
def test_a_recovery_is_a_curve_over_tokens_with_lines_for_its_teacher_and_the_student_before(metric):
    one = recovery(metric)
    (axes,) = one.plot().axes
    teacher, before, curve = axes.lines
    assert set(teacher.get_ydata()) == {getattr(one.teacher, metric)}
    assert set(before.get_ydata()) == {getattr(one.before, metric)}
    assert [*curve.get_xdata()] == [0, 1024] and curve.get_ydata()[-1] == getattr(one.after, metric)
    html = one._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and html.count("<tr>") == 4
    assert all(f"{getattr(point, metric):.4g}" in html for point in one.curve)


def test_a_recovery_without_a_teacher_or_any_finite_point_has_a_chart():
    without = recovery("perplexity", teacher=Figures(None, 2.0), curve=[])
    assert [line.get_label() for line in without.plot().axes[0].lines] == ["before recovery", "recovered"]
    assert "0 rows" in without._repr_html_()
    assert svg(recovery_chart([(0, None), (1, float("inf"))], {"teacher": None, "before recovery": NAN}, EVIL))


def test_a_chart_is_saved_as_svg_or_png_with_the_same_bytes_every_time(tmp_path):
    for name in ("a.svg", "b.svg", "a.PNG", "b.PNG"):
        save(layers_chart(LAYERS), tmp_path / name)
    for suffix, begin in [("svg", b"<svg"), ("PNG", b"\x89PNG")]:
        content = (tmp_path / f"a.{suffix}").read_bytes()
        assert content == (tmp_path / f"b.{suffix}").read_bytes() and content.startswith(begin)


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path):
    for path, said in [
        ("a.pdf", ".svg or .png"),
        ("none/a.svg", "its folder does not exist"),
        ("plain", ".svg or .png"),
    ]:
        with pytest.raises(ValueError, match=said):
            save(layers_chart([]), tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_pages_have_no_chart_and_a_chart_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for call in (
        lambda: layers_chart([]),
        lambda: trials_chart([], 1.0),
        lambda: plot.check_picture(tmp_path / "a.svg"),
    ):
        with pytest.raises(ValueError, match=r"pip install 'prunus\[plot\]'"):
            call()
    assert layers_svg(LAYERS) == "" and "<svg" not in notebook_html("", lambda: layers_chart([]), [], [])
    write_card(tmp_path, CardFacts("name", [{"name": "a", "num_weights": 4, "num_pruned": 2, "sparsity": 0.5}]))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert "layers.svg" not in (tmp_path / "README.md").read_text()
