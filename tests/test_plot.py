"""Charts are drawn from the numbers, escape what they quote, and are written as SVG or PNG, or refused in one line."""

from xml.etree import ElementTree

import pytest

from prunus import plot
from prunus.plot import layers_chart, notebook_html, trials_chart

EVIL = '</title><script>alert("&")</script>'
NAME = "{http://www.w3.org/2000/svg}"
LAYERS = [
    {"name": "block.0.weight", "sparsity": 0.25, "mask_error": 0.2, "error": 0.1},
    {"name": EVIL, "sparsity": 0.5, "mask_error": None, "error": None, "dense": EVIL},
    {"name": "block.1.weight", "sparsity": 1.0, "mask_error": float("nan"), "error": float("inf")},
]


def shapes(chart, kind):
    return list(ElementTree.fromstring(chart.svg).iter(NAME + kind))


def test_bars_are_as_high_as_the_sparsity_and_the_errors():
    chart = layers_chart(LAYERS)
    heights = [float(bar.get("height")) for bar in shapes(chart, "rect")]
    assert heights == [0.25 * 150, 150.0, 75.0, 0.5 * 150, 150.0]  # of the errors the largest fills its chart
    assert all(0 <= float(bar.get("x")) <= chart.width - float(bar.get("width")) for bar in shapes(chart, "rect"))


@pytest.mark.parametrize("num", [0, 1, 300])
def test_any_number_of_layers_makes_a_chart(num):
    chart = layers_chart([{"name": f"layers.{i}.weight", "sparsity": i / 300} for i in range(num)])
    assert len(shapes(chart, "rect")) == num and chart.width >= 460


def test_what_a_name_holds_is_text():
    html = notebook_html(EVIL, layers_chart(LAYERS), [EVIL], [[EVIL]])
    assert "<script>" not in layers_chart(LAYERS).svg and "<script>" not in html
    assert html.count("&lt;script&gt;") >= 4


def test_long_tables_are_folded():
    chart = layers_chart([])
    assert "<details open>" in notebook_html("", chart, ["x"], [["1"]] * 12)
    assert "<details>" in notebook_html("", chart, ["x"], [["1"]] * 13)


def test_a_search_is_points_over_sparsity_and_a_line_for_the_dense_model():
    chart = trials_chart([(0.1, 4.0, True), (0.3, 5.0, False), (0.5, float("nan"), False)], 3.5)
    dots = shapes(chart, "circle")
    first, second = ((float(dot.get("cx")), float(dot.get("cy"))) for dot in dots)
    assert len(dots) == 2 and first[0] < second[0] and first[1] > second[1]
    assert trials_chart([], 0.0).svg.count("<circle") == 0


def test_a_chart_is_saved_as_svg_or_png(tmp_path):
    image = pytest.importorskip("PIL.Image")
    chart = layers_chart(LAYERS)
    chart.save(tmp_path / "a.svg")
    chart.save(str(tmp_path / "a.PNG"))
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == chart.svg == chart._repr_svg_()
    with image.open(tmp_path / "a.PNG") as picture:
        assert picture.size == (2 * chart.width, 2 * chart.height)
        assert len(set(picture.getdata())) > 4


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    chart = layers_chart([])
    for path, said in [("a.pdf", ".svg or .png"), ("none/a.svg", "its folder is not there"), ("plain", ".svg or .png")]:
        with pytest.raises(ValueError, match=said):
            chart.save(tmp_path / path)
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install pillow"):
        chart.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
